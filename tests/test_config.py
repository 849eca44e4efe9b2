"""Configs and flags are parsed and checked; an error is one line with the field."""

import dataclasses
import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.refusal import refusal
from txl_jax import config as configs
from txl_jax.config import Config
from txl_jax.data import catalog, vocab
from txl_jax.data import options as data
from txl_jax.data.encode import CONVENTIONS
from txl_jax.errors import UserError
from txl_jax.kernels import dispatch
from txl_jax.model import positions
from txl_jax.update import optim
from txl_jax.workdir.run_record import check_same_run

FOLDER = Path(__file__).parents[1] / "experiments"
EXPERIMENTS = sorted([*FOLDER.glob("[!_]*.py"), *FOLDER.glob("ablations/[!_]*.py")])


def override(changes: str) -> Config:
    """Returns the default config with the fields of "a.b=1 c.d=2" set."""
    flags = dict(change.split("=", 1) for change in changes.split())
    values = {name: configs.find_field(name).read(text) for name, text in flags.items()}
    return configs.with_values(Config(), values)


# Reading


def test_options_list_the_implemented_choices() -> None:
    def choices(field: str) -> Any:
        return configs.FIELDS[field].check

    stated: list[tuple[Any, Any]] = [
        (optim.OPTIMIZERS, choices("optim.optimizer")),
        (optim.SCHEDULES, choices("optim.schedule")),
        ({data.FROM_CORPUS, *vocab.FROM_JSON}, choices("data.vocab")),
        (catalog.CORPORA, data.CORPUS_NAMES),
        (CONVENTIONS, data.CONVENTIONS),
        ({"auto", *dispatch.KERNELS}, choices("model.kernel")),
        (positions.SCHEMES, choices("model.position")),
    ]
    for functions, names in stated:
        assert sorted(functions) == sorted(names)


def test_the_command_line_is_parsed_without_jax() -> None:
    heavy = "jax flax orbax matplotlib tensorflow_datasets"
    program = (
        f"import sys, txl_jax.main; print({{*{heavy.split()}}} & {{*sys.modules}})"
    )
    ran = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert ran.stdout.strip() == "set()"


def test_a_field_that_is_not_stated_has_its_default() -> None:
    default = configs.default().to_dict()
    assert configs.parse(default) == configs.parse({}) == Config()
    parsed = configs.parse({"model": {"n_layer": 3}, "optim": {"lr": 1}})
    assert (parsed.model.n_layer, type(parsed.optim.lr)) == (3, float)
    assert parsed.train == Config().train


def test_presets_match_the_other_code_bases() -> None:
    torch = configs.pytorch(init_std=0.3)
    assert torch.norm_init_std == 0.3
    assert configs.nvidia(init_std=0.3) == dataclasses.replace(
        torch, same_length_self=True
    )
    assert configs.huggingface(init_std=0.3) == dataclasses.replace(
        torch, initial_memory="zeros", untie_r=True
    )
    assert configs.tensorflow(untie_r=True).layer_norm_epsilon == 1e-12
    model = configs.tensorflow(mem_len=7)
    assert configs.parse(configs.default(model=model).to_dict()).model == model


# A model with 64 learned positions, which is enough.
LEARNED = (
    "model.position=learned model.n_position=64 model.mem_len=0 train.tgt_len=64 "
    "eval.mem_len=0 eval.tgt_len=24 eval.ext_len=40 generate.mem_len=0"
)
# Fields, and parts of the error.
REFUSED = """
model.n_layer=0                     | model.n_layer = 0 must be at least 1
model.dropout=1.0                   | model.dropout = 1.0 must be at least 0
model.dtype=float64                 | model.dtype | float32, bfloat16
model.kernel=xls                    | model.kernel | mean 'xla'
model.same_length=true model.mem_len=0 | same_length | mem_len
model.cutoffs=5,9 model.vocab_size=9 | model.cutoffs | below | 9
model.cutoffs=5,9 model.div_val=32  | model.div_val = 32 leaves | 3 clusters
model.cutoffs=5,9 model.tie_projs=true | model.tie_projs | for each of the 3 clusters
model.initial_memory=zeros train.order=roll | train.order | set model.initial_memory to
model.initial_memory=zeros train.reset_memory_at=3 | train.reset_memory_at | initial_mem
model.position=sinusoidal           | model.position | set mem_len to 0
model.position=shaw                 | model.position | needs model.n_position
eval.same_length=true eval.mem_len=0 | set mem_len, or same_length=false
model.fast_weights=true model.initial_memory=zeros | model.fast_weights | = "zeros"
model.fast_weights=true eval.mem_len=0 | model.fast_weights | set mem_len above 0
model.same_length=true generate.mem_len=0 | same_length | mem_len = 0
model.position=sinusoidal model.mem_len=0 generate.mem_len=0 | eval.mem_len = {CONTEXT}
{LEARNED} train.tgt_len=60 train.ext_len=5 | train.varlen) = 65 | n_position = 64: raise
{LEARNED} eval.tgt_len=1 eval.ext_len=64 | eval.ext_len + eval.tgt_len = 65
model.n_layer=                      | model.n_layer = '' is not a whole number
optim.lr=fast                       | optim.lr = 'fast' is not a number
model.same_length=1                 | model.same_length = '1' is not true or false
train.num_steps=99999999999         | must be below 2^31
train.order=sentence                | train.order | mean 'sentences'
train.batch_size=9 train.batch_chunk=2 | train.batch_size = 9 | train.batch_chunk = 2
train.gradient_segments=2            | segments_per_update = 1 | gradient_segments = 2
{G} train.varlen=true model.mem_len=4 | gradient_segments = 2 | leave out train.varlen
{G} model.mem_len=0                  | gradient_segments = 2 | set model.mem_len
{G} model.initial_memory=zeros model.mem_len=4 | gradient_segments = 2 | "empty"
train.ext_len=3 model.mem_len=4     | train.ext_len = 3 | model.mem_len = 4 | to 0
train.ext_len=3 train.half_loss=true model.mem_len=0 | train.half_loss = True and train
eval.ext_len=3 eval.mem_len=4       | eval.ext_len = 3 | eval.mem_len = 4 | of them to 0
eval.dynamic_lr=1                   | eval.dynamic, eval.dynamic_lr belong together
eval.dynamic=rms eval.streams=1     | --sweep=dynamic_lr=
eval.sweep=cache_theta=0.1          | eval.cache_len, eval.cache_weight
eval.cache_len=9 eval.cache_weight=nan | eval.cache_weight = nan must be a finite
eval.cache_weight=0.1               | eval.cache_len, eval.cache_weight
eval.cache_len=9                    | eval.cache_len, eval.cache_weight
eval.cache_len=9 eval.cache_weight=0.1 eval.reset_memory_at=0 | cache_len = 9 is for
{DYNAMIC} eval.streams=2            | set eval.streams to 1
{DYNAMIC} eval.segments_per_step=1  | leave out eval.ext_len, eval.segments_per_step
eval.checkpoint=²                   | eval.checkpoint
eval.checkpoint=100,200             | eval.checkpoint | nor a step
generate.seed=4294967296            | generate.seed = 4294967296 must be from 0 to
generate.top_p=1.5                  | generate.top_p = 1.5 must be from 0 to 1
run.profile_from=-1                 | run.profile_from = -1 must be at least 0
mesh.model=-2                       | mesh.model = -2 must be at least -1
mesh.data=-1 mesh.fsdp=-1           | mesh.data | mesh.fsdp | one of them may be -1
"""
SHORT = {
    "CONTEXT": "512",
    "DYNAMIC": "eval.dynamic=sgd eval.dynamic_lr=1 eval.streams=1",
    "LEARNED": LEARNED,
    "G": "train.segments_per_call=2 train.segments_per_update=2 "
    "train.gradient_segments=2",
}


@pytest.mark.parametrize("row", REFUSED.strip().splitlines())
def test_impossible_values_are_refused(row: str) -> None:
    changes, *parts = (cell.strip() for cell in row.format(**SHORT).split(" | "))
    message = refusal(override, changes)
    for part in parts:
        assert part in message


@pytest.mark.parametrize(
    "field, text, value",
    [
        ("model.n_layer", "3", 3),
        ("optim.lr", "1e-3", 1e-3),
        ("model.same_length", "true", True),
        ("model.cutoffs", "(3, 5)", (3, 5)),
        ("model.cutoffs", "3,", (3,)),
        ("model.cutoffs", "", ()),
    ],
)
def test_a_flag_is_read_by_the_type_of_its_field(
    field: str, text: str, value: Any
) -> None:
    result = configs.find_field(field).read(text)
    assert result == value and type(result) is type(value)


# Files


def test_load_takes_a_path_and_a_packaged_name() -> None:
    for name, path in (("quickstart", ""), ("wt103_128m", "ablations/")):
        config = configs.load(name)
        assert config == configs.load(str(FOLDER / f"{path}{name}.py"))
        assert config != Config()


IMPORT = "from ml_collections import ConfigDict\n"
GET = """
from txl_jax.config import TrainConfig, default
def get_config():
    c = default()
    c."""


@pytest.mark.parametrize(
    "body, reason",
    [
        ("def get_config(:", "SyntaxError"),
        ("get_configs = None", "KeyError: 'get_config'"),
        ("import nowhere_to_be_found", "ModuleNotFoundError"),
        ("def get_config():\n    raise ValueError('one\\ntwo')", "ValueError: one"),
        (f"{IMPORT}def get_config(): return ConfigDict({{3: 4}})", "config section 3"),
        (f"{GET}modle.n_layer = 3", "model"),
        (f"{GET}model.n_layer = 'three'", "n_layer"),
        (f"{GET}seed = TrainConfig(num_steps=0)", "train.num_steps = 0 must be"),
    ],
)
def test_an_experiment_that_fails_is_refused(
    tmp_path: Path, body: str, reason: str
) -> None:
    path = tmp_path / "experiment.py"
    path.write_text(body + "\n")
    assert reason in refusal(configs.load, str(path))


def test_a_saved_config_is_read_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its paths can be used from any folder; it may have moved with the vocabulary."""
    path, config = tmp_path / "config.json", override("model.cutoffs=3,9 optim.lr=1e-3")
    values = {"generate.prompt": "é\n", "data.data_dir": "gs://b/c"}
    values |= {"data.path": "a/*.txt", "data.vocab_path": "words.txt"}
    config = configs.with_values(config, values)
    monkeypatch.chdir(tmp_path)
    path.write_text(json.dumps(configs.to_json(config)))
    absolute = {"data.path": str(tmp_path / "a" / "*.txt")}
    assert configs.load_json(path) == configs.with_values(config, absolute)
    (tmp_path / "vocab.json").touch()
    assert configs.load_json(path).data.vocab_path == str(tmp_path / "vocab.json")


# The identity of a run

# Fields that may change, in the sections that decide what a run computes.
FREE = {
    *("data.path", "data.data_dir", "data.dtype"),
    *("model.kernel", "model.remat_policy", "model.unroll"),
    *(f"train.{each}" for each in ("num_steps", "log_every", "eval_every")),
}


def test_a_run_is_identified_by_model_data_train_and_optim() -> None:
    for name in configs.FIELDS:
        section, key = name.split(".")
        old = getattr(Config(), section)
        was, now = getattr(old, key), ("another",)
        new, config = dataclasses.replace(old), dataclasses.replace(Config())
        object.__setattr__(new, key, now)  # unchecked
        object.__setattr__(config, section, new)
        fixed = section in ("model", "data", "train", "optim") and name not in FREE
        if fixed:
            message = refusal(check_same_run, Path("run"), Config(), config)
            assert f"({name} was {was!r}, is now {now!r})" in message
        else:
            check_same_run(Path("run"), Config(), config)


# Any value

ODD: list[Any] = [
    *(-(2**63), -1, 0, 1, 2**31 - 1, 2**31, 2**64, 10**400),
    *(math.nan, math.inf, -math.inf, -1.0, 0.0, 5e-324, 1e308, 1j),
    *("", "x", "\0", "é" * 1000, b"x", None, True, False),
    *((), [], [None], {}, (1, "x"), (-1,), (2**64,), (True,)),
]


def text_of(value: Any) -> str:
    """Returns a flag's text; str() refuses integers with so many digits."""
    return "1" * 5000 if value == 10**400 else str(value)


@pytest.mark.promise("User errors are one line")
def test_any_value_of_any_field_is_accepted_or_refused() -> None:
    """Over 3,000 values are tried one at a time, in a config and as a flag."""
    tried = refused = 0
    for name in configs.FIELDS:
        section, key = name.split(".")
        for value in ODD:
            for as_flag in (False, True):
                tried += 1
                try:
                    typed = value
                    if as_flag:
                        typed = configs.find_field(name).read(text_of(value))
                    parsed = configs.parse({section: {key: typed}})
                except UserError as error:
                    refused += 1
                    assert "\n" not in str(error) and key in str(error)
                else:
                    json.dumps(dataclasses.asdict(parsed), allow_nan=False)
    assert tried > 3000 and refused > 2000


@pytest.mark.parametrize("path", EXPERIMENTS, ids=lambda path: path.stem)
def test_an_experiment_is_short_and_works(path: Path) -> None:
    configs.load(str(path))
    assert len(path.read_text("utf-8").splitlines()) <= 40
