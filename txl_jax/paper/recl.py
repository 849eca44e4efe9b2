"""The mode `recl`: relative effective context lengths (section 4.3, Appendix C).

A good model gains less from a longer context, so every gain is relative to the best
loss of all compared models with the shorter context. l_i(c, t) is the loss of model i
on the token at position t after a context of exactly c tokens, in nats.

The losses of every model and context are saved, so that an interrupted comparison
resumes and later comparisons of the same models reuse them.

Dims: I models, C contexts, T positions, B windows, L segment, D model.
"""

import functools
import hashlib
import itertools
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh

from txl_jax.checkpoint.manifest import checksums
from txl_jax.config import Config, with_values
from txl_jax.data import vocab
from txl_jax.data.tokens import prepare
from txl_jax.errors import UserError, prefixed
from txl_jax.evaluate import reader
from txl_jax.evaluate.options import EvalConfig, evaluation_model
from txl_jax.evaluate.perplexity import ShowProgress
from txl_jax.evaluate.reader import Reader
from txl_jax.fields import Values
from txl_jax.model.config import ABSOLUTE_POSITIONS, ModelConfig
from txl_jax.model.fixed import FixedTransformerXL
from txl_jax.model.modules import Params
from txl_jax.model.segment import OneSegment, Segment
from txl_jax.paper.options import ReclConfig
from txl_jax.report.log import aligned, say
from txl_jax.report.plots import empty, save
from txl_jax.report.progress import Progress
from txl_jax.runtime.storage import Json
from txl_jax.sharding.rules import check_streams
from txl_jax.update.state import parameter_count
from txl_jax.workdir import load
from txl_jax.workdir.folder import VOCAB, find_workdir, read_config
from txl_jax.workdir.resolve import warn_of_rotations
from txl_jax.workdir.results import cached
from txl_jax.workdir.run_record import read_run, trained_on
from txl_jax.workdir.staging import write_files

EVAL_FIELDS = ("tgt_len", "mem_len", "clamp_len", "same_length")  # fields of EvalConfig
POSITIONS = 2000  # evenly spaced tokens to score
# The paper's numbers (Appendix C).
THRESHOLD = 0.01  # a smaller relative gain ends a model's context
RATIOS = (1.0, 0.5, 0.1)  # shares of the positions, the hardest first
TICKS = [0, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5]  # for the plot of gains
# (tokens, positions_T, context, progress) -> nll_T in nats.
ContextNll = Callable[[np.ndarray, np.ndarray, int, ShowProgress], np.ndarray]


class Member(NamedTuple):
    """One of the compared models; its parameters are loaded when it is scored."""

    folder: Path
    config: Config
    text: np.ndarray  # the tokens of eval.split
    sha256: str  # the text's


def measure_recl(config: ReclConfig, folder: Path, overrides: Values) -> Json:
    """Compares the models, each with the overrides; writes losses and results."""
    started = time.perf_counter()
    members = open_members(config, overrides)
    split, tokens = members[0].config.eval.split, len(members[0].text)
    positions_T = spread(tokens, config.lengths[-1], POSITIONS)
    if not len(positions_T):
        raise UserError(
            f"eval.split = {split!r} has {tokens} tokens, too few for the longest of "
            f"recl.contexts = {config.contexts}: lower it"
        )
    losses = folder / "losses"
    scored = [score(config, member, positions_T, losses) for member in members]
    nll_ICT = np.stack([nll_CT for nll_CT, _ in scored])
    result: Json = {
        "split": split,
        "sha256": members[0].sha256,
        "positions": len(positions_T),
        "contexts_tokens": config.lengths,
        **compare(nll_ICT, config.lengths, [about for _, about in scored]),
        "seconds": time.perf_counter() - started,
    }
    files = write_files(folder / "recl", result, plot_recl)
    width = max(map(len, config.workdirs))
    say(aligned("RECL", [f"r = {ratio}" for ratio in result["group_ppl"]], width))
    for row in result["members"]:
        # A plus marks a length beyond which longer contexts still helped.
        lengths = row["recl_tokens"].items()
        cells = [f"{n}{'' if row['ended'][ratio] else '+'}" for ratio, n in lengths]
        say(aligned(row["workdir"], cells, width))
    return result | files


def open_members(config: ReclConfig, overrides: Values) -> list[Member]:
    """Opens the compared models; raises UserError unless they score the same tokens."""
    if not config.workdirs:
        raise UserError("--mode=recl: give two or more as --workdirs=RUN,RUN")
    members: list[Member] = []
    for workdir in config.workdirs:
        folder = find_workdir(workdir)
        chosen = with_values(read_config(folder), overrides)
        sha256_of_splits = trained_on(folder, read_run(folder))
        with prefixed(folder):
            words = vocab.load(folder / VOCAB)
            tokens = prepare(chosen.data, words, sha256_of_splits)
        split = chosen.eval.split
        sha256 = tokens.manifest["splits"][split]["sha256"]
        members.append(Member(folder, chosen, tokens.split(split), sha256))
        if sha256 != (first := members[0]).sha256:
            raise UserError(
                f"{first.folder} and {folder} score different tokens: give models of "
                "one corpus, vocabulary and eval.split"
            )
    return members


def full_context(config: Config) -> int:
    """Returns the longest context in a model's training, 0 = any length."""
    if config.model.position not in ABSOLUTE_POSITIONS:
        return 0
    window = config.train.ext_len + config.train.tgt_len
    return min(window, config.model.n_position or window)


def score(
    config: ReclConfig, member: Member, positions_T: np.ndarray, losses: Path
) -> tuple[np.ndarray, Json]:
    """Returns a model's nll_CT and its row of the result; reuses saved losses."""
    loaded = load.load(member.folder, member.config)
    warn_of_rotations(member.config, max_keys=config.lengths[-1])
    lengths = {name: getattr(member.config.eval, name) for name in EVAL_FIELDS}
    full = full_context(member.config)
    model = checksums(loaded.params), loaded.config.model, lengths
    state = repr((model, member.sha256, positions_T.tolist()))
    folder = losses / hashlib.sha256(state.encode()).hexdigest()[:16]
    nll = make_context_nll(
        loaded.model.config, member.config.eval, loaded.params, loaded.mesh
    )

    def measure(context: int) -> Json:
        label = f"{member.folder} context {context}"
        with Progress(label, len(positions_T)) as bar:
            return {"nll_T": nll(member.text, positions_T, context, bar).tolist()}

    rows = []
    for context in config.lengths:
        length = min(context, full or context)
        saved = cached(
            folder / f"{length}.json", {}, functools.partial(measure, length)
        )
        rows.append(np.array(saved["nll_T"], np.float64))
    return np.stack(rows), {
        "workdir": str(member.folder),
        "checkpoint_step": loaded.step,
        "parameters": parameter_count(loaded.params),
        **lengths,
        "full_context_tokens": full,
        "losses": str(folder),
    }


def spread(tokens: int, longest: int, count: int) -> np.ndarray:
    """Returns `count` even positions with `longest` tokens before them, or all."""
    available = max(tokens - longest, 0)
    count = min(count, available)
    return longest + np.arange(count, dtype=np.int64) * available // max(count, 1)


@reader.from_hidden
def last_nll(
    model: FixedTransformerXL, hidden_BLD: Array, segment: OneSegment
) -> Array:
    """Returns the nll of each stream's last target, nll_B, of one segment."""
    length_B = segment.length_B
    last_B1D = reader.last(hidden_BLD, length_B)
    target_B1 = jnp.take_along_axis(segment.targets_BL, length_B[:, None] - 1, axis=1)
    return model.embedding.nll(last_B1D, target_B1)[:, 0]


def cut(window_BT: np.ndarray, L: int, count: int) -> Iterator[Segment]:
    """Yields windows [B, C + 1] as segments, to be read `count` at a time.

    A shorter first segment is padded. Since several segments in a call cannot continue
    after padding, their windows start as documents after arbitrary tokens.
    """
    before = -(window_BT.shape[1] - 1) % (count * L) if count > 1 else 0
    window_BT = np.pad(window_BT, ((0, 0), (before, 0)))
    B, C = len(window_BT), window_BT.shape[1] - 1
    first_BT = np.zeros((B, C + L), bool)
    first_BT[:, before] = count > 1
    shorter = (C - 1) % L + 1
    for begin, end in itertools.pairwise([0, *range(shorter, C + 1, L)]):
        pad = ((0, 0), (0, L - (end - begin)))
        yield Segment(
            np.pad(window_BT[:, begin:end], pad)[None],
            np.pad(window_BT[:, begin + 1 : end + 1], pad)[None],
            np.ones((1, B, L), np.float32),
            first_BT[None, :, begin : begin + L],
            np.full((1, B), end - begin, np.int32),
        )


def make_context_nll(
    model_config: ModelConfig, config: EvalConfig, params: Params, mesh: Mesh
) -> ContextNll:
    """Returns the function that scores positions after a context of a given length.

    The token at each position is predicted from exactly the `context` tokens before it,
    config.streams positions in parallel. Every window is read from an empty memory. A
    model with a memory reads it in segments of tgt_len, the first of which may be
    shorter, a model without one at once. progress counts positions.
    """
    check_streams(mesh, config.streams, "eval.streams")
    model_config, B = evaluation_model(model_config, config), config.streams

    @functools.cache
    def make_reader(L: int, n_segments: int) -> Reader:
        # A window starts as a document, which with visible zeros starts a segment.
        S = 1 if model_config.initial_memory == "zeros" else n_segments
        return Reader(model_config, last_nll, B, L, mesh, n_segments=S)

    fixed = make_reader(config.tgt_len, 1).lay_out(params)

    def nll(
        tokens: np.ndarray,
        positions_T: np.ndarray,
        context: int,
        progress: ShowProgress,
    ) -> np.ndarray:
        L = config.tgt_len if model_config.mem_len else context
        T = len(positions_T)
        parts = []
        read = make_reader(L, config.segments_per_step)
        if context <= read.n_segments // 2 * L:  # most of a call would be padding
            read = make_reader(L, 1)
        for begin in range(0, T, B):  # the last batch repeats the last position
            index_B = np.minimum(np.arange(begin, begin + B), T - 1)
            place_BT = positions_T[index_B][:, None] - np.arange(context, -1, -1)
            segments = cut(tokens[place_BT].astype(np.int32), L, read.n_segments)
            *_, nll_B = read.outputs(fixed, segments)
            parts.append(nll_B[: T - begin].astype(np.float64))
            progress(min(begin + B, T), T)
        return np.concatenate(parts)

    return nll


def hardest(baseline_T: np.ndarray, ratio: float) -> np.ndarray:
    """Returns the share of positions with the largest baseline, at least one."""
    count = max(round(ratio * len(baseline_T)), 1)
    return np.argsort(-baseline_T, kind="stable")[:count]


def gains(nll_ICT: np.ndarray, ratio: float) -> tuple[np.ndarray, np.ndarray]:
    """Returns (baseline_C, gain_IC) of each context but the last, in perplexity.

    With b(c, t) = min_i l_i(c, t) in nats, f_i(c, c') is the mean over the hardest
    positions of min(b(c, t), l_i(c', t)): a longer context never hurts. The baseline is
    exp f(c, c), the gain exp f(c, c) - exp f_i(c, c'), as in Figure 3.
    """
    baselines, longer = [], []
    for now_IT, next_IT in itertools.pairwise(nll_ICT.swapaxes(0, 1)):
        b_T = now_IT.min(axis=0)
        chosen = hardest(b_T, ratio)
        baselines.append(b_T[chosen].mean())
        longer.append(np.minimum(b_T, next_IT)[:, chosen].mean(axis=1))
    baseline_C = np.exp(np.array(baselines))
    return baseline_C, baseline_C - np.exp(np.array(longer)).T


def recl(relative_C: np.ndarray, contexts: list[int]) -> tuple[int, bool]:
    """Returns a model's effective context, and whether its gains ended there.

    relative_C: its gains as shares of the baseline, g_i(c, c'). The effective context
    is the first one from which the gain to the next is below THRESHOLD. If no gain is,
    it is the last context, a lower bound. (The paper's "go to step 1" must mean step 2:
    step 1 would start over.)
    """
    below = np.flatnonzero(relative_C < THRESHOLD)
    ended = len(below) > 0
    return contexts[below[0] if ended else -1], ended


def compare(nll_ICT: np.ndarray, contexts: list[int], rows: list[Json]) -> Json:
    """Returns RECL in tokens and the gains; rows: facts about each model."""
    columns = ("recl_tokens", "ended", "relative_gain", "ppl_gain")
    members = [{**row, **{name: {} for name in columns}} for row in rows]
    baselines: dict[str, list[float]] = {}
    for ratio in RATIOS:
        key = f"{ratio:g}"
        baseline_C, gain_IC = gains(nll_ICT, ratio)
        relative_IC = gain_IC / baseline_C
        baselines[key] = baseline_C.tolist()
        for i, row in enumerate(members):
            length, row["ended"][key] = recl(relative_IC[i], contexts)
            # The effective context cannot exceed the context that the model can read.
            row["recl_tokens"][key] = min(length, row["full_context_tokens"] or length)
            row["relative_gain"][key] = relative_IC[i].tolist()
            row["ppl_gain"][key] = gain_IC[i].tolist()
    for row, nll_CT in zip(members, nll_ICT, strict=True):
        row["ppl"] = np.exp(nll_CT.mean(axis=1)).tolist()
    return {"group_ppl": baselines, "members": members}


def plot_recl(result: Json, path: Path) -> None:
    """Draws the paper's Figures 3 (for the smallest ratio) and 4."""
    ratio = min(result["group_ppl"], key=float)
    contexts = result["contexts_tokens"]
    figure = empty(10.5, 3.6)
    relative, absolute, plain = figure.subplots(1, 3)
    for row in result["members"]:
        label = f"{row['workdir']} (RECL {row['recl_tokens'][ratio]})"
        relative.plot(contexts[1:], row["relative_gain"][ratio], ".-", label=label)
        absolute.plot(contexts[1:], row["ppl_gain"][ratio], ".-")
        plain.plot(contexts, row["ppl"], ".-")
    relative_gains = [row["relative_gain"][ratio] for row in result["members"]]
    relative.axhline(THRESHOLD, color="gray", linestyle="--", linewidth=1)
    # The scale is linear below the threshold and logarithmic above it.
    relative.set_yscale("symlog", linthresh=THRESHOLD)
    relative.set_yticks(TICKS, [f"{tick:.1%}" for tick in TICKS])
    relative.set_ylim(0, 1.2 * max([THRESHOLD, *itertools.chain(*relative_gains)]))
    title = f"gain from the previous context, r = {ratio}"
    relative.set(ylabel="relative gain", title=title)
    absolute.set(ylabel="perplexity", title=f"absolute gain, r = {ratio}")
    plain.set(ylabel="perplexity", title="perplexity, all positions")
    figure.legend(loc="outside lower center", ncols=2, fontsize=8)
    for axes in (relative, absolute, plain):
        axes.set_xlabel("context in tokens")
        axes.title.set_fontsize(9)
    save(figure, path)
