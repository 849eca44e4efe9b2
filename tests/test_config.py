"""A config is whole, checked and frozen, or refused in one line that names the field.

The configs here are never trained: nothing in this file compiles.
"""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from ml_collections import ConfigDict

from txl_jax import config as configs
from txl_jax.cli import flags
from txl_jax.config import Config
from txl_jax.data import catalog, recipe, sentences, vocab
from txl_jax.data import options as data
from txl_jax.errors import UserError
from txl_jax.kernels import dispatch
from txl_jax.model import config as model
from txl_jax.model import positions
from txl_jax.tables import options as tables
from txl_jax.tables import rows
from txl_jax.update import optim
from txl_jax.update import options as update

FOLDER = Path(__file__).parents[1] / "experiments"
EXPERIMENTS = sorted(
    [*FOLDER.glob("[!_]*.py"), *FOLDER.glob("ablations/[!_]*.py")],
)


def refusal(call: Any, *args: Any) -> str:
    """Returns the message of the UserError that call(*args) raises: one line."""
    with pytest.raises(UserError) as caught:
        call(*args)
    message = str(caught.value)
    assert message and "\n" not in message
    return message


def changed(**fields: Any) -> ConfigDict:
    """Returns the default config with "section_dot_field" set, unchecked."""
    config = configs.default().to_dict()
    for name, value in fields.items():
        section, _, key = name.partition("_dot_")
        config.setdefault(section, {})[key] = value
    return ConfigDict(config)


# A model with 64 learned places, which suffice.
LEARNED = (
    "model.position=learned model.n_position=64 model.mem_len=0 train.tgt_len=64 "
    "eval.mem_len=0 eval.tgt_len=24 eval.ext_len=40 generate.mem_len=0 "
    "generate.ext_len=63"
)

# Reading


def test_options_name_what_their_rooms_implement() -> None:
    stated: list[tuple[Any, tuple[Any, ...]]] = [
        (sentences.ORDERS, update.ORDERS),
        (optim.OPTIMIZERS, update.OPTIMIZERS),
        (optim.SCHEDULES, update.SCHEDULES),
        (vocab.VOCABULARIES, data.VOCABULARIES),
        (catalog.CORPORA, data.CORPORA),
        (recipe.CONVENTIONS, data.CONVENTIONS),
        ({"auto": None, **dispatch.KERNELS}, model.KERNELS),
        (positions.SCHEMES, model.POSITIONS),
        (rows.TABLES, tables.TABLES),
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


def test_default_is_every_field_at_its_default() -> None:
    assert configs.parse(configs.default()) == Config()


def test_what_is_not_stated_is_at_its_default() -> None:
    assert configs.parse(ConfigDict()) == Config()
    parsed = configs.parse(ConfigDict({"model": {"n_layer": 3}}))
    assert parsed.model.n_layer == 3
    assert dataclasses.replace(parsed, model=Config().model) == Config()


def test_a_config_is_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Config().train.seed = 2  # type: ignore[misc]


def test_unknown_names_are_refused_with_the_nearest() -> None:
    assert "'modle' (did you mean 'model'?)" in refusal(
        configs.parse, changed(modle_dot_n_layer=3)
    )
    assert "'model.n_layers' (did you mean 'model.n_layer'?)" in refusal(
        configs.parse, changed(model_dot_n_layers=3)
    )
    assert "'train.xyzzy'" in refusal(configs.parse, changed(train_dot_xyzzy=3))


@pytest.mark.parametrize(
    "field, value, wanted",
    [
        ("model.n_layer", "3", "int"),
        ("model.n_layer", 3.0, "int"),
        ("model.n_layer", True, "int"),
        ("model.n_layer", None, "int"),
        ("model.same_length", 1, "bool"),
        ("optim.lr", "0.1", "float"),
        ("optim.lr", False, "float"),
        ("data.path", 3, "str"),
        ("generate.prompt", b"text", "str"),
        ("train.seed", [1], "int"),
    ],
)
def test_wrong_types_are_refused(field: str, value: Any, wanted: str) -> None:
    message = refusal(configs.parse, changed(**{field.replace(".", "_dot_"): value}))
    assert message.startswith(f"{field} = ")
    assert message.endswith(f"must be of type {wanted}")


@pytest.mark.parametrize("value", [3, "3", [3.0], (True,), ((3,),), None])
def test_what_is_no_tuple_of_its_kind_is_refused(value: Any) -> None:
    config = configs.default()
    with config.ignore_type():
        config.model.cutoffs = value
    assert "model.cutoffs" in refusal(configs.parse, config)


@pytest.mark.parametrize(
    "text, value",
    [("3,5", (3, 5)), ("(3, 5)", (3, 5)), ("3", (3,)), ("3,", (3,)), ("", ())],
)
def test_a_flag_gives_a_tuple(text: str, value: tuple[int, ...]) -> None:
    config = configs.default()
    configs.override(config, "model.cutoffs", text)
    assert configs.parse(config).model.cutoffs == value


def test_a_tuple_of_something_else_is_refused() -> None:
    message = refusal(configs.override, configs.default(), "model.tie_projs", "true,no")
    assert "model.tie_projs = 'true,no' is not true or false, or several" in message


def test_families_say_what_code_bases_chose() -> None:
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
    assert configs.parse(configs.default(model=model)).model == model


def test_a_whole_number_serves_as_a_float() -> None:
    lr = configs.parse(changed(optim_dot_lr=1)).optim.lr
    assert lr == 1 and type(lr) is float


@pytest.mark.parametrize("value", [None, 3, "n_layer", [1]])
def test_a_section_that_is_none_is_refused(value: Any) -> None:
    config = configs.default()
    with config.ignore_type():
        config.model = value
    assert "config section 'model'" in refusal(configs.parse, config)


# Fields, and parts of the error.
REFUSED = """
model.d_model=17                    | model.d_model = 17
model.n_layer=0                     | model.n_layer = 0 must be at least 1
model.mem_len=-1                    | model.mem_len
model.dropout=1.0                   | model.dropout = 1.0 must be at least 0
model.init_std=0.0                  | model.init_std
model.dtype=float64                 | model.dtype | float32, bfloat16
model.dtype=float16                 | mean 'bfloat16'
model.kernel=xls                    | model.kernel | mean 'xla'
model.same_length=true model.mem_len=0 | same_length | mem_len
model.cutoffs=5,5                   | model.cutoffs | rising
model.cutoffs=10,5                  | must be above 0, rising
model.cutoffs=5,9 model.vocab_size=9 | model.cutoffs | below | 9
model.cutoffs=0                     | model.cutoffs | above 0
model.cutoffs=5,9 model.div_val=32  | model.div_val = 32 leaves | 3 clusters
model.cutoffs=5,9 model.tie_projs=true | model.tie_projs | for each of the 3 clusters
model.word_dropout=1.0              | model.word_dropout
model.layer_norm_epsilon=0          | model.layer_norm_epsilon
model.initial_memory=zero           | model.initial_memory | mean 'zeros'
model.initial_memory=zeros train.order=roll | train.order | set model.initial_memory to
model.initial_memory=zeros train.reset_memory_at=3 | train.reset_memory_at | initial_mem
model.initial_memory=zeros eval.reset_memory_at=0 | eval.reset_memory_at | initial_mem
model.position=rotary               | must be one of transformer_xl
model.position=shawn                | model.position | mean 'shaw'
model.position=sinusoidal           | model.position | set mem_len to 0
model.position=shaw                 | model.position | n_position | need a table of
model.n_position=5                  | model.position | n_position
model.position=none model.untie_r=true | model.untie_r has no effect | none
eval.same_length=true eval.mem_len=0 | set mem_len, or same_length=false
model.same_length=true generate.mem_len=0 | same_length | mem_len = 0
model.position=sinusoidal model.mem_len=0 generate.mem_len=0 | eval.mem_len = {CONTEXT}
model.position=sinusoidal model.mem_len=0 eval.mem_len=0 | generate.mem_len = {CONTEXT}
{LEARNED} train.tgt_len=60 train.ext_len=5 | train.varlen) = 65 | n_position = 64: raise
{LEARNED} train.tgt_len=50 train.varlen=true | train.varlen) = 65 | n_position = 64
{LEARNED} eval.tgt_len=1 eval.ext_len=64 | eval.ext_len + eval.tgt_len = 65
{LEARNED} eval.sliding_window=65    | eval.sliding_window = 65 | model.n_position = 64
{LEARNED} generate.ext_len=64       | generate.ext_len + 1 = 65 | model.n_position = 64
train.num_steps=0                   | train.num_steps
train.num_steps=99999999999         | must be below 2^31
train.seed=-1                       | train.seed
train.seed=4294967296               | train.seed
train.max_loss_factor=0.5           | must be above 1
train.order=sentences               | needs train.sentence_end
train.batch_size=9 train.batch_chunk=2 | train.batch_size = 9 | train.batch_chunk = 2
train.segments_per_call=3 train.segments_per_update=2 | segments_per_update = 2
train.num_steps=3 {UPDATES}         | train.num_steps = 3 | multiple of the 2 updates
train.eval_every=3 {UPDATES}        | train.eval_every = 3 | multiple of the 2 updates
checkpoint.every_steps=3 {UPDATES}  | checkpoint.every_steps = 3 | of the 2 updates
train.ext_len=3 model.mem_len=4     | train.ext_len = 3 | model.mem_len = 4 | to 0
train.ext_len=3 train.half_loss=true model.mem_len=0 | train.half_loss = True and train
eval.ext_len=3 eval.mem_len=4       | eval.ext_len = 3 | eval.mem_len = 4 | of them to 0
generate.ext_len=3 generate.mem_len=4 | generate.ext_len = 3 | generate.mem_len = 4
optim.warmup_steps=11 train.num_steps=10 | = 11 | train.num_steps = 10; shorten the warm
optim.lr=-0.1                       | optim.lr
optim.lr=nan                        | optim.lr = nan must be a finite number
optim.clip=inf                      | optim.clip = inf must be a finite number
optim.betas=0.9,1.0                 | optim.betas = (0.9, 1.0) must be
optim.epsilon=0                     | optim.epsilon = 0.0 must be above 0
optim.schedule=cosin                | optim.schedule | mean 'cosine'
optim.schedule=constant optim.min_lr_ratio=1 | optim.min_lr_ratio
optim.optimizer=lambda              | optim.optimizer | mean 'lamb'
optim.optimizer=adamw               | mean 'adam'
eval.streams=0                      | eval.streams
eval.split=tests                    | eval.split | mean 'test'
eval.checkpoint=newest              | eval.checkpoint | latest
eval.checkpoint=²                   | eval.checkpoint
eval.checkpoint=100,best            | eval.checkpoint | average
eval.checkpoint=1,,2                | several with commas between
eval.checkpoint=999999999999999999999 | nor a step
generate.seed=4294967296            | generate.seed = 4294967296 must be from 0 to
generate.prompt=                    | generate.prompt is empty
generate.num_tokens=0               | generate.num_tokens
generate.temperature=-1             | generate.temperature
generate.top_k=-1                   | generate.top_k
generate.top_p=0                    | generate.top_p
generate.top_p=1.5                  | generate.top_p = 1.5 must be above 0, at most 1
generate.top_p=nan                  | generate.top_p
checkpoint.keep=0                   | checkpoint.keep = 0 must be at least 1
run.profile_steps=15:10             | such as "10:15"
run.hang_seconds=-1                 | run.hang_seconds = -1
compile.mesh=best                   | compile.mesh = 'best' must be one of config, auto
mesh.data=0                         | mesh.data
mesh.model=-2                       | mesh.model | each must be at least 1
mesh.data=-1 mesh.fsdp=-1           | mesh.data | mesh.fsdp | one of them may be -1
data.vocab=words                    | mean 'word'
"""
SHORT = {
    "CONTEXT": "512",
    "LEARNED": LEARNED,
    "UPDATES": "train.segments_per_call=4 train.segments_per_update=2",
}


def override(changes: str) -> ConfigDict:
    """Returns the default config with the fields of "a.b=1 c.d=2" set."""
    config = configs.default()
    for change in changes.split():
        name, _, text = change.partition("=")
        configs.override(config, name, text)
    return config


@pytest.mark.parametrize("row", REFUSED.strip().splitlines())
def test_impossible_values_are_refused(row: str) -> None:
    changes, *parts = (cell.strip() for cell in row.format(**SHORT).split(" | "))
    message = refusal(configs.parse, override(changes))
    for part in parts:
        assert part in message


def test_learned_places_that_suffice_are_accepted() -> None:
    assert configs.parse(override(LEARNED)).model.n_position == 64


# Overrides


@pytest.mark.parametrize(
    "field, text, value",
    [
        ("model.n_layer", "3", 3),
        ("optim.lr", "1e-3", 1e-3),
        ("optim.lr", "1", 1.0),
        ("model.same_length", "true", True),
        ("model.same_length", "False", False),
        ("data.path", "a=b, *.py", "a=b, *.py"),
        ("generate.prompt", "3", "3"),
    ],
)
def test_a_flag_is_read_by_the_type_of_its_field(
    field: str, text: str, value: Any
) -> None:
    config = configs.default()
    configs.override(config, field, text)
    section, key = field.split(".")
    got = getattr(getattr(configs.parse(config), section), key)
    assert got == value and type(got) is type(value)


@pytest.mark.parametrize(
    "field, text, wanted",
    [
        ("model.n_layer", "3.0", "a whole number"),
        ("model.n_layer", "", "a whole number"),
        ("optim.lr", "fast", "a number"),
        ("model.same_length", "yes", "true or false"),
        ("model.same_length", "1", "true or false"),
    ],
)
def test_a_flag_of_another_type_is_refused(field: str, text: str, wanted: str) -> None:
    message = refusal(configs.override, configs.default(), field, text)
    assert message == f"{field} = {text!r} is not {wanted}"


def test_a_flag_of_an_unknown_field_is_refused() -> None:
    message = refusal(configs.override, configs.default(), "train.sed", "1")
    assert message == "unknown config field 'train.sed' (did you mean 'train.seed'?)"


def test_a_flag_reaches_what_an_experiment_left_out() -> None:
    config = ConfigDict({"optim": {"lr": 1}})
    configs.override(config, "optim.lr", "0.5")
    configs.override(config, "train.seed", "7")
    parsed = configs.parse(config)
    assert (parsed.optim.lr, parsed.train.seed) == (0.5, 7)


# Files


def test_load_takes_a_path_and_a_packaged_name() -> None:
    path = Path(__file__).parents[1] / "experiments" / "quickstart.py"
    by_path = configs.parse(configs.load(str(path)))
    assert by_path == configs.parse(configs.load("quickstart"))
    assert by_path != Config()
    ablation = FOLDER / "ablations" / "wt103_128m.py"
    assert configs.load("wt103_128m") == configs.load(str(ablation))


def test_files_that_are_no_config_are_refused(tmp_path: Path) -> None:
    missing = tmp_path / "missing.py"
    assert "no config file" in refusal(configs.load, str(missing))
    assert "no config file" in refusal(configs.load, str(tmp_path))
    text = tmp_path / "config.txt"
    text.write_text("n_layer = 3")
    assert "no config file" in refusal(configs.load, str(text))
    assert "did you mean 'quickstart'?" in refusal(configs.load, "quickstrat")


@pytest.mark.parametrize(
    "body, reason",
    [
        ("def get_config(:", "SyntaxError"),
        ("get_configs = None", "no get_config()"),
        ("import nowhere_to_be_found", "ModuleNotFoundError"),
        ("def get_config():\n    raise ValueError('one\\ntwo')", "ValueError: one"),
        ("def get_config(): pass", "returns NoneType"),
        ("def get_config(): return 3", "returns int"),
        (
            "from txl_jax import config\n"
            "def get_config():\n"
            "    c = config.default()\n"
            "    c.modle.n_layer = 3\n"
            "    return c",
            "model",
        ),
        (
            "from txl_jax import config\n"
            "def get_config():\n"
            "    c = config.default()\n"
            "    c.model.n_layer = 'three'\n"
            "    return c",
            "n_layer",
        ),
    ],
)
def test_an_experiment_that_fails_is_refused(
    tmp_path: Path, body: str, reason: str
) -> None:
    path = tmp_path / "experiment.py"
    path.write_text(body + "\n")
    message = refusal(configs.load, str(path))
    assert str(path) in message and reason in message


def test_an_experiments_own_refusal_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "experiment.py"
    path.write_text(
        "from txl_jax.config import Config, default, parse\n"
        "def get_config():\n"
        "    c = default()\n"
        "    c.train.num_steps = 0\n"
        "    parse(c)\n"
    )
    assert refusal(configs.load, str(path)).startswith("train.num_steps = 0")


def test_a_saved_config_comes_back(tmp_path: Path) -> None:
    config = configs.parse(
        changed(
            optim_dot_lr=1e-3,
            generate_dot_prompt="é\n",
            model_dot_cutoffs=(3, 9),
            model_dot_tie_projs=(False, True, True),
        )
    )
    configs.save_json(config, tmp_path / "config.json")
    assert configs.parse(configs.load_json(tmp_path / "config.json")) == config


@pytest.mark.parametrize("content", ["", "{", "[]", "null", '"text"', "\x80"])
def test_a_damaged_saved_config_is_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(content.encode("latin-1"))
    assert f"cannot read {path}" in refusal(configs.load_json, path)


OLDER: dict[str, tuple[str, Any]] = {
    "data.copy_delay": ("data.corpus", "copying:24,0,0"),
    "data.copying": ("data.corpus", "copying:24,8,8"),
    "optim.beta2": ("optim.betas", (0.9, 0.98)),
    "train.roll": ("train.order", "roll"),
    "recl.step": ("recl.contexts", (100, 1000, 50)),
    "compile.largest_batch": ("compile.streams_per_chip", -1),
    "generate.prompt_file": ("generate.prompt", "@lines.txt"),
}
OLDER_VALUES = {
    "data.copy_delay": 24,
    "data.copying": [24, 8, 8],
    "optim.beta2": 0.98,
    "train.roll": True,
    "recl.step": 50,
    "compile.largest_batch": True,
    "generate.prompt_file": "lines.txt",
}


@pytest.mark.parametrize("name", OLDER)
def test_a_saved_config_of_an_older_version_is_upgraded(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    section, _, key = name.partition(".")
    saved: dict[str, Any] = {section: {key: OLDER_VALUES[name]}}
    if section == "data":
        saved["data"]["corpus"] = "copying"
    saved["speed"] = {"seed": 3}  # which changes no result that is kept
    (tmp_path / "config.json").write_text(json.dumps(saved))
    config = configs.load_json(tmp_path / "config.json")
    new, value = OLDER[name]
    new_section, _, new_key = new.partition(".")
    assert config[new_section][new_key] == value
    line = capsys.readouterr().err
    assert name in line and f"became {new}" in line and line.count("\n") == 1


def test_a_removed_field_is_accepted_at_its_fixed_value_only(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "config.json"
    path.write_text('{"data": {"copy_seed": 0}, "run": {"connect_seconds": 9}}')
    config = configs.load_json(path)
    assert "copy_seed" not in config["data"] and not config["run"]
    path.write_text('{"data": {"copy_seed": 7}}')
    removed = "this version has removed the field"
    assert f"data.copy_seed = 7: {removed}" in refusal(configs.load_json, path)
    argv = ["--config.data.copy_seed=0", "--evaluation=false", "--mesh=auto"]
    assert flags.parse_overrides(argv, "compile") == {"compile.mesh": "auto"}
    assert "compile.evaluation has been removed" in capsys.readouterr().err
    assert removed in refusal(flags.parse_overrides, ["--config.data.copy_seed=7"], "")


def test_a_flag_of_an_older_version_is_translated(
    capsys: pytest.CaptureFixture[str],
) -> None:
    argv = ["--config.train.roll", "--prompt_file=lines.txt", "--config.data.path=x"]
    argv.append("--config.data.copying=24,8,8")
    assert flags.parse_overrides(argv, "generate") == {
        "train.order": "roll",
        "generate.prompt": "@lines.txt",
        "data.path": "x",
        "data.corpus": "copying:24,8,8",
    }
    assert "--config.train.roll is now --config.train.order" in capsys.readouterr().err
    assert "data.corpus, which replaces data.copy_delay" in refusal(
        flags.parse_overrides, ["--config.data.copy_delay=3"], ""
    )


def test_a_folder_without_a_saved_config_is_refused(tmp_path: Path) -> None:
    message = refusal(configs.load_json, tmp_path / "config.json")
    assert f"{tmp_path} holds no run" in message


# Whose run it is


def other(value: Any) -> Any:
    """Returns another value of the same type that every check accepts."""
    others = {
        "bool": lambda: not value,
        "int": lambda: value * 2 or 2,
        "float": lambda: value / 2 or 0.25,
        "str": lambda: value + "x",
        "tuple": lambda: (*value, True),
    }
    return others[type(value).__name__]()


IDENTITY = {
    *(
        f"data.{field.name}"
        for field in dataclasses.fields(Config().data)
        if field.name != "data_dir"
    ),
    *(f"train.{name}" for name in ("seed", "batch_size", "tgt_len")),
    *(f"train.segments_per_{name}" for name in ("call", "update")),
    "train.batch_chunk",
    *(f"train.{name}" for name in ("order", "sentence_end", "varlen")),
    *(f"train.{name}" for name in ("ext_len", "half_loss")),
    *(f"train.{name}" for name in ("score_ids_from", "reset_memory_at")),
    "train.init_from",
    *(f"optim.{field.name}" for field in dataclasses.fields(Config().optim)),
    *(
        f"model.{field.name}"
        for field in dataclasses.fields(Config().model)
        if field.name not in ("kernel", "remat", "unroll")
    ),
}


@pytest.mark.parametrize(
    "name",
    [
        f"{section}.{field.name}"
        for section, fields in configs.SECTIONS.items()
        for field in dataclasses.fields(fields)
    ],
)
def test_a_run_is_what_its_identity_fields_say(name: str) -> None:
    section, key = name.split(".")
    old = getattr(Config(), section)
    new = dataclasses.replace(old)
    # Past the checks, since some fields have only one value so far.
    object.__setattr__(new, key, other(getattr(old, key)))
    given = dataclasses.replace(Config())
    object.__setattr__(given, section, new)
    found = configs.conflicts(Config(), given)
    if name in IDENTITY:
        was, now = getattr(old, key), getattr(new, key)
        assert found == [f"{name} was {was!r}, is now {now!r}"]
    else:
        assert found == []


# The experiments


@pytest.mark.parametrize("path", EXPERIMENTS, ids=lambda path: path.stem)
def test_an_experiment_is_short_and_works(path: Path) -> None:
    config = configs.parse(configs.load(str(path)))
    assert config != Config()
    assert json.loads(json.dumps(dataclasses.asdict(config)))
    assert len(path.read_text("utf-8").splitlines()) <= 40
