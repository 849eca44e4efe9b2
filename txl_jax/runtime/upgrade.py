"""Upgrades configs and flags of older versions, whose fields had other names."""

import sys
from collections.abc import Callable
from typing import Any, NamedTuple

from txl_jax.errors import UserError


class Change(NamedTuple):
    """Fields of older versions that one field replaces."""

    new: str
    old: dict[str, Any]  # the old fields, and their defaults
    convert: Callable[..., Any]  # from the values of the old fields to the new one's


def _same(value: Any) -> Any:
    return value


def _tuple(*values: Any) -> tuple[Any, ...]:
    return values


def _asgd_from(average: str, decay: float, first: int) -> int:
    del decay
    if average == "ema":
        raise UserError(
            'optim.average = "ema": this version has only the plain mean of '
            "optim.asgd_from; use the version that made the run"
        )
    return max(first, 1) if average == "asgd" else 0


DROPPED = str.maketrans("", "", "() ")  # of a tuple's text

CHANGES = (
    Change(
        "data.corpus",
        {"data.copy_delay": 0, "data.copy_length": 0, "data.copy_symbols": 0},
        "copying:{},{},{}".format,
    ),
    Change(
        "data.corpus",
        {"data.copying": ()},
        lambda sizes: f"copying:{sizes}".translate(DROPPED),
    ),
    Change("optim.betas", {"optim.beta1": 0.9, "optim.beta2": 0.999}, _tuple),
    Change(
        "train.order", {"train.roll": False}, lambda roll: "roll" if roll else "stream"
    ),
    Change(
        "recl.contexts",
        {"recl.start": 100, "recl.longest": 1000, "recl.step": 100},
        _tuple,
    ),
    Change(
        "compile.streams_per_chip",
        {"compile.largest_batch": False},
        lambda search: -1 if search else 0,
    ),
    Change(
        "optim.asgd_from",
        {
            "optim.average": "none",
            "optim.average_decay": 0.999,
            "optim.average_from": 0,
        },
        _asgd_from,
    ),
    Change("train.order", {"train.sentence_end": -1}, "sentences:{}".format),
    Change("train.num_steps", {"table.steps": 0}, _same),
    Change("eval.baselines", {"eval.yardsticks": False}, _same),
    Change("eval.sweep", {"eval.cold_start": 0}, "cold_start={}".format),
    Change("eval.split", {"attention.split": "valid"}, _same),
    Change("eval.split", {"recl.split": "test"}, _same),
    Change("eval.streams", {"recl.batch_size": 32}, _same),
    Change("eval.tgt_len", {"speed.tgt_len": 512}, _same),
    Change("eval.streams", {"speed.batch_size": 1}, _same),
    Change(
        "eval.sweep",
        {"speed.attention_lens": (800, 1800, 2800, 3800)},
        lambda lens: f"mem_len={lens}".translate(DROPPED).rstrip(","),
    ),
    Change("score.output", {"score.hidden": ""}, _same),
    Change("generate.prompt", {"generate.prompt_file": ""}, "@{}".format),
    Change("model.norm_init_std", {"model.cluster_init_std": 0.0}, _same),
    Change("model.mem_len", {"convert.mem_len": -1}, _same),
    Change("model.cutoffs", {"convert.cutoffs": ()}, _same),
    Change("model.clamp_len", {"convert.clamp_len": 0}, _same),
    Change("model.same_length", {"convert.same_length": False}, _same),
    Change("model.pre_lnorm", {"convert.pre_lnorm": False}, _same),
    Change("data.vocab_path", {"convert.vocab": ""}, _same),
)

# Removed fields, and the value that is fixed now.
REMOVED: dict[str, Any] = {
    "data.copy_seed": 0,
    "model.mem_dtype": "compute",
    "model.init_range": 0.0,
    "train.score_ids_from": 0,  # of copying tasks 97
    "optim.momentum": 0.0,
    "recl.threshold": 0.01,
    "recl.ratios": (1.0, 0.5, 0.1),
    "speed.rounds": 3,
    "speed.segments": 4,
    "speed.seed": 0,
    "run.connect_seconds": 300,
    "compile.evaluation": True,
    "table.scored": 100_000,
    "attention.shown": 12,
    "generate.context_at": -1,
    "generate.warmup": "",
    "generate.ext_len": 0,
    "generate.stop_token": -1,
    "generate.stream_every": 32,
    "generate.scores": True,
}
# Fields that change no result of a run that has begun: any value is harmless.
HARMLESS = (
    *("recl.", "speed.", "run.", "compile.", "table.", "attention.", "generate."),
    "model.init_range",
)

OLD = {name: change for change in CHANGES for name in change.old}


def upgrade(saved: dict[str, Any], source: str) -> dict[str, Any]:
    """Returns the sections of a saved config with the fields of this version.

    One line on stderr lists the values that moved. Raises UserError for a removed field
    whose value is not the fixed one.
    """
    sections = {
        name: dict(fields) if isinstance(fields, dict) else fields
        for name, fields in saved.items()
    }
    train = sections.get("train")
    if isinstance(train, dict) and train.get("order") != "sentences":
        train.pop("sentence_end", None)  # it had no effect
    moved = []
    for change in CHANGES:
        values = [_pop(sections, name, old) for name, old in change.old.items()]
        if values == list(change.old.values()):
            continue
        section, _, key = change.new.partition(".")
        sections.setdefault(section, {})[key] = change.convert(*values)
        moved.append(f"{' and '.join(change.old)} became {change.new}")
    data, removed = sections.get("data"), dict(REMOVED)
    if isinstance(data, dict) and str(data.get("corpus")).startswith("copying:"):
        removed["train.score_ids_from"] = 97
    for name, fixed in removed.items():
        value = _pop(sections, name, fixed)
        if value != fixed and not name.startswith(HARMLESS):
            raise _removed(name, value, fixed)
    if moved:
        print(
            f"{source} was saved by an older version: {'; '.join(moved)}",
            file=sys.stderr,
        )
    return {name: fields for name, fields in sections.items() if fields != {}}


def _pop(sections: dict[str, Any], name: str, default: Any) -> Any:
    section, _, key = name.partition(".")
    fields = sections.get(section)
    value = fields.pop(key, default) if isinstance(fields, dict) else default
    return tuple(value) if isinstance(value, list) else value


def _removed(name: str, value: Any, fixed: Any) -> UserError:
    return UserError(
        f"{name} = {value!r}: this version has removed the field, which is fixed at "
        f"{fixed!r}; use the version that made the run"
    )


def upgrade_flag(name: str, text: str) -> dict[str, str]:
    """Returns {field: text} to replace a flag of an older version; {} if removed."""
    if name in REMOVED:
        fixed = REMOVED[name]
        if not name.startswith(HARMLESS) and text.lower() != str(fixed).lower():
            raise _removed(name, text, fixed)
        print(f"--config.{name} has been removed, and is ignored", file=sys.stderr)
        return {}
    change = OLD[name]
    if len(change.old) > 1:
        raise UserError(
            f"--config.{name} has been removed: use --config.{change.new}, which "
            f"replaces {', '.join(change.old)}"
        )
    print(f"--config.{name} is now --config.{change.new}", file=sys.stderr)
    is_bool = type(change.old[name]) is bool and change.convert is not _same
    value = change.convert(text.strip().lower() == "true" if is_bool else text)
    return {change.new: str(value)}
