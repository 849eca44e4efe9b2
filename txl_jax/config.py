"""Experiments as configs: ConfigDict outside, frozen and cross-checked inside.

An experiment file's `get_config()` starts from `default()` and states differences.
`parse` is where the ConfigDict ends: below it there are dataclasses only, each defined
beside the code that reads it.
"""

import dataclasses
import importlib
import importlib.util
import json
import math
import os
from pathlib import Path
from typing import Any, get_args

from ml_collections import ConfigDict

from txl_jax.ablation import TableConfig
from txl_jax.checkpoint import CheckpointConfig
from txl_jax.chips import CompileConfig
from txl_jax.convert.formats import ConvertConfig
from txl_jax.data.streams import SLACK
from txl_jax.data.tokens import DataConfig
from txl_jax.distributed import RunConfig
from txl_jax.errors import UserError, nearest, require_one_of
from txl_jax.evaluate.attention import AttentionConfig
from txl_jax.evaluate.perplexity import EvalConfig, evaluation_model
from txl_jax.evaluate.recl import ReclConfig
from txl_jax.evaluate.score import ScoreConfig
from txl_jax.evaluate.speed import SpeedConfig
from txl_jax.generate import GenerateConfig, generation_model
from txl_jax.kernels.choice import NAMES
from txl_jax.model.config import (
    ABSOLUTE,
    ModelConfig,
    huggingface,
    nvidia,
    pytorch,
    tensorflow,
)
from txl_jax.optim import OptimConfig
from txl_jax.seal import seal, unseal
from txl_jax.sharding import MeshConfig
from txl_jax.step import TrainConfig

# The families of models, for experiments: `default(model=tensorflow(n_layer=18))`.
__all__ = ["Config", "default", "huggingface", "nvidia", "pytorch", "tensorflow"]


@dataclasses.dataclass(frozen=True)
class Config:
    """Everything that a run is told, by section."""

    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    train: TrainConfig = TrainConfig()
    optim: OptimConfig = OptimConfig()
    eval: EvalConfig = EvalConfig()
    generate: GenerateConfig = GenerateConfig()
    score: ScoreConfig = ScoreConfig()
    attention: AttentionConfig = AttentionConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    mesh: MeshConfig = MeshConfig()
    run: RunConfig = RunConfig()
    convert: ConvertConfig = ConvertConfig()
    compile: CompileConfig = CompileConfig()
    table: TableConfig = TableConfig()
    speed: SpeedConfig = SpeedConfig()
    recl: ReclConfig = ReclConfig()

    def __post_init__(self) -> None:
        """Refuses combinations across sections, naming both fields and the mend."""
        require_one_of(self.model.kernel, list(NAMES), "model.kernel")
        self._check_context()
        self._check_places()
        self._check_documents()
        for section in ("train", "generate"):
            seed = getattr(self, section).seed
            if seed >= 2**32:  # jax would cut it to its low 32 bits
                raise UserError(f"{section}.seed = {seed} must be less than 2^32")
        updates = self.train.updates_per_call
        if self.checkpoint.every_steps % updates:
            raise UserError(
                f"checkpoint.every_steps = {self.checkpoint.every_steps} must be a "
                f"multiple of the {updates} updates in one call "
                "(train.segments_per_call / train.segments_per_update)"
            )
        if self.optim.warmup_steps > self.train.num_steps:
            raise UserError(
                f"optim.warmup_steps = {self.optim.warmup_steps} is more than "
                f"train.num_steps = {self.train.num_steps}; shorten the warm-up"
            )

    def _check_documents(self) -> None:
        """A document begins with an empty memory, which visible zeros are not."""
        given = {
            "train.reset_memory_at": self.train.reset_memory_at >= 0,
            "train.roll": self.train.roll,
            "eval.reset_memory_at": self.eval.reset_memory_at >= 0,
        }
        for name, on in given.items():
            if on and self.model.initial_memory == "zeros":
                raise UserError(
                    f"{name} starts documents in mid-segment, where initial_memory = "
                    '"zeros" cannot be seen: leave it out, or set '
                    'model.initial_memory to "empty"'
                )

    def _check_context(self) -> None:
        if self.train.ext_len and self.model.mem_len:
            raise UserError(
                f"train.ext_len = {self.train.ext_len} with model.mem_len = "
                f"{self.model.mem_len} would show the same tokens twice: set one of "
                "them to 0"
            )
        for section in ("eval", "generate"):
            mem_len = getattr(self, section).mem_len
            if self.model.position in ABSOLUTE and mem_len:
                raise UserError(
                    f"{section}.mem_len = {mem_len}: a model with model.position = "
                    f'"{self.model.position}" has no memory; set it to 0, and '
                    f"{section}.ext_len for context"
                )
        evaluation_model(self.model, self.eval)
        generation_model(self.model, self.generate)

    def _check_places(self) -> None:
        if self.model.position != "learned":
            return
        train, slack = self.train, SLACK if self.train.varlen else 0
        width = train.ext_len + train.tgt_len + slack
        needed = {
            f"train.ext_len + train.tgt_len (+ {SLACK} with train.varlen)": width,
            "eval.ext_len + eval.tgt_len": self.eval.ext_len + self.eval.tgt_len,
            "eval.sliding_window": self.eval.sliding_window,
            "generate.ext_len + 1": self.generate.ext_len + 1,
        }
        for fields, places in needed.items():
            if places > self.model.n_position:
                raise UserError(
                    f"{fields} = {places} tokens are read at once, but the model has "
                    f"model.n_position = {self.model.n_position} places: raise it, or "
                    "read fewer"
                )


SECTIONS: dict[str, type] = {
    field.name: type(field.default) for field in dataclasses.fields(Config)
}

# The type of each field, by "section.field".
FIELDS: dict[str, Any] = {
    f"{section}.{field.name}": field.type
    for section, fields in SECTIONS.items()
    for field in dataclasses.fields(fields)
}

# What a run may change when it goes on. The rest makes it another run, and refused.
CHANGEABLE = (
    "eval.",
    "generate.",
    "score.",
    "attention.",
    "checkpoint.",
    "mesh.",
    "run.",
    "convert.",
    "compile.",
    "table.",
    "speed.",
    "recl.",
    "data.data_dir",
    "train.num_steps",
    "train.log_every",
    "train.eval_every",
    "train.max_bad_steps",
    "train.max_loss_factor",
    "model.kernel",
    "model.remat",
    "model.unroll",
)


def default(model: ModelConfig | None = None) -> ConfigDict:
    """Returns every field of every section at its default, but for a given model."""
    sections = dataclasses.asdict(Config())
    if model:
        sections["model"] = dataclasses.asdict(model)
    return ConfigDict(sections)


def parse(config: ConfigDict) -> Config:
    """Returns the config, frozen and checked.

    Raises UserError for an unknown section or field, naming the nearest known one, for
    a value of the wrong type, and for values or combinations that cannot work.
    """
    sections = {}
    for name, fields in config.to_dict().items():
        if name not in SECTIONS:
            hint = nearest(str(name), list(SECTIONS))
            raise UserError(f"unknown config section {name!r}{hint}")
        if not isinstance(fields, dict):
            raise UserError(f"config section {name!r} is {fields!r}, not its fields")
        values = {key: _typed(f"{name}.{key}", value) for key, value in fields.items()}
        sections[name] = SECTIONS[name](**values)
    return Config(**sections)


def field_type(name: str) -> type:
    """Returns the type of the field `section.field`, or raises UserError."""
    if name not in FIELDS:
        raise UserError(f"unknown config field {name!r}{nearest(name, list(FIELDS))}")
    return FIELDS[name]


def _typed(name: str, value: Any) -> Any:
    wanted = field_type(name)
    if wanted is float and type(value) is int:
        value = float(value) if abs(value) < 2**1023 else math.inf
    if items := get_args(wanted):
        if type(value) in (tuple, list) and all(type(x) is items[0] for x in value):
            for item in value:
                _refuse_boundless(name, item)
            return tuple(value)
        raise UserError(f"{name} = {value!r} must be a tuple of {items[0].__name__}s")
    if type(value) is not wanted:
        raise UserError(f"{name} = {value!r} must be of type {wanted.__name__}")
    _refuse_boundless(name, value)
    return value


def _refuse_boundless(name: str, value: Any) -> None:
    """Refuses numbers that no device counts with, and those that are none."""
    if type(value) is float and not math.isfinite(value):
        raise UserError(f"{name} = {value} must be a finite number")
    if type(value) is int and not name.endswith(".seed") and abs(value) >= 2**31:
        raise UserError(f"{name} = {value!r:.20} is too large: it must be below 2^31")


KINDS = {bool: "true or false", int: "a whole number", float: "a number"}


def override(config: ConfigDict, name: str, text: str) -> None:
    """Sets the field `section.field` from a flag's text; a tuple's has commas."""
    wanted = field_type(name)
    items = get_args(wanted)
    kind = items[0] if items else wanted
    try:
        if items:
            parts = text.strip("()").split(",")
            value: Any = tuple(_read(kind, part) for part in parts if part.strip())
        else:
            value = _read(kind, text)
    except (ValueError, KeyError):
        each = ", or several with commas between" if items else ""
        raise UserError(f"{name} = {text[:80]!r} is not {KINDS[kind]}{each}") from None
    section, _, key = name.partition(".")
    with config.ignore_type():  # parse checks it; an experiment may have left 1 for 1.0
        config.update({section: {key: value}})


def _read(kind: type, text: str) -> Any:
    if kind is bool:
        return {"true": True, "false": False}[text.strip().lower()]
    return kind(text)


def load(source: str) -> ConfigDict:
    """Returns get_config() of an experiment file, given by path or packaged name."""
    path = Path(source)
    if not path.suffix and "/" not in source:
        path = _packaged(source)
    if not os.path.isfile(path):  # also of a path that no system takes
        raise UserError(f"no config file {source!r}: give a path or a packaged name")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise UserError(f"config file {source!r} is not Python: its name ends in .py")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
        made = module.get_config()
    except UserError:
        raise
    except (Exception, SystemExit) as error:  # whatever the user's own code raises
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        raise UserError(f"config file {source!r} failed: {reason}") from error
    if not isinstance(made, (ConfigDict, dict)):
        raise UserError(
            f"config file {source!r}: get_config() returns {type(made).__name__}, not "
            "a ConfigDict"
        )
    return ConfigDict(made)


def _packaged(name: str) -> Path:
    folder = Path(importlib.import_module("txl_jax.experiments").__path__[0])
    paths = [*folder.glob("[!_]*.py"), *folder.glob("ablations/[!_]*.py")]
    known = {path.stem: path for path in sorted(paths)}
    if name not in known:
        raise UserError(
            f"no packaged experiment {name!r}{nearest(name, list(known))}; there are "
            f"{', '.join(known)}; a file needs its .py"
        )
    return known[name]


def save_json(config: Config, path: Path) -> None:
    """Writes the config where `load_json` reads it."""
    path.write_text(json.dumps(seal(dataclasses.asdict(config)), indent=2) + "\n")


def load_json(path: Path) -> ConfigDict:
    """Returns the config that a workdir keeps, or raises UserError."""
    try:
        saved = json.loads(path.read_text("utf-8"))
        if not isinstance(saved, dict):
            raise ValueError("it holds no sections")
        config = ConfigDict(unseal(saved))
        parse(config)
        return config
    except FileNotFoundError:
        raise UserError(
            f"{path.parent} holds no run (no {path.name}): give the --workdir of one, "
            "or --config to start one"
        ) from None
    except (OSError, ValueError, TypeError, RecursionError, UserError) as error:
        raise UserError(
            f"cannot read {path}: {error}; bring it back as the run wrote it (changes "
            "go on the command line, as --config.eval.streams=4)"
        ) from error


def conflicts(saved: Config, given: Config) -> list[str]:
    """Returns what makes `given` another run than `saved`, as "field: was, is now"."""
    found = []
    for section in SECTIONS:
        old = dataclasses.asdict(getattr(saved, section))
        new = dataclasses.asdict(getattr(given, section))
        for key in old:
            name = f"{section}.{key}"
            if old[key] != new[key] and not name.startswith(CHANGEABLE):
                found.append(f"{name} was {old[key]!r}, is now {new[key]!r}")
    return found
