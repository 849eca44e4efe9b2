"""Every flag of every mode changes the result, a file, a program or the error.

The long test runs each mode with each of its flags.
"""

import contextlib
import dataclasses
import functools
import itertools
import json
import logging
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import pytest
from ml_collections import ConfigDict

from tests.promises.test_every_pair_trains import values_of
from tests.support.trained import TEXT, Home, command, home
from txl_jax import config as configs
from txl_jax.cli import flags
from txl_jax.cli.flags import MODES, takes
from txl_jax.cli.help import as_flag
from txl_jax.config import Config
from txl_jax.errors import UserError

FIXTURES = (home,)
# The flags of all commands of a mode and, below them, further flags of some: those with
# which other flags have an effect. A field stands for its flag.
COMMANDS = """
train --config={home}/tiny.py --workdir={new} train.num_steps=4 train.eval_every=2 \
eval.streams=1
    model.dropout=0.1 checkpoint.every_steps=1
    train.segments_per_call=2 train.segments_per_update=2
    model.cutoffs=20,100 model.div_val=2 model.norm_init_std=0.1
    model.position=shaw model.n_position=9
    model.same_length=true optim.optimizer=lamb
    train.max_loss_factor=1.01 optim.lr=9.0 optim.warmup_steps=2
    model.mem_len=0 train.ext_len=2 eval.mem_len=0 eval.ext_len=4
    eval.dynamic=rms eval.dynamic_lr=0.01 generate.output={new}/samples
    eval.cache_len=9 eval.cache_weight=0.1 eval.cache_theta=0.2
    generate.context_tokens=5 generate.temperature=2
evaluate --workdir={home}/run eval.streams=1
    eval.dynamic=rms eval.dynamic_lr=0.01 eval.max_tokens=90
    eval.cache_len=9 eval.cache_weight=0.1 eval.cache_theta=0.2 eval.max_tokens=90
    eval.mem_len=0 eval.ext_len=4 eval.max_tokens=90
generate --workdir={home}/run generate.num_tokens=40
    generate.context_tokens=9
    generate.prompt='123456789 is 12345'
    generate.prompt='123456789 is 12345' generate.mem_len=0
score --workdir={home}/run score.path={home}/few.txt
    score.output={new}/lines
    eval.mem_len=0 eval.ext_len=4
attention --workdir={home}/run attention.segments=1
prepare --config={home}/tiny.py
    data.vocab=word
    data.vocab=word data.vocab_size=9
import --workdir={new}/model --format=txl_jax --source={home}/tiny.safetensors
export --workdir={home}/run --format=txl_jax --target={new}/file
    convert.format=stablehlo convert.target={new}/programs
compile --config={home}/tiny.py compile.topology=v5e:2x2
    mesh.model=2
table --workdir={new} table.table=10 table.rows=wt103_128m table.seeds=1 \
train.num_steps=4 eval.max_tokens=90
speed --workdir={home}/run eval.sweep=mem_len=4
recl --workdir={new} --workdirs={home}/run recl.contexts=2,4,2 recl.positions=8
"""
BLOCKS = re.split(r"\n(?=\S)", COMMANDS.strip())
CASES = {block.split()[0]: block.splitlines() for block in BLOCKS}
# Values of fields that no rule of `values` finds.
VALUES = dict(
    each.split("=", 1)
    for each in r"""
    model.cutoffs=20,100 model.tie_projs=true,false,true model.remat_policy=full
    attention.at=50 eval.cache_weight=0.3
    data.corpus=enwik8 data.path={home}/few.txt data.data_dir={new}/data
    data.vocab_path={home}/words.txt train.order=roll train.reset_memory_at=\n
    train.init_from={home}/run optim.betas=0.5,0.9 eval.checkpoint=30
    eval.reset_memory_at=\n eval.sweep=mem_len=2 generate.prompt=7 generate.stop=9
    generate.output={new}/out score.path={home}/text.txt
    score.output={new}/out
    run.profile_steps=1:2 convert.source={home}/run convert.target={new}/other
    table.table=6 table.rows=wt103_half_loss recl.contexts=2,6,2
    """.split()
)
# Fields of modes that save them, or take the description of a run.
SAVED, RUNS = "score|attention|compile|convert|eval.sweep", "model|data|train|optim|ch"
WITHOUT = {"train": SAVED, "compile": f"{RUNS}|run", "table": f"{RUNS}|run"}
# A cache, a log, a watchdog and a server, which change nothing in a process of tests.
UNSEEN = "run.(compilation|wandb|hang|profiler)"
TIMES = re.compile("second|ratio|provenance|goodput|_time$|tokens/s|^compiling")
KEY = re.compile("with key '(.*)'")
TEXTS = ("samples", "lines", "out", "sample.txt", "file", "other", "/config.json")


@pytest.fixture
def programs(monkeypatch: pytest.MonkeyPatch) -> Iterator[set[str]]:
    """Returns a set that collects the keys of the programs that jax needs."""
    keys: set[str] = set()

    def collect(record: logging.LogRecord) -> bool:
        keys.update(KEY.findall(record.getMessage()))
        return False

    one, logger = jax.devices()[:1], logging.getLogger("jax._src.compiler")
    monkeypatch.setattr(jax, "devices", lambda *_: one)
    monkeypatch.setattr(logger, "level", logging.DEBUG)
    logger.addFilter(collect)
    yield keys
    logger.removeFilter(collect)


def untimed(x: Any, name: str) -> Any:
    """Returns JSON without times, and without the entries of this name."""
    if isinstance(x, (list, tuple)):
        return [untimed(each, name) for each in x]
    if isinstance(x, dict):
        return {k: untimed(x[k], name) for k in x if k != name and not TIMES.search(k)}
    return x


def contents(path: Path) -> Any:
    """Returns what a command has written to a file, as far as it is the same again."""
    if path.name == "metrics.jsonl":
        return [json.loads(line)["exact"] for line in path.read_text().splitlines()]
    if path.is_file() and str(path).endswith(TEXTS):
        return path.read_bytes()
    return None


def run(argv: tuple[str, ...], new: Path, programs: set[str]) -> tuple[Any, ...]:
    """Returns all effects of a command whose {new} is an empty folder."""
    new.mkdir()
    jax.clear_caches()
    programs.clear()
    done = command(*(each.replace("{new}", str(new)) for each in argv))
    said = [line for line in done.err.splitlines() if not TIMES.search(line)]
    paths = [path for path in sorted(new.rglob("*")) if "tensorboard" not in path.parts]
    written = [(str(path), contents(path)) for path in paths]
    text = repr((said, written)).replace(str(new), "")
    last = done.out.replace(str(new), "").splitlines()[-1:]
    result = json.loads(last[0]) if last and done.status in (0, 2) else None
    return done.status, text, frozenset(programs), result


def values(name: str, base: Config) -> list[str]:
    """Returns valid values of a field, as texts, that differ from the config's."""
    found = [*map(as_flag, values_of(name, base)[1:]), "x"]
    valid = []
    for text in [VALUES[name]] if name in VALUES else found:
        changed = ConfigDict(dataclasses.asdict(base))
        with contextlib.suppress(UserError):
            configs.override(changed, name, text)
            valid += [text] if configs.parse(changed) != base else []
    return valid[:3]


@pytest.fixture(scope="module")
def files(home: Home) -> Home:
    """Adds the files that the cases and the values name."""
    (home.path / "few.txt").write_text(TEXT[:300])
    (home.path / "words.txt").write_text("<eos>\nless\n<unk>\nis\n1\n")
    home.read("export", "--format=txl_jax", f"--target={home.path}/tiny.safetensors")
    return home


def tried(mode: str, section: str) -> list[str]:
    """Returns the fields of a section that are tried in a mode."""
    without = f"{WITHOUT.get(mode, UNSEEN)}|{UNSEEN}"
    names = [x for x in configs.FIELDS if x.startswith(f"{section}.")]
    return [x for x in names if takes(mode, x) and not re.match(without, x)]


@pytest.mark.long
@pytest.mark.parametrize(
    "mode, section", [(x, y) for x in MODES for y in configs.SECTIONS if tried(x, y)]
)
def test_every_flag_has_an_effect(
    mode: str, section: str, files: Home, tmp_path: Path, programs: set[str]
) -> None:
    """Fields of the mode's section, and in `train` all, have a value that is tried."""
    if mode == "compile":
        pytest.importorskip("libtpu")
    folders = (tmp_path / str(n) for n in itertools.count())
    always, *more = (each.replace("{home}", str(files.path)) for each in CASES[mode])
    words = [shlex.split(f"{always} {case}") for case in ["", *more]]
    cases = [[re.sub(r"^(?=\w+\.\w+=)", "--config.", x) for x in y] for y in words]

    @functools.cache
    def effects(*argv: str) -> tuple[Any, ...]:
        return run(argv, next(folders), programs)

    def is_idle(name: str) -> bool:
        idle = mode == "train" or section == MODES[mode].section
        key = name.removeprefix(f"{section}.")
        for case in cases:
            for text in values(name, flags.parse(case).config):
                idle, flag = True, f"--config.{name}={text}"
                assert effects(*case)[0] == 0, effects(*case)
                changed = effects(*case, flag.replace("{home}", str(files.path)))
                if untimed(changed, key) != untimed(effects(*case), key):
                    return False
        return idle

    assert not list(filter(is_idle, tried(mode, section)))
