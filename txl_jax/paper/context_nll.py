"""The relative effective context length (RECL) of several models (section 4.3, App. C).

A good model gains less from a longer context, so every gain is relative to the best
loss of all compared models with the shorter context. l_i(c, t) is the loss of model i
on the token at position t after a context of exactly c tokens, in nats.

Dims: I models, C contexts, T positions, B windows, L segment, D model.
"""

import functools
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh

from txl_jax.evaluate import reader
from txl_jax.evaluate.options import EvalConfig, evaluation_model
from txl_jax.evaluate.reader import Reader, Traced
from txl_jax.model.config import ModelConfig
from txl_jax.model.segment import Segment
from txl_jax.model.txl import TransformerXL
from txl_jax.report.plots import empty
from txl_jax.sharding.rules import check_streams

# The paper's numbers (Appendix C).
THRESHOLD = 0.01  # a smaller relative gain ends a model's context
RATIOS = (1.0, 0.5, 0.1)  # shares of the positions, the hardest first
TICKS = [0, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5]  # of the plotted gains


def spread(tokens: int, longest: int, count: int) -> np.ndarray:
    """Returns `count` even positions with `longest` tokens before them, 0 = all."""
    available = max(tokens - longest, 0)
    count = min(count or available, available)
    return longest + np.arange(count, dtype=np.int64) * available // max(count, 1)


@reader.from_hidden
def last_nll(model: TransformerXL, hidden_BLD: Array, segment: Traced) -> Array:
    """Returns the nll of each stream's last target, nll_B, of one segment."""
    length_B = segment.length_SB
    last_B1D = reader.last(hidden_BLD, length_B)
    target_B1 = jnp.take_along_axis(segment.targets_SBL, length_B[:, None] - 1, axis=1)
    return model.embedding.nll(last_B1D, target_B1)[:, 0]


def cut(window_BT: np.ndarray, L: int) -> Iterator[Segment]:
    """Yields windows [B, C + 1] as segments; a shorter first one is padded."""
    B, C = len(window_BT), window_BT.shape[1] - 1
    shorter = (C - 1) % L + 1
    for begin, end in itertools.pairwise([0, *range(shorter, C + 1, L)]):
        pad = ((0, 0), (0, L - (end - begin)))
        yield Segment(
            np.pad(window_BT[:, begin:end], pad)[None],
            np.pad(window_BT[:, begin + 1 : end + 1], pad)[None],
            np.ones((1, B, L), np.float32),
            np.zeros((1, B, L), bool),
            np.full((1, B), end - begin, np.int32),
        )


def make_context_nll(
    model_config: ModelConfig, config: EvalConfig, params: Any, mesh: Mesh
) -> Callable[..., np.ndarray]:
    """Returns nll(tokens, positions_T, context, progress) -> nll_T: l_i(c, t).

    The token at each position is predicted from exactly the `context` tokens before it,
    config.streams positions in parallel. Every window is read from an empty memory: by
    a model with a memory in segments of tgt_len, of which the first may be shorter, by
    one without at once. progress(done, total) counts positions.
    """
    check_streams(mesh, config.streams, "eval.streams")
    model_config, B = evaluation_model(model_config, config), config.streams

    @functools.cache
    def make_reader(L: int) -> Reader:
        return Reader(model_config, last_nll, B, L, mesh)

    params = make_reader(config.tgt_len).unstack(params)

    def nll(
        tokens: np.ndarray,
        positions_T: np.ndarray,
        context: int,
        progress: Callable[[int, int], None],
    ) -> np.ndarray:
        L, T = config.tgt_len if config.mem_len else context, len(positions_T)
        parts = []
        for begin in range(0, T, B):
            # The last batch repeats its last position.
            index_B = np.minimum(np.arange(begin, begin + B), T - 1)
            place_BT = positions_T[index_B][:, None] - np.arange(context, -1, -1)
            segments = cut(tokens[place_BT].astype(np.int32), L)
            *_, nll_SB = make_reader(L).outputs(params, segments)
            parts.append(np.asarray(nll_SB[0], np.float64)[: T - begin])
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


def short_names(workdirs: list[str]) -> list[str]:
    """Returns the last part of each path in which all of them differ."""
    parts = zip(*(reversed(Path(workdir).parts) for workdir in workdirs), strict=False)
    differ = (list(names) for names in parts if len({*names}) == len(workdirs))
    return next(differ, workdirs)


def plot_recl(result: dict[str, Any], path: Path) -> None:
    """Plots the paper's Figures 3 and 4: gains from a longer context, and perplexities.

    `result` is the JSON of `--mode=recl`. The gains are over the hardest positions (the
    smallest ratio), the perplexity is over all positions.
    """
    ratio = min(result["group_ppl"], key=float)
    contexts = result["contexts_tokens"]
    figure = empty(10.5, 3.6)
    relative, absolute, plain = figure.subplots(1, 3)
    names = short_names([row["workdir"] for row in result["members"]])
    for name, row in zip(names, result["members"], strict=True):
        label = f"{name} (RECL {row['recl_tokens'][ratio]})"
        relative.plot(contexts[1:], row["relative_gain"][ratio], ".-", label=label)
        absolute.plot(contexts[1:], row["ppl_gain"][ratio], ".-", label=label)
        plain.plot(contexts, row["ppl"], ".-", label=name)
    relative_gains = [row["relative_gain"][ratio] for row in result["members"]]
    relative.axhline(THRESHOLD, color="gray", linestyle="--", linewidth=1)
    # The scale is linear below the threshold and logarithmic above it.
    relative.set_yscale("symlog", linthresh=THRESHOLD)
    relative.set_yticks(TICKS, [f"{tick:.1%}" for tick in TICKS])
    relative.set_ylim(0, 1.2 * max([THRESHOLD, *itertools.chain(*relative_gains)]))
    relative.set(
        ylabel="relative gain", title=f"gain from the previous context, r = {ratio}"
    )
    absolute.set(ylabel="perplexity", title=f"absolute gain, r = {ratio}")
    plain.set(ylabel="perplexity", title="perplexity, all positions")
    handles, labels = relative.get_legend_handles_labels()
    figure.legend(
        handles, labels, loc="outside lower center", ncols=len(labels), fontsize=8
    )
    for axes in (relative, absolute, plain):
        axes.set_xlabel("context in tokens")
        axes.title.set_fontsize(9)
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=100)
