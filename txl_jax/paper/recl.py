"""The mode `recl`: the relative effective context length of several models.

The losses of every model and context are kept on disk, so that an interrupted
comparison resumes and later comparisons of the same models reuse them.
"""

import hashlib
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np

from txl_jax import metrics
from txl_jax.checkpoint.array_checksum import checksums
from txl_jax.config import Config, load_json, override, parse
from txl_jax.data import vocab
from txl_jax.data.tokens import prepare
from txl_jax.errors import UserError
from txl_jax.model.config import ABSOLUTE_POSITIONS
from txl_jax.paper.context_nll import make_context_nll, spread
from txl_jax.paper.gains import compare, plot_recl
from txl_jax.paper.options import ReclConfig
from txl_jax.report.log import Json, aligned, say
from txl_jax.report.progress import Progress
from txl_jax.workdir import load
from txl_jax.workdir.arrays import read_arrays, save_arrays
from txl_jax.workdir.fit import warn_of_rotations
from txl_jax.workdir.folder import CONFIG, VOCAB, find
from txl_jax.workdir.staging import write_files

LENGTHS = ("tgt_len", "mem_len", "clamp_len", "same_length")  # of EvalConfig


class Member(NamedTuple):
    """One of the compared models; its parameters are loaded when it is scored."""

    folder: Path
    config: Config
    text: np.ndarray  # the tokens of eval.split
    sha256: str  # of the text


def run(config: ReclConfig, folder: Path, overrides: dict[str, str]) -> Json:
    """Compares the models, all with the overrides; writes losses and results."""
    started = time.perf_counter()
    members = open_members(config, overrides)
    split, tokens = members[0].config.eval.split, len(members[0].text)
    positions_T = spread(tokens, config.lengths[-1], config.positions)
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
        # A plus marks a length at which longer contexts still helped.
        lengths = row["recl_tokens"].items()
        cells = [f"{n}{'' if row['ended'][ratio] else '+'}" for ratio, n in lengths]
        say(aligned(row["workdir"], cells, width))
    return result | files


def open_members(config: ReclConfig, overrides: dict[str, str]) -> list[Member]:
    """Opens the compared models; raises UserError unless they score the same tokens."""
    if not config.workdirs:
        raise UserError("--mode=recl: give two or more as --workdirs=RUN,RUN")
    members: list[Member] = []
    for workdir in config.workdirs:
        folder = find(workdir)
        fields = load_json(folder / CONFIG)
        for field, value in overrides.items():
            override(fields, field, value)
        parsed = parse(fields)
        tokens = prepare(parsed.data, vocab.load(folder / VOCAB))
        split = parsed.eval.split
        sha256 = tokens.manifest["splits"][split]["sha256"]
        members.append(Member(folder, parsed, tokens.split(split), sha256))
        if sha256 != (first := members[0]).sha256:
            raise UserError(
                f"{first.folder} and {folder} score different tokens: give models of "
                "one corpus, vocabulary and eval.split"
            )
    return members


def full_context(config: Config) -> int:
    """Returns the longest context that a model was trained with, 0 = any length."""
    if config.model.position not in ABSOLUTE_POSITIONS:
        return 0
    window = config.train.ext_len + config.train.tgt_len
    return min(window, config.model.n_position or window)


def score(
    config: ReclConfig, member: Member, positions_T: np.ndarray, losses: Path
) -> tuple[np.ndarray, Json]:
    """Returns nll_CT of one model and its row of the result; reuses saved losses."""
    loaded = load.load(member.folder, member.config)
    warn_of_rotations(member.config, most=config.lengths[-1])
    lengths = {name: getattr(member.config.eval, name) for name in LENGTHS}
    full = full_context(member.config)
    model = checksums(loaded.params), loaded.config.model, lengths
    state = repr((model, member.sha256, positions_T.tolist()))
    folder = losses / hashlib.sha256(state.encode()).hexdigest()[:16]
    folder.mkdir(parents=True, exist_ok=True)
    nll = make_context_nll(
        loaded.model.config, member.config.eval, loaded.params, loaded.mesh
    )
    rows = []
    for context in config.lengths:
        length = min(context, full or context)
        path = folder / f"{length}.npz"
        if (nll_T := read_arrays(path).get("nll_T")) is None:
            label = f"{member.folder} context {length}"
            with Progress(label, len(positions_T)) as bar:
                nll_T = nll(member.text, positions_T, length, bar)
            save_arrays(path, {"nll_T": nll_T})
        rows.append(nll_T)
    return np.stack(rows), {
        "workdir": str(member.folder),
        "checkpoint_step": loaded.step,
        "parameters": metrics.parameter_count(loaded.params),
        **lengths,
        "full_context_tokens": full,
        "losses": str(folder),
    }
