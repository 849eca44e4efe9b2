"""What a user can get wrong in what is given: flags, configs, meshes and prompts.

Each mistake is one clear line that names the field and the mend, with status 2, and
every file is as it was. `test_bad_inputs_files.py` has what is wrong with files, and
`tests/cli/test_main.py` the first mistakes of each mode.
"""

import dataclasses
import json
from contextlib import closing
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from tests.support import tiny
from tests.support.trained import Done, command
from txl_jax import config as configs
from txl_jax.checkpoint import save_restore
from txl_jax.checkpoint.manager import open_checkpoints
from txl_jax.cli.prepare import prepare
from txl_jax.data.streams import Position
from txl_jax.update.step import make_program
from txl_jax.workdir.claim import claim
from txl_jax.workdir.fit import fit_mesh, fit_vocab
from txl_jax.workdir.lock import locked

pytestmark = pytest.mark.promise("User errors are one line")

TEXT = "".join(f"{n} follows {n - 1}\n" for n in range(1, 301))
EXPERIMENT = """
from txl_jax import config

def get_config():
    c = config.default()
    c.data.update(corpus="text", path={text!r}, data_dir={data!r})
    c.model.update(n_layer=1, d_model=8, n_head=2, d_head=4, d_inner=8, mem_len=4)
    c.train.update(num_steps=2, batch_size=8, tgt_len=4, log_every=1, eval_every=2)
    c.eval.update(tgt_len=16, mem_len=4)
    c.generate.update(prompt="1", num_tokens=1, mem_len=4)
    c.checkpoint.every_steps = 1
    return c
"""


def make_home(path: Path) -> None:
    """Makes a text and a run of it that stopped after two updates, all weights 0."""
    (path / "text.txt").write_text(TEXT)
    places = {"text": str(path / "text.txt"), "data": str(path / "data")}
    (path / "tiny.py").write_text(EXPERIMENT.format(**places))
    run, config = path / "run", configs.parse(configs.load(str(path / "tiny.py")))
    tokens = prepare(config.data)
    with locked(run):
        claim(run, config, tokens)
    fitted = fit_vocab(config, len(tokens.vocab))
    init, places, _ = make_program(
        fitted.model, fitted.train, fitted.optim, fit_mesh(fitted)
    )
    shapes = dataclasses.replace(jax.eval_shape(init), rng=jax.random.key(0))

    def zeros(leaf: Any, place: Any) -> Any:
        key = jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        made = leaf if key else np.zeros(leaf.shape, leaf.dtype)
        return jax.device_put(made, place)

    state = jax.tree.map(zeros, shapes, places)
    with closing(open_checkpoints(run, config.checkpoint)) as manager:
        for step in (1, 2):
            save_restore.save(manager, step, state, Position(0, step, 0), 6.0 - step)
    lines = [json.dumps({"step": step, "exact": {"loss": 5.5}}) for step in (1, 2)]
    (run / "metrics.jsonl").write_text("\n".join(lines) + "\n")


CONFIG = "--config={home}/tiny.py"
NEW = (CONFIG, "--workdir={home}/new")
RUN = "--workdir={home}/run"
LONG = "x" * 300  # no file system has such a name


def new(*fields: str) -> tuple[str, ...]:
    return (*NEW, *(f"--config.{field}" for field in fields))


def mode(name: str, *flags: str, run: str = RUN) -> tuple[str, ...]:
    return (f"--mode={name}", run, *flags)


def experiment(name: str) -> tuple[str, ...]:
    return (f"--config={{home}}/{name}", NEW[1])


def compile_for(*flags: str) -> tuple[str, ...]:
    return ("--mode=compile", CONFIG, *flags)


def refuse(home: Path, argv: tuple[str, ...], reason: str) -> Done:
    """Runs the command, which must be refused for the reason and change nothing."""
    before = contents(home)
    done = command(*(flag.format(home=home) for flag in argv))
    assert (done.status, done.out) == (2, "")
    line = tiny.complaint(done.err)
    assert len(line) < 900 and reason.format(home=home) in line
    after = contents(home)
    assert {path: after.get(path) for path in before} == before
    for path in after.keys() - before.keys():  # what was prepared whole may stay
        assert path.is_relative_to(home / "data" / "txl_jax")
        assert "incomplete" not in path.name
    return done


def contents(home: Path) -> dict[Path, tuple[int, ...]]:
    """Returns all that tells two states of the files apart."""
    stats = {path: path.lstat() for path in home.rglob("*")}
    return {
        path: (
            stat.st_mode,
            *(() if path.is_dir() else (stat.st_size, stat.st_mtime_ns)),
        )
        for path, stat in stats.items()
    }


# Experiments with mistakes, and what is said of them.
FILES = {
    "no_function": ("config = 1", "no get_config()"),
    "nothing": ("def get_config():\n    pass", "returns NoneType, not a ConfigDict"),
    "raises": ("def get_config():\n    return {}['a\\nb']", "failed: KeyError"),
    "leaves": ("import sys\nsys.exit(0)", "failed: SystemExit"),
    "lacks": ("import no_such_module", "No module named 'no_such_module'"),
    "flat": ("def get_config():\n    return {'model': 3}", "section 'model' = 3"),
    "section": ("def get_config():\n    return {'modle': {}}", "mean 'model'"),
    "text": (
        "def get_config():\n    return {'model': {'n_layer': '12'}}",
        "model.n_layer = '12' must be of type int",
    ),
    "none": (
        "def get_config():\n    return {'train': {'seed': None}}",
        "train.seed = None must be of type int",
    ),
    "list": (
        "def get_config():\n    return {'model': {'cutoffs': [1.5]}}",
        "model.cutoffs = [1.5] must be a tuple of ints",
    ),
    "numbered": ("def get_config():\n    return {3: {}}", "config section 3"),
    "nul": ("\0", "null bytes"),
}

# What is given, and what the line says.
TABLE: dict[str, tuple[tuple[str, ...], str]] = {
    **{f"{name}.py": (experiment(f"{name}.py"), FILES[name][1]) for name in FILES},
    "config of YAML": (experiment("config.yaml"), "no config file"),
    "config is a folder": (experiment("data"), "no config file '{home}/data'"),
    "config's name too long": (experiment(f"{LONG}.py"), "give FILE.py or a packaged"),
    # Flags
    "section misspelt": (new("modle.n_layer=3"), "mean '--config.model.n_layer'"),
    "section left out": (new("n_layer=3"), "mean '--config.model.n_layer'"),
    "1e5": (new("train.num_steps=1e5"), "train.num_steps = '1e5' is not a whole"),
    "word for number": (new("optim.lr=fast"), "optim.lr = 'fast' is not a number"),
    "nothing for number": (new("train.tgt_len="), "train.tgt_len = '' is not a whole"),
    "neither true nor false": (
        new("model.same_length=maybe"),
        "model.same_length = 'maybe' is not true or false",
    ),
    "list of words": (new("model.cutoffs=a,b"), "or several with commas between"),
    "5,000 digits": (new("train.tgt_len=" + "9" * 5000), "is not a whole number"),
    "not a number": (new("optim.lr=nan"), "optim.lr = nan must be a finite number"),
    "infinite": (new("optim.clip=inf"), "optim.clip = inf must be a finite number"),
    "too large": (new("train.num_steps=99999999999"), "must be below 2^31"),
    # Model
    "dropout of 1": (new("model.dropout=1"), "model.dropout = 1.0 must be at least 0"),
    "no heads": (new("model.n_head=0"), "model.n_head = 0 must be at least 1"),
    "cutoffs that fall": (new("model.cutoffs=10,5"), "must be above 0, rising"),
    "cutoffs too large": (new("model.cutoffs=9,300"), "below the vocabulary's 256"),
    "ties for one of two": (
        new("model.cutoffs=99", "model.tie_projs=true"),
        "for each of the 2 clusters",
    ),
    "no features left": (
        new("model.cutoffs=99", "model.div_val=100"),
        "model.div_val = 100 leaves the embeddings",
    ),
    "position unknown": (new("model.position=rotary"), "must be one of transformer_xl"),
    "position with memory": (new("model.position=sinusoidal"), "set mem_len to 0"),
    "positions without a table": (new("model.position=shaw"), "need a table of"),
    "too few places": (
        new(
            *("model.position=learned", "model.n_position=4", "model.mem_len=0"),
            *("eval.mem_len=0", "generate.mem_len=0"),
        ),
        "model.n_position = 4: raise it",
    ),
    "u of nothing": (
        new("model.position=none", "model.untie_r"),
        "model.untie_r has no effect",
    ),
    "dtype": (new("model.dtype=float16"), "did you mean 'bfloat16'"),
    "zeros in documents": (
        new("model.initial_memory=zeros", "train.order=roll"),
        'set model.initial_memory to "empty"',
    ),
    "kernel of TPUs": (new("model.kernel=tpu"), 'use model.kernel "xla" or "chunked"'),
    "kernel and chunks": (
        new("model.kernel=chunked", "train.batch_chunk=2"),
        "make batch_size / batch_chunk",
    ),
    # Optimiser
    "optimizer": (new("optim.optimizer=adamw"), "did you mean 'adam'"),
    "schedule": (new("optim.schedule=linear"), "must be one of cosine"),
    "warm-up": (new("optim.warmup_steps=9"), "train.num_steps = 2; shorten the warm"),
    "beta": (new("optim.betas=0.9,1"), "optim.betas = (0.9, 1.0) must be"),
    "epsilon": (new("optim.epsilon=0"), "optim.epsilon = 0.0 must be above 0"),
    "idle final rate": (
        new("optim.schedule=constant", "optim.min_lr_ratio=0.1"),
        "has no effect with optim.schedule",
    ),
    # Training
    "streams": (new("train.batch_size=8000"), "decrease train.batch_size"),
    "sentences": (new("train.order=sentences"), "needs train.sentence_end"),
    "no such sentence": (
        new("train.order=sentences", "train.sentence_end=0"),
        "train.sentence_end = 0 does not occur in the text",
    ),
    "no such token": (
        new("train.reset_memory_at=300"),
        "train.reset_memory_at = 300 is not a token of this vocabulary",
    ),
    "half the loss twice": (
        new("train.half_loss", "train.ext_len=4", "model.mem_len=0"),
        "train.half_loss = True and train.ext_len = 4",
    ),
    "keep none": (new("checkpoint.keep=0"), "checkpoint.keep = 0 must be at least 1"),
    "cadence": (
        new("train.segments_per_call=2", "checkpoint.every_steps=3"),
        "multiple of the 2 updates in one call",
    ),
    "segments": (new("train.segments_per_update=2"), "a multiple of train.segments_"),
    "factor": (new("train.max_loss_factor=0.5"), "must be above 1"),
    "profile": (new("run.profile_steps=15:10"), 'such as "10:15"'),
    "patience": (new("run.hang_seconds=-1"), "run.hang_seconds = -1"),
    # Meshes and topologies
    "more devices": (new("mesh.data=16"), "does not fit 8 devices; set one of them to"),
    "odd devices": (new("mesh.model=3"), "does not fit 8 devices"),
    "mesh of -2": (new("mesh.model=-2"), "each must be at least 1"),
    "heads": (new("mesh.model=8"), "make it a multiple of 8, or lower mesh.model"),
    "chip": (compile_for("--topology=v9:2x2"), "must be one of v3, v4"),
    "lengths": (
        compile_for("--topology=v4:4x4"),
        "give 3 lengths for a slice of v4, such as v4:4x4x4",
    ),
    "no chips": (
        compile_for("--topology=v5e:0x4"),
        "give 2 lengths for a slice of v5e, such as v5e:4x4",
    ),
    "no slice": (compile_for("--topology=v5e-8"), "did you mean 'v5e'"),
    "mesh named": (compile_for("--mesh=best"), "compile.mesh = 'best' must be one of"),
    # Prompts, and what to evaluate
    "top_k": (mode("generate", "--top_k=-1"), "generate.top_k = -1"),
    "top_p": (
        mode("generate", "--top_p=2"),
        "generate.top_p = 2.0 must be above 0, at most 1",
    ),
    "seed": (mode("generate", "--seed=4294967296"), "must be from 0 to 4294967295"),
    "no streams": (mode("evaluate", "--streams=0"), "eval.streams = 0"),
    "step of -1": (mode("evaluate", "--checkpoint=-1"), "neither best, latest"),
    "step too large": (mode("evaluate", "--checkpoint=" + "9" * 99), "nor a step"),
    "steps": (mode("evaluate", "--checkpoint=1,,2"), "several with commas between"),
    "document": (
        mode("evaluate", "--reset_memory_at=300"),
        "eval.reset_memory_at = 300 is not a token of this vocabulary",
    ),
    "nothing to see": (
        mode("evaluate", "--same_length", "--mem_len=0"),
        "set mem_len, or same_length=false",
    ),
    # Places
    "workdir in a file": ((CONFIG, "--workdir={home}/text.txt/x"), "Not a directory"),
    "workdir too long": ((CONFIG, f"--workdir={{home}}/{LONG}"), "File name too long"),
    "workdir of the web": ((CONFIG, "--workdir=https://x/y"), "is neither a folder"),
    "neither": (("--mode=evaluate",), "or the --workdir of a run"),
}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Holds a text, a run of it, and experiments with mistakes."""
    path = tmp_path_factory.mktemp("home")
    make_home(path)
    for name, (source, _) in FILES.items():
        (path / f"{name}.py").write_text(source)
    (path / "config.yaml").write_text("model: {n_layer: 3}")
    return path


@pytest.mark.parametrize("mistake", TABLE)
def test_a_mistake_is_one_line_and_changes_nothing(home: Path, mistake: str) -> None:
    refuse(home, *TABLE[mistake])


def test_a_model_that_is_too_large_is_one_line(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run_out(*_: Any) -> None:
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory\nmore")

    monkeypatch.setattr("txl_jax.cli.modes.load", run_out)
    refuse(home, mode("evaluate"), "(RESOURCE_EXHAUSTED: Out of memory): in train")
