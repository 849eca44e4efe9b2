"""Upgrades configs and flags of older versions, whose fields had other names."""

import functools
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

from txl_jax.errors import UserError


def _same(value: Any) -> Any:
    return value


class Change(NamedTuple):
    """Fields of older versions that one field replaces."""

    new: str
    old: dict[str, Any]  # the old fields, and their defaults
    convert: Callable[..., Any] = _same  # from the old fields' values to the new one's
    also: dict[str, Any] = {}  # further fields, and the values that they are set to


def _items(values: Any) -> str:
    return str(values).translate(str.maketrans("", "", "() ")).rstrip(",")


def _remat_policy(remat: bool) -> str:
    return "full" if remat else "none"


def _ext_len(window: Any) -> Any:
    return int(window) - 1 if str(window).isdigit() else window


def _asgd_from(average: str, first: int, _decay: float) -> int:
    if average == "ema":
        raise UserError(
            'optim.average = "ema": this version has only the plain mean of '
            "optim.asgd_from; use the version that made the run"
        )
    return max(first, 1) if average == "asgd" else 0


_COPY = {"data.copy_delay": 0, "data.copy_length": 0, "data.copy_symbols": 0}
_CONTEXTS = {"recl.start": 100, "recl.longest": 1000, "recl.step": 100}
_LENS = {"speed.attention_lens": (800, 1800, 2800, 3800)}
_SLIDES = {"eval.tgt_len": 1, "eval.warm_start": True}
_NO_MEMORY = {"eval.mem_len": 0, "eval.same_length": False}
_AVERAGE = {"optim.average": "none", "optim.average_from": 0}

CHANGES = (
    Change("model.remat_policy", {"model.remat": False}, _remat_policy),
    Change("train.num_steps", {"table.steps": 0}),
    Change("eval.baselines", {"eval.yardsticks": False}),
    Change("eval.split", {"attention.split": "valid"}),
    Change("eval.split", {"recl.split": "test"}),
    Change("eval.streams", {"recl.batch_size": 32}),
    Change("eval.tgt_len", {"speed.tgt_len": 512}),
    Change("eval.streams", {"speed.batch_size": 1}),
    Change("score.output", {"score.hidden": ""}),
    Change("model.norm_init_std", {"model.cluster_init_std": 0.0}),
    Change("model.mem_len", {"convert.mem_len": -1}),
    Change("model.cutoffs", {"convert.cutoffs": ()}),
    Change("model.clamp_len", {"convert.clamp_len": 0}),
    Change("model.same_length", {"convert.same_length": False}),
    Change("model.pre_lnorm", {"convert.pre_lnorm": False}),
    Change("data.vocab_path", {"convert.vocab": ""}),
    Change("data.corpus", _COPY, "copying:{},{},{}".format),
    Change("data.corpus", {"data.copying": ()}, lambda x: f"copying:{_items(x)}"),
    Change("eval.sweep", {"eval.cold_start": 0}, "cold_start={}".format),
    Change("eval.ext_len", {"eval.sliding_window": 0}, _ext_len, _SLIDES | _NO_MEMORY),
    Change("eval.mem_len", {"attention.span": 640}),
    Change("eval.sweep", _LENS, lambda x: f"mem_len={_items(x)}"),
    Change("generate.prompt", {"generate.prompt_file": ""}, "@{}".format),
    Change("optim.betas", {"optim.beta1": 0.9, "optim.beta2": 0.999}, lambda *x: x),
    Change("optim.asgd_from", _AVERAGE | {"optim.average_decay": 0.999}, _asgd_from),
    Change("recl.contexts", _CONTEXTS, lambda *x: x),
    Change("train.order", {"train.roll": False}, lambda x: "roll" if x else "stream"),
    Change("train.order", {"train.sentence_end": -1}, "sentences:{}".format),
    Change("compile.streams_per_chip", {"compile.largest_batch": False}, lambda x: -x),
)

# Removed fields, and the value that is fixed now; another value is refused.
REMOVED: dict[str, Any] = {
    "data.copy_seed": 0,
    "data.min_count": 0,
    "model.mem_dtype": "compute",
    "train.score_ids_from": 0,  # of copying tasks 97
    "optim.momentum": 0.0,
}
# Removed fields of any value, because they change no result of a run that has begun.
IGNORED = (
    *("model.init_range", "run.connect_seconds", "run.tensorboard"),
    *("compile.evaluation", "table.scored", "attention.shown"),
    *("recl.threshold", "recl.ratios"),
    *("speed.rounds", "speed.segments", "speed.seed"),
    *("generate.context_at", "generate.warmup", "generate.ext_len"),
    *("generate.stop_token", "generate.stream_every", "generate.scores"),
)

# Modes that only read a run: what was saved for them must not change other modes.
READERS = ("attention", "recl", "speed", "table")

OLD = {name: change for change in CHANGES for name in change.old}
NAMES = (*OLD, *REMOVED, *IGNORED)  # of the fields of older versions


def upgrade(saved: dict[str, Any], source: str) -> dict[str, Any]:
    """Returns the sections of a saved config with the fields of this version.

    One line on stderr lists the values that moved. A value saved for a mode of READERS
    is dropped if its field moved to another section. Raises UserError for a removed
    field whose value is not the fixed one.
    """
    sections = {
        name: dict(fields) if isinstance(fields, dict) else fields
        for name, fields in saved.items()
    }
    train = sections.get("train")
    if isinstance(train, dict) and train.get("order") != "sentences":
        train.pop("sentence_end", None)  # it had no effect
    _write_ids_as_text(sections)
    moved = []
    for change in CHANGES:
        values = [_pop(sections, name, old) for name, old in change.old.items()]
        section, _, key = change.new.partition(".")
        of_reader = all(name.startswith(READERS) for name in change.old)
        if values == list(change.old.values()) or of_reader and section not in READERS:
            continue
        sections.setdefault(section, {})[key] = change.convert(*values)
        for name, value in change.also.items():
            other, _, key = name.partition(".")
            sections.setdefault(other, {})[key] = value
        moved.append(f"{' and '.join(change.old)} became {change.new}")
    data, removed = sections.get("data"), dict(REMOVED)
    if isinstance(data, dict) and str(data.get("corpus")).startswith("copying:"):
        removed["train.score_ids_from"] = 97
    for name, fixed in removed.items():
        if (value := _pop(sections, name, fixed)) != fixed:
            raise _removed(name, value, fixed)
    for name in IGNORED:
        _pop(sections, name, None)
    if moved:
        _say_once(f"{source} was saved by an older version: {'; '.join(moved)}")
    return {name: fields for name, fields in sections.items() if fields != {}}


@functools.cache
def _say_once(line: str) -> None:
    """Prints a line once, although a command reads some files several times."""
    print(line, file=sys.stderr)


def _write_ids_as_text(sections: dict[str, Any]) -> None:
    """Converts the ids of tokens that may be texts now."""
    for section in ("train", "eval"):
        fields = sections.get(section)
        if isinstance(fields, dict) and type(fields.get("reset_memory_at")) is int:
            fields["reset_memory_at"] = str(fields["reset_memory_at"])


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
    if name not in OLD:
        fixed = REMOVED.get(name, text)
        if text.lower() != str(fixed).lower():
            raise _removed(name, text, fixed)
        print(f"--config.{name} has been removed, and is ignored", file=sys.stderr)
        return {}
    change = OLD[name]
    if len(change.old) > 1:
        raise UserError(
            f"--config.{name} has been removed: use --config.{change.new}, which "
            f"replaces {', '.join(change.old)}"
        )
    is_bool = type(change.old[name]) is bool and change.convert is not _same
    value = change.convert(text.strip().lower() == "true" if is_bool else text)
    also = {new: str(fixed).lower() for new, fixed in change.also.items()}
    names = " ".join([change.new, *(f"{new}={fixed}" for new, fixed in also.items())])
    print(f"--config.{name} is now --config.{names}", file=sys.stderr)
    return {change.new: str(value), **also}
