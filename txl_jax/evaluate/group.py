"""RECL of a group of workdirs: their losses, kept on disk, and what follows from them.

Dims: I models, C contexts, T positions.
"""

import dataclasses
import hashlib
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple
from zipfile import BadZipFile

import numpy as np

from txl_jax import config as configs
from txl_jax import metrics, restore
from txl_jax.config import Config
from txl_jax.data import vocab as vocabulary
from txl_jax.data.tokens import DataConfig, Tokens
from txl_jax.digest import digests
from txl_jax.errors import UserError
from txl_jax.evaluate.context import make_context_nll, spread
from txl_jax.evaluate.recl import ReclConfig, gains, recl
from txl_jax.model.config import ABSOLUTE
from txl_jax.report.recl import plot_recl
from txl_jax.report.writer import Progress, say, to_json
from txl_jax.workdir import CONFIG, VOCAB, find

LOSSES = "losses"
PICTURE = "recl.png"
RESULT = "recl.json"


class Member(NamedTuple):
    """One model of the group; its parameters are read when its losses are."""

    name: str
    folder: Path
    config: Config
    tokens: Tokens


def run(
    how: ReclConfig,
    folder: Path,
    overrides: dict[str, str],
    prepare: Callable[[DataConfig], Tokens],
) -> dict[str, Any]:
    """Compares the models of how.workdirs, and leaves losses and results in `folder`.

    overrides: config fields for all of them, such as eval.mem_len.
    """
    began = time.perf_counter()
    members = open_group(how, overrides, prepare)
    tokens = members[0].tokens.split(how.split)
    positions_T = spread(len(tokens), how.longest, how.positions)
    if not len(positions_T):
        raise UserError(
            f"recl.split = {how.split!r} has {len(tokens)} tokens, none of them after "
            f"recl.longest = {how.longest}: lower it"
        )
    scored = [score(how, member, positions_T, folder / LOSSES) for member in members]
    nll_ICT = np.stack([nll_CT for nll_CT, _ in scored])
    result = {
        "split": how.split,
        "sha256": members[0].tokens.manifest["splits"][how.split]["sha256"],
        "positions": len(positions_T),
        "first_position": int(positions_T[0]),
        "last_position": int(positions_T[-1]),
        "step_tokens": how.step,
        "threshold": how.threshold,
        "contexts_tokens": how.contexts,
        **measure(how, nll_ICT, [about for _, about in scored]),
        "losses": str(folder / LOSSES),
        "picture": str(folder / PICTURE),
        "seconds": time.perf_counter() - began,
    }
    plot_recl(result, folder / PICTURE)
    (folder / RESULT).write_text(to_json(result, indent=2) + "\n", "utf-8")
    say(table(result))
    return result


def open_group(
    how: ReclConfig,
    overrides: dict[str, str],
    prepare: Callable[[DataConfig], Tokens],
) -> list[Member]:
    """Returns the members; refuses those that do not score the same tokens."""
    if not how.workdirs:
        raise UserError(
            "recl compares models: give --workdirs=RUN,RUN with two or more"
        )
    members: list[Member] = []
    for name in short_names(how.workdirs):
        folder = find(how.workdirs[len(members)])
        fields = configs.load_json(folder / CONFIG)
        for field, text in overrides.items():
            configs.override(fields, field, text)
        config = configs.parse(fields)
        member = Member(name, folder, config, prepare(config.data))
        members.append(member)
        refuse_other_tokens(how.split, members[0], member)
    return members


def short_names(workdirs: tuple[str, ...]) -> list[str]:
    """Returns the folders' own names, or the whole paths where two have the same."""
    names = [Path(given).name for given in workdirs]
    return names if len(set(names)) == len(names) else list(workdirs)


def refuse_other_tokens(split: str, one: Member, other: Member) -> None:
    """Raises UserError unless both models score the same tokens of the same split."""
    vocabs = [vocabulary.load(each.folder / VOCAB) for each in (one, other)]
    shas = [each.tokens.manifest["splits"][split]["sha256"] for each in (one, other)]
    reason = ""
    if vocabs[0].to_json() != vocabs[1].to_json():
        reason = f"vocabularies of {len(vocabs[0])} and {len(vocabs[1])} types"
    elif shas[0] != shas[1]:
        corpora = [each.tokens.manifest["corpus"] for each in (one, other)]
        reason = f"{split} splits of corpora {corpora[0]!r} and {corpora[1]!r}"
    if reason:
        raise UserError(
            f"{one.folder} and {other.folder} have different {reason}: a group scores "
            "the same tokens, so leave one of them out"
        )


def full_context(config: Config) -> int:
    """Returns the most tokens that a model can be fed at once, 0 = any number.

    Absolute positions were trained for the places of a training window and no more: its
    length is that of the paper's Transformer, 128.
    """
    if config.model.position not in ABSOLUTE:
        return 0
    window = config.train.ext_len + config.train.tgt_len
    return min(window, config.model.n_position or window)


def score(
    how: ReclConfig, member: Member, positions_T: np.ndarray, losses: Path
) -> tuple[np.ndarray, dict[str, Any]]:
    """Returns (nll_CT of a member, what it is), from disk where it is there already."""
    loaded = restore.load(member.folder, member.config)
    eval_fields = ("tgt_len", "mem_len", "clamp_len", "same_length")
    own = {name: getattr(member.config.eval, name) for name in eval_fields}
    full = full_context(member.config)
    identity = {
        "checkpoint_step": loaded.step,
        "parameters_digest": sorted(digests(loaded.params).items()),
        "model": dataclasses.asdict(loaded.model.config),
        "eval": own,
        "sha256": member.tokens.manifest["splits"][how.split]["sha256"],
        "positions_sha256": hashlib.sha256(positions_T.tobytes()).hexdigest(),
    }
    said = json.dumps(identity, sort_keys=True)
    folder = losses / hashlib.sha256(said.encode()).hexdigest()[:16]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "identity.json").write_text(said + "\n", "utf-8")
    nll = make_context_nll(
        loaded.model.config,
        member.config.eval,
        loaded.params,
        how.batch_size,
        loaded.mesh,
    )
    tokens = member.tokens.split(how.split)
    rows = []
    for context in how.contexts:
        fed = min(context, full or context)
        path = folder / f"{fed}.npz"
        nll_T = read(path, positions_T)
        if nll_T is None:
            with Progress(f"{member.name} context {fed}", len(positions_T)) as bar:
                nll_T = nll(tokens, positions_T, fed, bar)
            write(path, positions_T, nll_T)
        rows.append(nll_T)
    about = {
        "name": member.name,
        "workdir": str(member.folder),
        "checkpoint_step": loaded.step,
        "parameters": metrics.parameter_count(loaded.params),
        **own,
        "full_context_tokens": full,
        "losses": str(folder),
    }
    return np.stack(rows), about


def read(path: Path, positions_T: np.ndarray) -> np.ndarray | None:
    """Returns the losses that `write` left, or None."""
    try:
        with path.open("rb") as file, np.load(file) as kept:
            nll_T = kept["nll_T"]
            return nll_T if np.array_equal(kept["positions_T"], positions_T) else None
    except (OSError, ValueError, KeyError, EOFError, BadZipFile):
        return None


def write(path: Path, positions_T: np.ndarray, nll_T: np.ndarray) -> None:
    """Keeps the losses of one context; a kill leaves all of the file or none."""
    fresh = path.with_suffix(".tmp")
    with fresh.open("wb") as file:
        np.savez(file, positions_T=positions_T, nll_T=nll_T)
    fresh.replace(path)


def measure(
    how: ReclConfig, nll_ICT: np.ndarray, about: list[dict[str, Any]]
) -> dict[str, Any]:
    """Returns the members with RECL and gains for each ratio, in tokens and ppl."""
    baselines: dict[str, list[float]] = {}
    rows = [
        {**each, "recl_tokens": {}, "ended": {}, "relative_gain": {}, "ppl_gain": {}}
        for each in about
    ]
    for ratio in how.ratios:
        key = f"{ratio:g}"
        found = gains(nll_ICT, ratio)
        baselines[key] = found.baseline_C.tolist()
        lengths = recl(nll_ICT, how.contexts, ratio, how.threshold)
        for i, (row, (length, ended)) in enumerate(zip(rows, lengths, strict=True)):
            # One that is fed no more than its full context has no longer one.
            full = row["full_context_tokens"] or length
            row["recl_tokens"][key] = min(length, full)
            row["ended"][key] = ended
            row["relative_gain"][key] = found.relative_IC[i].tolist()
            row["ppl_gain"][key] = found.absolute_IC[i].tolist()
    for row, nll_CT in zip(rows, nll_ICT, strict=True):
        row["ppl"] = np.exp(nll_CT.mean(axis=1)).tolist()
    return {"group_ppl": baselines, "members": rows}


def table(result: dict[str, Any]) -> str:
    """Returns RECL by model and ratio as text; + says that it did not end."""
    ratios = list(result["group_ppl"])
    width = max(len(row["name"]) for row in result["members"])
    lines = [" ".join([f"{'RECL, r =':<{width}}", *(f"{r:>6}" for r in ratios)])]
    for row in result["members"]:
        cells = [
            f"{row['recl_tokens'][r]}{'' if row['ended'][r] else '+'}" for r in ratios
        ]
        lines.append(" ".join([f"{row['name']:<{width}}", *(f"{x:>6}" for x in cells)]))
    return "\n".join(lines)
