"""The config of a run: all sections, loaded, overridden, parsed and saved.

The `get_config()` of an experiment starts from `default()` and sets what differs. It
returns a ConfigDict, which `load` turns into frozen dataclasses, one per section.
"""

import dataclasses
import importlib
import json
import operator
import os
import runpy
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from txl_jax.aot.options import CompileConfig
from txl_jax.checkpoint.options import CheckpointConfig
from txl_jax.convert.options import ConvertConfig
from txl_jax.data.options import SLACK, DataConfig
from txl_jax.errors import UserError, nearest, prefixed, refuse
from txl_jax.evaluate.options import EvalConfig, ScoreConfig, evaluation_model
from txl_jax.fields import Field, Section, Values
from txl_jax.generate.options import GenerateConfig, generation_model
from txl_jax.model.config import (
    ABSOLUTE_POSITIONS,
    ModelConfig,
    huggingface,
    nvidia,
    pytorch,
    tensorflow,
)
from txl_jax.paper.options import ReclConfig, TableConfig
from txl_jax.runtime import storage
from txl_jax.runtime.options import RunConfig
from txl_jax.runtime.storage import DAMAGE, Json
from txl_jax.sharding.options import MeshConfig
from txl_jax.update.options import OptimConfig, TrainConfig

# Experiments use the families of models: `default(model=tensorflow(n_layer=18))`.
__all__ = ["Config", "default", "huggingface", "nvidia", "pytorch", "tensorflow"]


@dataclasses.dataclass(frozen=True)
class Config:
    """All options of a run, by section."""

    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    train: TrainConfig = TrainConfig()
    optim: OptimConfig = OptimConfig()
    eval: EvalConfig = EvalConfig()
    generate: GenerateConfig = GenerateConfig()
    score: ScoreConfig = ScoreConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    mesh: MeshConfig = MeshConfig()
    run: RunConfig = RunConfig()
    convert: ConvertConfig = ConvertConfig()
    compile: CompileConfig = CompileConfig()
    table: TableConfig = TableConfig()
    recl: ReclConfig = ReclConfig()

    def __post_init__(self) -> None:
        """Raises UserError for sections that do not fit together."""
        model, train, eval = self.model, self.train, self.eval
        self._check_context()
        self._check_segments()
        resets = {
            "train.reset_memory_at": train.reset_memory_at,
            'train.order = "roll"': train.order == "roll",
            "eval.reset_memory_at": eval.reset_memory_at,
        }
        for name, on in resets.items():
            refuse(
                on and model.initial_memory == "zeros",
                f"{name} starts documents in mid-segment, where a memory of zeros has "
                'no effect: leave it out, or set model.initial_memory to "empty"',
            )
        with prefixed("with the lengths of eval"):
            evaluation_model(model, eval)
        with prefixed("with generate.mem_len"):
            generation_model(model, self.generate)

    @property
    def train_width(self) -> int:
        """The tokens of a training segment's arrays."""
        train = self.train
        return train.ext_len + train.tgt_len + SLACK * train.varlen

    def _check_context(self) -> None:
        """Raises UserError for tokens that are read twice or lack a position."""
        model, train, eval = self.model, self.train, self.eval
        refuse(
            train.ext_len and model.mem_len,
            f"train.ext_len = {train.ext_len} with model.mem_len = {model.mem_len} "
            "would read tokens twice: set one of them to 0",
        )
        for section in ("eval", "generate"):
            mem_len = getattr(self, section).mem_len
            refuse(
                model.position in ABSOLUTE_POSITIONS and mem_len,
                f"{section}.mem_len = {mem_len}: a model with model.position = "
                f'"{model.position}" has no memory; set it to 0, and eval.ext_len for '
                "context",
            )
        lengths = {
            f"train.ext_len + train.tgt_len (+ {SLACK} with train.varlen)": (
                self.train_width
            ),
            "eval.ext_len + eval.tgt_len": eval.ext_len + eval.tgt_len,
        }
        for fields, length in lengths.items():
            refuse(
                model.position == "learned" and length > model.n_position,
                f"{fields} = {length} tokens exceed model.n_position = "
                f"{model.n_position}: raise it, or read fewer at once",
            )

    def _check_segments(self) -> None:
        """Raises UserError for segments that gradients cannot cross."""
        model, together = self.model, self.train.gradient_segments
        refuse(
            together > 1 and not (model.mem_len and model.initial_memory == "empty"),
            f"train.gradient_segments = {together} needs a memory that starts empty: "
            "set model.mem_len, with a relative model.position, and leave "
            'model.initial_memory at "empty"',
        )


SECTIONS: dict[str, type[Section]] = Config.__annotations__

# All fields by "section.field", with the modes that read each and its roles.
FIELDS: dict[str, Field] = {
    field.name: field for section in SECTIONS.values() for field in section.fields()
}


def default(model: ModelConfig | None = None) -> ConfigDict:
    """Returns all sections at their defaults, except for the model if one is given."""
    sections = dataclasses.asdict(Config())
    return ConfigDict(sections | {"model": dataclasses.asdict(model or ModelConfig())})


def parse(sections: dict[str, Any]) -> Config:
    """Returns the config of fields by section, as in JSON; raises UserError."""
    values: Values = {}
    for section, fields in sections.items():
        if section not in SECTIONS:
            hint = nearest(str(section), SECTIONS)
            raise UserError(f"unknown config section {section!r}{hint}")
        if not isinstance(fields, dict):
            raise UserError(f"config section {section!r} = {fields!r} must have fields")
        values |= {f"{section}.{key}": value for key, value in fields.items()}
    return with_values(Config(), values)


def with_values(config: Config, values: Values) -> Config:
    """Returns the config with other values, checked together; raises UserError."""
    sections: dict[str, dict[str, Any]] = {}
    for name, value in values.items():
        field = find_field(name)
        section = sections.setdefault(name.partition(".")[0], {})
        section[field.key] = field.convert(value)
    changed = {
        name: dataclasses.replace(getattr(config, name), **fields)
        for name, fields in sections.items()
    }
    return dataclasses.replace(config, **changed)


def values_of(config: Config) -> Values:
    """Returns the values of all fields."""
    return dict(zip(FIELDS, operator.attrgetter(*FIELDS)(config), strict=True))


def differences(one: Config, other: Config) -> dict[str, tuple[Any, Any]]:
    """Returns the fields whose values differ, as {"section.field": both values}."""
    old, new = values_of(one), values_of(other)
    return {name: (old[name], new[name]) for name in FIELDS if old[name] != new[name]}


def find_field(name: str) -> Field:
    """Returns the field "section.field"; raises UserError for an unknown name."""
    if name not in FIELDS:
        raise UserError(f"unknown config field {name!r}{nearest(name, FIELDS)}")
    return FIELDS[name]


def load(source: str) -> Config:
    """Returns the config of an experiment, a file's path or a packaged name."""
    path = storage.local_path(source, "--config")
    if not path.suffix and "/" not in source:
        path = _packaged(source)
    if path.suffix != ".py" or not os.path.isfile(path):  # False if too long
        raise UserError(f"no config file {source!r}: give FILE.py or a packaged name")
    try:
        sections = ConfigDict(runpy.run_path(str(path))["get_config"]()).to_dict()
    except UserError:
        raise
    except (Exception, SystemExit) as error:  # any error of the user's code
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        raise UserError(f"config file {source!r} failed: {reason}") from error
    return parse(sections)


def _packaged(name: str) -> Path:
    folder = Path(importlib.import_module("txl_jax.experiments").__path__[0])
    paths = [*folder.glob("[!_]*.py"), *folder.glob("ablations/[!_]*.py")]
    known = {path.stem: path for path in sorted(paths)}
    if name not in known:
        raise UserError(
            f"no packaged experiment {name!r}{nearest(name, known)}; there are "
            f"{', '.join(known)}; the name of a file must end in .py"
        )
    return known[name]


def to_json(config: Config) -> Json:
    """Returns the fields by section, with absolute paths, for `parse`."""
    state = dataclasses.asdict(config)
    for name in ("path", "data_dir"):
        if (value := state["data"][name]) and "://" not in value:
            state["data"][name] = os.path.abspath(storage.local_path(value, name))
    return state


def load_json(path: Path) -> Config:
    """Returns the config of a file with the result of `to_json`.

    A vocabulary that has moved is read from its copy in the workdir.
    """
    try:
        config = parse(json.loads(path.read_text("utf-8")))
        vocab_path, copy = config.data.vocab_path, path.with_name("vocab.json")
        exists = storage.is_file(Path(os.path.expanduser(vocab_path)))
        if vocab_path and not exists and storage.is_file(copy):
            vocab_path = str(storage.absolute(copy))
            config = with_values(config, {"data.vocab_path": vocab_path})
        return config
    except (FileNotFoundError, NotADirectoryError):
        raise UserError(
            f"{path.parent} holds no run (no {path.name}): give the --workdir of a "
            "run, --config to start one, or --model for a model in one file"
        ) from None
    except (OSError, *DAMAGE, UserError) as error:
        raise UserError(
            f"cannot read {path}: {error}; correct it, or restore what the run wrote"
        ) from error
