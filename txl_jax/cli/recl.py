"""The mode `recl`: the relative effective context length of several models.

The losses of every model and context are kept on disk, so that an interrupted
comparison resumes and later comparisons of the same models reuse them.

Dims: I models, C contexts, T positions.
"""

import dataclasses
import hashlib
import json
import time
from pathlib import Path
from typing import Any, NamedTuple
from zipfile import BadZipFile

import numpy as np

from txl_jax import metrics
from txl_jax.checkpoint.checksum import checksums
from txl_jax.cli.evaluate import write_files
from txl_jax.cli.prepare import prepare
from txl_jax.config import Config, load_json, override, parse
from txl_jax.data import vocab
from txl_jax.data.tokens import Tokens
from txl_jax.errors import UserError
from txl_jax.evaluate.context import make_context_nll, spread
from txl_jax.evaluate.options import ReclConfig
from txl_jax.evaluate.recl import RATIOS, THRESHOLD, gains, plot_recl, recl
from txl_jax.model.config import ABSOLUTE_POSITIONS
from txl_jax.report.log import say
from txl_jax.report.progress import Progress
from txl_jax.runtime import storage
from txl_jax.workdir import load
from txl_jax.workdir.folder import CONFIG, VOCAB, find

LOSSES = "losses"


class Member(NamedTuple):
    """One of the compared models; its parameters are loaded when it is scored."""

    name: str
    folder: Path
    config: Config
    tokens: Tokens

    def split(self) -> np.ndarray:
        """Returns the tokens of eval.split."""
        return self.tokens.split(self.config.eval.split)

    @property
    def sha256(self) -> str:
        """The checksum of eval.split."""
        sha256: str = self.tokens.manifest["splits"][self.config.eval.split]["sha256"]
        return sha256


def run(config: ReclConfig, folder: Path, overrides: dict[str, str]) -> dict[str, Any]:
    """Compares the models of recl.workdirs; writes losses and results to `folder`.

    overrides: config fields for all models, such as eval.mem_len.
    """
    started = time.perf_counter()
    members = open_members(config, overrides)
    tokens = members[0].split()
    positions_T = spread(len(tokens), config.lengths[-1], config.positions)
    if not len(positions_T):
        raise UserError(
            f"eval.split = {members[0].config.eval.split!r} has {len(tokens)} tokens, "
            f"too few for the longest of recl.contexts = {config.contexts}: lower it"
        )
    scored = [score(config, member, positions_T, folder / LOSSES) for member in members]
    nll_ICT = np.stack([nll_CT for nll_CT, _ in scored])
    result = {
        "split": members[0].config.eval.split,
        "sha256": members[0].sha256,
        "positions": len(positions_T),
        "first_position": int(positions_T[0]),
        "last_position": int(positions_T[-1]),
        "step_tokens": config.contexts[2],
        "threshold": THRESHOLD,
        "contexts_tokens": config.lengths,
        **measure(config, nll_ICT, [about for _, about in scored]),
        "losses": str(folder / LOSSES),
        "seconds": time.perf_counter() - started,
    }
    files = write_files(folder / "recl", result, plot_recl)
    say(table(result))
    return result | files


def open_members(config: ReclConfig, overrides: dict[str, str]) -> list[Member]:
    """Opens the compared models; raises UserError unless they score the same tokens."""
    if not config.workdirs:
        raise UserError(
            "--mode=recl compares models: give two or more as --workdirs=RUN,RUN"
        )
    members: list[Member] = []
    names = short_names(config.workdirs)
    for name, workdir in zip(names, config.workdirs, strict=True):
        folder = find(workdir)
        fields = load_json(folder / CONFIG)
        for field, text in overrides.items():
            override(fields, field, text)
        parsed = parse(fields)
        member = Member(name, folder, parsed, prepare(parsed.data))
        members.append(member)
        refuse_other_tokens(members[0], member)
    return members


def short_names(workdirs: tuple[str, ...]) -> list[str]:
    """Returns the folders' names, or their paths if two names are equal."""
    names = [Path(workdir).name for workdir in workdirs]
    return names if len(set(names)) == len(names) else list(workdirs)


def refuse_other_tokens(one: Member, other: Member) -> None:
    """Raises UserError unless both models score the same tokens."""
    vocabs = [vocab.load(each.folder / VOCAB) for each in (one, other)]
    reason = ""
    if vocabs[0].to_json() != vocabs[1].to_json():
        reason = f"vocabularies of {len(vocabs[0])} and {len(vocabs[1])} types"
    elif one.sha256 != other.sha256:
        texts = [
            f"{each.config.eval.split} of {each.tokens.manifest['corpus']!r}"
            for each in (one, other)
        ]
        reason = f"splits, {' and '.join(texts)}"
    if reason:
        raise UserError(
            f"{one.folder} and {other.folder} have different {reason}: only models "
            "that score the same tokens can be compared, so remove one"
        )


def full_context(config: Config) -> int:
    """Returns the longest context that a model can read, 0 = any length.

    Absolute positions are trained only up to the length of a training window, which is
    128 for the paper's Transformer.
    """
    if config.model.position not in ABSOLUTE_POSITIONS:
        return 0
    window = config.train.ext_len + config.train.tgt_len
    return min(window, config.model.n_position or window)


def score(
    config: ReclConfig, member: Member, positions_T: np.ndarray, losses: Path
) -> tuple[np.ndarray, dict[str, Any]]:
    """Returns nll_CT of one model and its row of the result; reuses saved losses."""
    loaded = load.load(member.folder, member.config)
    names = ("tgt_len", "mem_len", "clamp_len", "same_length")
    lengths = {name: getattr(member.config.eval, name) for name in names}
    full = full_context(member.config)
    folder = losses / store_identity(
        losses,
        {
            "checkpoint_step": loaded.step,
            "parameters_digest": sorted(checksums(loaded.params).items()),
            "model": dataclasses.asdict(loaded.model.config),
            "eval": lengths,
            "sha256": member.sha256,
            "positions_sha256": hashlib.sha256(positions_T.tobytes()).hexdigest(),
        },
    )
    model = loaded.model.config, member.config.eval, loaded.params
    context_nll = make_context_nll(*model, loaded.mesh)
    tokens = member.split()
    rows = []
    for context in config.lengths:
        length = min(context, full or context)
        path = folder / f"{length}.npz"
        nll_T = read(path, positions_T)
        if nll_T is None:
            label = f"{member.name} context {length}"
            with Progress(label, len(positions_T)) as bar:
                nll_T = context_nll(tokens, positions_T, length, bar)
            write(path, positions_T, nll_T)
        rows.append(nll_T)
    return np.stack(rows), {
        "name": member.name,
        "workdir": str(member.folder),
        "checkpoint_step": loaded.step,
        "parameters": metrics.parameter_count(loaded.params),
        **lengths,
        "full_context_tokens": full,
        "losses": str(folder),
    }


def store_identity(losses: Path, identity: dict[str, Any]) -> str:
    """Creates the folder of losses that depend on `identity`; returns its name."""
    text = json.dumps(identity, sort_keys=True)
    name = hashlib.sha256(text.encode()).hexdigest()[:16]
    (losses / name).mkdir(parents=True, exist_ok=True)
    (losses / name / "identity.json").write_text(text + "\n", "utf-8")
    return name


def read(path: Path, positions_T: np.ndarray) -> np.ndarray | None:
    """Returns the losses in a file of `write`; None if it is missing or damaged."""
    try:
        with path.open("rb") as file, np.load(file) as kept:
            nll_T = kept["nll_T"]
            return nll_T if np.array_equal(kept["positions_T"], positions_T) else None
    except (OSError, ValueError, KeyError, EOFError, BadZipFile):
        return None


def write(path: Path, positions_T: np.ndarray, nll_T: np.ndarray) -> None:
    """Writes the losses of one context atomically."""

    def save(path: Path) -> None:
        with path.open("wb") as file:
            np.savez(file, positions_T=positions_T, nll_T=nll_T)

    storage.replace(path, save)


def measure(
    config: ReclConfig, nll_ICT: np.ndarray, rows: list[dict[str, Any]]
) -> dict[str, Any]:
    """Returns RECL in tokens and the gains in perplexity, for each model and ratio."""
    columns = ("recl_tokens", "ended", "relative_gain", "ppl_gain")
    members = [{**row, **{name: {} for name in columns}} for row in rows]
    baselines: dict[str, list[float]] = {}
    for ratio in RATIOS:
        key = f"{ratio:g}"
        gained = gains(nll_ICT, ratio)
        baselines[key] = gained.baseline_C.tolist()
        lengths = recl(nll_ICT, config.lengths, ratio, THRESHOLD)
        for i, (row, (length, ended)) in enumerate(zip(members, lengths, strict=True)):
            # The effective context cannot exceed what the model can read.
            row["recl_tokens"][key] = min(length, row["full_context_tokens"] or length)
            row["ended"][key] = ended
            row["relative_gain"][key] = gained.relative_IC[i].tolist()
            row["ppl_gain"][key] = gained.absolute_IC[i].tolist()
    for row, nll_CT in zip(members, nll_ICT, strict=True):
        row["ppl"] = np.exp(nll_CT.mean(axis=1)).tolist()
    return {"group_ppl": baselines, "members": members}


def table(result: dict[str, Any]) -> str:
    """Returns RECL by model and ratio as text; + marks a lower bound."""
    ratios = list(result["group_ppl"])
    width = max(len(row["name"]) for row in result["members"])
    lines = [" ".join([f"{'RECL, r =':<{width}}", *(f"{r:>6}" for r in ratios)])]
    for row in result["members"]:
        cells = [
            f"{row['recl_tokens'][r]}{'' if row['ended'][r] else '+'}" for r in ratios
        ]
        lines.append(" ".join([f"{row['name']:<{width}}", *(f"{x:>6}" for x in cells)]))
    return "\n".join(lines)
