"""The command line: what each mode leaves and prints, and what it refuses, in one line.

One tiny run is trained, once, through `main(argv)`; the rest reads it.
"""

import contextlib
import dataclasses
import hashlib
import io
import json
import math
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import jax
import pytest

import txl_jax
from tests.support import tiny
from txl_jax import config as configs
from txl_jax.cli import modes
from txl_jax.cli.flags import MODES
from txl_jax.cli.modes import check_processes
from txl_jax.errors import UserError
from txl_jax.generate.texts import Sample
from txl_jax.main import main
from txl_jax.report.checksum import verify_checksum
from txl_jax.report.log import read_metrics
from txl_jax.runtime import distributed
from txl_jax.workdir.lock import locked

ROOT = Path(__file__).parents[2]
TEXT = "".join(f"{n % 97} is {n} less {n - n % 97}\n" for n in range(1000))
EXPERIMENT = """
from txl_jax import config

def get_config():
    c = config.default()
    c.data.update(corpus="text", path={path!r}, data_dir={data_dir!r})
    c.model.update(n_layer=2, d_model=16, n_head=2, d_head=8, d_inner=32)
    c.model.update(mem_len=8, dropout=0.0)
    c.train.update(num_steps=60, batch_size=8, tgt_len=8, log_every=1, eval_every=30)
    c.optim.lr = 2e-2
    c.eval.update(tgt_len=8, mem_len=8, baselines=True)
    c.generate.update(prompt="1 is ", num_tokens=20, mem_len=8)
    c.checkpoint.every_steps = 30
    return c
"""


class Done(NamedTuple):
    """What a command did."""

    status: int
    out: str
    err: str

    @property
    def result(self) -> dict[str, Any]:
        """The JSON of the last line on stdout."""
        assert self.status == 0, self.err
        return json.loads(self.out.splitlines()[-1])


def command(*argv: str) -> Done:
    with (
        contextlib.redirect_stdout(io.StringIO()) as out,
        contextlib.redirect_stderr(io.StringIO()) as err,
    ):
        status = main(list(argv))
    return Done(status, out.getvalue(), err.getvalue())


class Home(NamedTuple):
    """A folder with a text, an experiment and the run that it makes."""

    path: Path
    trained: Done

    @property
    def run(self) -> Path:
        """The trained run's workdir."""
        return self.path / "run"

    def read(self, mode: str, *argv: str) -> Done:
        """Runs a mode that needs the workdir alone."""
        return command(f"--mode={mode}", f"--workdir={self.run}", *argv)


SECRET = "of-no-one-else-8dJq2"


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Home:
    """Holds the trained run; about ten seconds, nearly all of them compiling."""
    path = tmp_path_factory.mktemp("home")
    (path / "text.txt").write_text(TEXT)
    places = {"path": str(path / "text.txt"), "data_dir": str(path / "data")}
    (path / "tiny.py").write_text(EXPERIMENT.format(**places))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_TOKEN", SECRET)
        trained = command(f"--config={path / 'tiny.py'}", f"--workdir={path / 'run'}")
    return Home(path, trained)


def split_file(home: Home, split: str) -> Path:
    (path,) = (home.path / "data" / "txl_jax").rglob(f"{split}.bin")
    return path


# Training


def test_nothing_of_the_environment_is_kept_or_told(home: Home) -> None:
    """A workdir is shown around, and the environment is where people keep tokens."""
    files = [path for path in home.run.rglob("*") if path.is_file()]
    assert len(files) > 5
    assert not [path for path in files if SECRET.encode() in path.read_bytes()]
    assert SECRET not in home.trained.out + home.trained.err


def test_the_last_line_is_the_result(home: Home) -> None:
    result = home.trained.result
    test = split_file(home, "test").read_bytes()
    assert test.decode() == TEXT[-len(test) :]
    assert (result["mode"], result["split"], result["step"]) == ("train", "test", 60)
    assert result["tokens"] == len(test) - 1
    assert result["ppl"] == pytest.approx(math.exp(result["nll"]))
    assert result["bpc"] == pytest.approx(result["nll"] / math.log(2))
    assert (result["streams"], result["cold_tokens"]) == (8, 8 * 8)
    assert result["sha256"] == hashlib.sha256(test).hexdigest()
    assert set(result["baselines_bpc"]) == {"order-2", "order-3", "gzip -9", "xz -9"}
    assert len(home.trained.out.splitlines()) == 1
    # Uniform bytes are ln 256 = 5.5 nats.
    assert result["nll"] < 2.5


def test_the_workdir_has_what_the_readme_lists(home: Home) -> None:
    result = home.trained.result
    assert sorted(path.name for path in home.run.iterdir()) == [
        "checkpoints",
        "config.json",
        "loss.png",
        "metrics.jsonl",
        "result.json",
        "run.json",
        "sample.txt",
        "tensorboard",
        "vocab.json",
    ]
    picture = (home.run / "loss.png").read_bytes()
    assert picture.startswith(b"\x89PNG\r\n\x1a\n") and len(picture) > 10_000
    sample = (home.run / "sample.txt").read_text("utf-8")
    assert sample.startswith("1 is ") and len(sample) > len("1 is ")
    saved = json.loads((home.run / "result.json").read_text())
    assert {"mode": "train", **saved} == result
    vocab = json.loads((home.run / "vocab.json").read_text())
    assert verify_checksum(vocab, required=True) == {"kind": "byte"}
    given = configs.parse(configs.load(str(home.path / "tiny.py")))
    assert configs.parse(configs.load_json(home.run / "config.json")) == given


def test_run_json_says_where_the_numbers_come_from(home: Home) -> None:
    run = json.loads((home.run / "run.json").read_text())
    assert run["seed"] == 1111
    assert run["git_revision"]
    assert run["versions"]["jax"] == jax.__version__
    assert (run["device_kind"], run["device_count"]) == ("cpu", 8)
    saved = json.loads((home.run / "config.json").read_text())
    assert run["config"] == verify_checksum(saved, required=True)
    for split in ("train", "valid", "test"):
        digest = hashlib.sha256(split_file(home, split).read_bytes()).hexdigest()
        assert run["data"]["splits"][split]["sha256"] == digest


TIMING = {"step_seconds", "compute_seconds", "input_wait_seconds"}
TIMING |= {"checkpoint_seconds", "tokens_per_second"}


def test_metrics_are_one_line_per_step_in_two_groups(home: Home) -> None:
    text = (home.run / "metrics.jsonl").read_text()
    lines = [json.loads(line) for line in text.splitlines()]
    assert [line["step"] for line in lines] == list(range(1, 61))
    names = {"loss", "grad_norm", "lr", "tokens", "skipped", "reason"}
    names |= {"skipped_in_row", "mean_loss"}
    for line in lines:
        validated = {"valid_nll"} if line["step"] in (30, 60) else set()
        assert set(line) == {"step", "exact", "timing"}
        assert set(line["exact"]) == names | validated
        assert set(line["timing"]) == TIMING
        assert (line["exact"]["tokens"], line["exact"]["skipped"]) == (64, False)
    losses = [line["exact"]["loss"] for line in lines]
    assert losses[0] == pytest.approx(math.log(256), abs=0.1)
    assert losses[-1] < 2.5
    assert lines[59]["exact"]["valid_nll"] < lines[29]["exact"]["valid_nll"]


def test_a_finished_run_is_not_trained_again(home: Home) -> None:
    def steps() -> dict[Path, int]:
        files = (home.run / "checkpoints").rglob("*")
        return {path: path.stat().st_mtime_ns for path in files}

    before, metrics = steps(), (home.run / "metrics.jsonl").read_bytes()
    again = command(f"--workdir={home.run}")
    assert "resumed at update 60" in again.err
    assert (home.run / "metrics.jsonl").read_bytes() == metrics
    assert steps() == before
    timing = {"seconds", "tokens_per_second", "train_seconds"}
    for name, value in home.trained.result.items():
        assert again.result[name] == value or name in timing, name


def test_run_json_keeps_every_start_and_tells_of_another_machine(
    home: Home, tmp_path: Path
) -> None:
    """Also a finished run that has lost its metrics is gone on with, and says so."""
    run = tmp_path / "run"
    shutil.copytree(home.run, run)
    (run / "metrics.jsonl").write_text("")
    said = json.loads((run / "run.json").read_text())
    start, *_ = said["starts"]
    assert (start["device_count"], start["git_revision"]) == (8, said["git_revision"])
    assert start["pid"] and start["host"] and start["time"] and start["usable_cores"]
    start["device_kind"] = "TPU v5 lite"
    said["starts"] = [start]
    (run / "run.json").write_text(json.dumps(said))
    again = command(f"--workdir={run}")
    assert again.result["updates"] == 60
    assert again.result["failed_saves"] == []
    assert again.result["nll"] == home.trained.result["nll"]
    assert "metrics.jsonl lacks the updates up to 60" in again.err
    difference = "device_kind was TPU v5 lite, is now cpu"
    assert f"not bit-identical to those before this start: {difference}" in again.err
    starts = json.loads((run / "run.json").read_text())["starts"]
    assert starts[0] == start and len(starts) == 2
    assert starts[1]["device_kind"] == "cpu"


def test_a_workdir_in_use_is_refused_and_can_be_read(home: Home) -> None:
    with locked(home.run):
        refused = command(f"--workdir={home.run}")
        read = home.read("evaluate")
    assert refused.status == 2
    assert f"txl_jax: {home.run} is in use by another run (process " in refused.err
    assert read.result["nll"] == home.trained.result["nll"]
    assert not (home.run / "run.lock").exists()


def test_a_damaged_checkpoint_is_refused_with_the_mend(
    home: Home, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    shutil.copytree(home.run, run)
    for path in (run / "checkpoints" / "60" / "params").rglob("manifest.ocdbt"):
        path.write_bytes(path.read_bytes()[:-3])
    done = command("--mode=generate", f"--workdir={run}", "--config.eval.checkpoint=60")
    assert_refused(home, done, "checkpoint 60 is damaged (item params")
    assert "set eval.checkpoint to another step of 30, 60" in done.err


@pytest.mark.parametrize("written", [0, 1, 2])
def test_a_kill_at_the_start_leaves_the_workdir_readable(
    home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, written: int
) -> None:
    names = ("config.json", "run.json", "vocab.json")
    before = {name: (home.run / name).read_bytes() for name in names}
    for name in names:
        (tmp_path / name).write_bytes(before[name])
    write_text = Path.write_text
    texts: list[str] = []

    def kill(path: Path, text: str, *args: Any) -> int:
        texts.append(text)
        if len(texts) <= written:
            return write_text(path, text, *args)
        write_text(path, text[: len(text) // 2], *args)
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "write_text", kill)
    with pytest.raises(KeyboardInterrupt):
        command(f"--workdir={tmp_path}")
    assert {name: (tmp_path / name).read_bytes() for name in names} == before


def test_a_run_begins_with_the_parameters_of_another(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At a rate of zero it ends with them too; its mean of parameters begins there."""
    nothing = [Sample("", "", 0, [], [])]
    monkeypatch.setattr("txl_jax.cli.generate.draw", lambda *_: nothing)
    source = home.path / "source"
    shutil.copytree(home.run, source)
    flags = [f"--config={home.path / 'tiny.py'}", f"--workdir={home.path / 'second'}"]
    flags += [f"--config.train.init_from={source}", "--config.optim.lr=0"]
    flags += ["--config.train.num_steps=30", "--config.optim.asgd_from=1"]
    done = command(*flags)
    assert done.result["nll"] == home.trained.result["nll"]
    first, *_ = read_metrics(home.path / "second" / "metrics.jsonl")
    assert first["step"] == 1
    assert first["exact"]["loss"] < 2.5
    # Where it began is not read again when it goes on.
    shutil.rmtree(source)
    again = command(*flags)
    assert "resumed at update 30" in again.err
    assert again.result["nll"] == done.result["nll"]


# Evaluation


@pytest.mark.parametrize(
    "flag, name, init, shortest",
    [
        ("mem_len=0,8", "mem_len", 8, {0, 8}),
        pytest.param("clamp_len=2", "clamp_len", 0, {0, 2}, marks=pytest.mark.long),
    ],
)
def test_a_sweep_is_as_many_evaluations(
    home: Home, flag: str, name: str, init: int, shortest: set[int]
) -> None:
    done = home.read("evaluate", f"--sweep={flag}", "--max_tokens=500")
    result = done.result
    assert (result["sweep"], result["init"]) == (name, init)
    assert result["shortest"] in shortest
    assert {row[name] for row in result["rows"]} == shortest
    for row in result["rows"]:
        flags = (f"--{name}={row[name]}", "--max_tokens=500")
        alone = home.read("evaluate", *flags).result
        assert (alone["nll"], alone["tokens"]) == (row["nll"], 500)
        assert alone["memory"]["cache_bytes"] == 2 * alone["mem_len"] * 16 * 8 * 4
        assert "bits_per_byte" not in alone  # whose bytes are those of the whole split
    kept = json.loads(Path(result["file"]).read_text())
    assert kept.items() <= result.items()
    for path in ("picture", "file"):
        Path(result[path]).unlink()
    assert f"{name} = " in done.err and f"(2 of {len(shortest)})" in done.err


def test_a_sweep_that_cannot_be_is_refused_at_its_start(home: Home) -> None:
    done = home.read("evaluate", "--sweep=mem_len=0,8", "--ext_len=4", "--mem_len=0")
    assert_refused(home, done, "eval.ext_len = 4 with eval.mem_len = 8")
    assert "1 of" not in done.err


def test_windows_and_cold_starts_have_their_flags(home: Home) -> None:
    flags = ("--sliding_window=9", "--max_tokens=40")
    slid = home.read("evaluate", *flags).result
    assert (slid["tokens"], slid["windows"], slid["mem_len"]) == (40, 32, 0)
    assert slid["nll"] < 4
    cold = home.read("evaluate", "--sweep=cold_start=11", "--max_tokens=300").result
    assert (cold["pieces"], cold["mode"]) == (27, "evaluate")
    assert cold["rows"][0]["nll"] > cold["settled_nll"]
    kept = json.loads(Path(cold["file"]).read_text())
    assert len(kept["nll_by_tokens_read"]) == 11
    for path in ("picture", "file"):
        Path(cold[path]).unlink()


@pytest.mark.long
def test_speed_takes_a_run_s_weights_or_fresh_ones(home: Home, tmp_path: Path) -> None:
    flags = ("--attention_lens=6,9", "--config.eval.tgt_len=4")
    trained = home.read("speed", *flags).result
    fresh = command(
        "--mode=speed",
        f"--config={home.path / 'tiny.py'}",
        f"--workdir={tmp_path / 'speed'}",
        "--config.model.vocab_size=256",
        *flags,
    ).result
    for result in (trained, fresh):
        assert [row["attention_len"] for row in result["rows"]] == [6, 9]
        assert Path(result["picture"]).exists()
        Path(result["picture"]).unlink()
        Path(result["file"]).unlink()


def test_evaluation_by_workdir_alone_repeats_the_training_s(home: Home) -> None:
    first = home.read("evaluate")
    assert first.result["mode"] == "evaluate"
    assert f"the model of update 60 in {home.run}\n" in first.err
    assert len(first.out.splitlines()) == 1
    names = {"seconds", "tokens_per_second", "mode"}
    for name, value in first.result.items():
        assert home.trained.result[name] == value or name in names, name
    assert home.read("evaluate").result["nll"] == first.result["nll"]


def test_the_length_of_a_segment_decides_nothing_while_memory_reaches(
    home: Home,
) -> None:
    short, long = (
        home.read("evaluate", f"--tgt_len={tgt_len}", "--mem_len=128").result
        for tgt_len in (8, 16)
    )
    assert (short["tgt_len"], long["tgt_len"], long["mem_len"]) == (8, 16, 128)
    assert long["cold_tokens"] == long["tokens"], "memory reaches the whole stream"
    assert long["nll"] == pytest.approx(short["nll"], rel=tiny.FLOAT32)
    assert long["nll"] != pytest.approx(home.trained.result["nll"], rel=1e-4)


@pytest.mark.parametrize(
    "flags, cold_tokens",
    [
        (["--same_length", "--clamp_len=4"], 8 * 8),
        (["--streams=16", "--config.eval.mem_len=5"], 16 * 5),
        pytest.param(["--warm_start=true"], 8, marks=pytest.mark.long),
        pytest.param(["--mem_len=0", "--tgt_len=1"], 0, marks=pytest.mark.long),
        pytest.param(["--mem_len=0", "--ext_len=8"], 8 * 8, marks=pytest.mark.long),
        (["--mem_len=0", "--ext_len=7", "--warm_start"], 7),
    ],
    ids=str,
)
def test_evaluation_takes_its_own_flags(
    home: Home, flags: list[str], cold_tokens: int
) -> None:
    result = home.read("evaluate", *flags).result
    assert result["cold_tokens"] == cold_tokens
    assert result["tokens"] == home.trained.result["tokens"]
    assert result["nll"] < 2.5
    assert result["nll"] != pytest.approx(home.trained.result["nll"], rel=1e-6)


def test_evaluation_takes_a_split_and_a_checkpoint(home: Home) -> None:
    result = home.read("evaluate", "--split=valid", "--checkpoint=30").result
    assert (result["split"], result["step"]) == ("valid", 30)
    assert result["tokens"] == split_file(home, "valid").stat().st_size - 1
    lines = (home.run / "metrics.jsonl").read_text().splitlines()
    assert result["nll"] == json.loads(lines[29])["exact"]["valid_nll"]


def test_evaluation_averages_checkpoints(home: Home) -> None:
    result = home.read("evaluate", "--checkpoint=average").result
    assert (result["checkpoint"], result["step"]) == ("average", 60)
    assert result["nll"] not in (
        home.read("evaluate", f"--checkpoint={step}").result["nll"] for step in (30, 60)
    )
    again = home.read("generate", "--config.eval.checkpoint=30,60", "--num_tokens=2")
    assert again.result["step"] == 60
    assert "averaging checkpoints 30, 60" in again.err


# Generation


def test_a_sample_starts_with_its_prompt_and_follows_its_seed(home: Home) -> None:
    settings = {"num_tokens": 12, "top_k": 20, "top_p": 0.9, "temperature": 0.9}
    flags = [f"--{name}={value}" for name, value in settings.items()]
    flags += ["--prompt=27 is ", "--seed=5"]
    done = home.read("generate", *flags)
    first = done.result
    assert done.out.startswith(first["text"] + "\n")
    assert (first["mode"], first["step"]) == ("generate", 60)
    assert (settings | {"seed": 5}).items() <= first.items()
    assert first["text"].startswith("27 is ")
    assert len(first["text"]) > len("27 is ")
    same, other = home.read("generate", *flags, "--samples=2").result["sampled"]
    assert same["text"] == first["text"] != other["text"]


def test_a_prompt_may_be_odd_and_long(home: Home) -> None:
    prompt = "naïve 😀 " * 20
    flags = ("--num_tokens=12", "--temperature=0")
    done = home.read("generate", f"--prompt={prompt}", *flags)
    assert done.result["text"].startswith(prompt)
    assert done.out.startswith(done.result["text"] + "\n")
    assert "are used" not in done.err, "a memory reads all of it"


def test_a_window_says_which_part_of_a_prompt_counts(home: Home) -> None:
    flags = ("--num_tokens=4", "--temperature=0", "--mem_len=0")
    long, short = (
        home.read("generate", f"--prompt={prompt}", *flags)
        for prompt in ("1 is 1 less 0", "less 0")
    )
    assert "the prompt has 13 tokens: only the newest 8 are used" in long.err
    assert "are used" not in short.err


def test_several_samples_are_shown_when_they_are_done(home: Home) -> None:
    output = home.path / "samples.jsonl"
    done = home.read(
        *("generate", "--num_tokens=6", "--samples=2"),
        *("--context_tokens=9", f"--output={output}"),
    )
    first, second = done.result["sampled"]
    assert first["text"] == done.result["text"] != second["text"]
    assert first["prompt"] in split_file(home, "test").read_text()
    assert len(first["token_nlls"]) == first["tokens"] == 6
    assert done.out.startswith(f"=== sample 1 of 2, seed 1\n{first['text']}\n===")
    lines = [json.loads(line) for line in output.read_text().splitlines()]
    assert lines == [first, second]


# Scoring and maps of attention


def test_a_text_of_ours_is_scored(home: Home) -> None:
    flags = ("score", f"--path={split_file(home, 'test')}", "--prefix=\n")
    done = home.read(*flags, f"--output={home.path / 'lines.jsonl'}")
    result = done.result
    assert (result["mode"], result["step"], result["mem_len"]) == ("score", 60, 8)
    test = split_file(home, "test").read_text()
    assert result["scored_tokens"] == result["tokens"] == len(test)
    # One stream of it, where evaluation has eight that begin cold.
    assert result["nll"] == pytest.approx(home.trained.result["nll"], rel=0.05)
    lines = (home.path / "lines.jsonl").read_text().splitlines()
    assert [json.loads(line)["text"] for line in lines] == test.splitlines(True)


def test_attention_is_mapped(home: Home) -> None:
    result = home.read("attention", "--span=12", "--segments=2").result
    assert (result["span_tokens"], result["targets"]) == (12, 16)
    assert len(result["memory_mass"]) == 2
    files = {name: Path(path) for name, path in result["files"].items()}
    assert all(path.parent == home.run for path in files.values())
    assert "</html>" in files["page"].read_text()
    for path in files.values():
        path.unlink()


# Mistakes

NEW = ("--config={home}/tiny.py", "--workdir={home}/new")
RUN = ("--workdir={home}/run",)
EVALUATE = ("--mode=evaluate", *RUN)
GENERATE = ("--mode=generate", *RUN)

# What is given, and what the one line has to say.
MISTAKES: dict[str, tuple[tuple[str, ...], str]] = {
    "nothing": ((), "--config=FILE"),
    "mode": (("--mode=evalute", *RUN), "did you mean 'evaluate'"),
    "no mode": (("--mode=", *RUN), "train, evaluate, generate"),
    "flag": (("--wrkdir=x",), "'--wrkdir' (did you mean '--workdir'"),
    "flag of another mode": ((*EVALUATE, "--prompt=x"), "unknown flag '--prompt'"),
    "flag of a mode in training": ((*NEW, "--mem_len=3"), "unknown flag '--mem_len'"),
    "stray word": (("train", *NEW), "unknown flag 'train'"),
    "flag without value": ((*NEW, "--config.model.n_layer"), "n_layer"),
    "text without value": ((*GENERATE, "--prompt"), "--prompt"),
    "output": (
        (*GENERATE, "--output={home}/no/where"),
        "generate.output = '{home}/no/where' cannot be written",
    ),
    "config missing": (("--config={home}/none.py",), "no config file"),
    "config unnamed": (("--config=quickstrat",), "did you mean 'quickstart'"),
    "config without value": (("--config",), "--config"),
    "config broken": (("--config={home}/broken.py",), "SyntaxError"),
    "config unknown field": (("--config={home}/field.py",), "'model.n_layer'"),
    "field": ((*NEW, "--config.model.n_layers=3"), "mean '--config.model.n_layer'"),
    "type": ((*NEW, "--config.model.n_layer=x"), "not a whole number"),
    "batch_size": (
        (*NEW, "--config.train.batch_size=12"),
        "train.batch_size = 12 is not divisible by mesh.data x mesh.fsdp = 8",
    ),
    "batch_chunk": (
        (*NEW, "--config.train.batch_chunk=3"),
        "train.batch_size = 8 must be a multiple of train.batch_chunk = 3",
    ),
    "cadence": (
        (*NEW, "--config.train.segments_per_call=4"),
        "train.eval_every = 30 must be a multiple of the 4 updates",
    ),
    "d_model": ((*NEW, "--config.model.d_model=17"), "model.d_model = 17"),
    "same_length": (
        (*NEW, "--config.model.same_length", "--config.model.mem_len=0"),
        "same_length",
    ),
    "context twice": (
        (*NEW, "--config.train.ext_len=4"),
        "train.ext_len = 4 with model.mem_len = 8",
    ),
    "context twice in evaluation": (
        (*EVALUATE, "--ext_len=4"),
        "eval.ext_len = 4 with eval.mem_len = 8",
    ),
    "vocab_size": ((*NEW, "--config.model.vocab_size=99"), "model.vocab_size = 99"),
    "kernel": ((*NEW, "--config.model.kernel=xls"), "did you mean 'xla'"),
    "seed": ((*NEW, "--config.train.seed=99999999999999999999"), "train.seed"),
    "mesh": ((*NEW, "--config.mesh.data=3"), "mesh.data x mesh.fsdp x mesh.model"),
    "mesh 0": ((*NEW, "--config.mesh.data=0"), "mesh.data"),
    "mesh -1 twice": ((*NEW, "--config.mesh.fsdp=-1"), "one of them may be -1"),
    "mesh and heads": (
        (*NEW, "--config.mesh.model=4"),
        "model.n_head = 2 is not divisible by mesh.model = 4",
    ),
    "mesh and d_model": (
        (*NEW, "--config.mesh.fsdp=8", "--config.model.d_model=12"),
        "model.d_model = 12 is not divisible by mesh.fsdp = 8",
    ),
    "corpus": ((*NEW, "--config.data.corpus=txt"), "did you mean 'text'"),
    "no path": ((*NEW, "--config.data.path="), "needs data.path"),
    "path missing": (
        (*NEW, "--config.data.path=/no/text"),
        "'/no/text' does not exist",
    ),
    "empty text": ((*NEW, "--config.data.path={home}/empty"), "has no text"),
    "tiny text": ((*NEW, "--config.data.path={home}/broken.py"), "too small"),
    "streams in training": ((*NEW, "--config.eval.streams=12"), "eval.streams = 12"),
    "split in training": ((*NEW, "--config.eval.split=tests"), "did you mean 'test'"),
    "workdir of another": (
        (*NEW[:1], *RUN, "--config.model.n_layer=3"),
        "model.n_layer was 2, is now 3",
    ),
    "workdir is a file": ((*NEW[:1], "--workdir={home}/tiny.py"), "cannot write"),
    "workdir elsewhere": ((*NEW[:1], "--workdir=s3://b/run"), "nor gs://BUCKET"),
    "bucket to import to": (("--mode=import", "--workdir=gs://b/run"), "in a folder"),
    "init_from": (
        (*NEW, "--config.train.init_from={home}/nowhere"),
        "train.init_from = '{home}/nowhere': it holds no run",
    ),
    "init_from another model": (
        (*NEW, "--config.train.init_from={home}/run", "--config.model.n_layer=3"),
        "model.n_layer is 2 there, 3 here",
    ),
    "checkpoints": ((*EVALUATE, "--checkpoint=30,5"), "steps of 30, 60"),
    "no run": (("--mode=evaluate", "--workdir={home}/data"), "holds no run"),
    "no run to train": (("--workdir={home}/nowhere",), "holds no run"),
    "no checkpoint": (
        ("--mode=evaluate", "--workdir={home}/bare"),
        "no checkpoint in {home}/bare/checkpoints",
    ),
    "damaged config": (("--workdir={home}/damaged",), "cannot read"),
    "other model": ((*EVALUATE, "--config.model.d_inner=64"), "model.d_inner was 32"),
    "split": ((*EVALUATE, "--split=tests"), "did you mean 'test'"),
    "checkpoint": ((*EVALUATE, "--checkpoint=5"), "give best, latest"),
    "checkpoint unnamed": ((*EVALUATE, "--checkpoint=newest"), "latest"),
    "too many streams": ((*EVALUATE, "--streams=8000"), "too few for 8000 streams"),
    "streams and mesh": ((*EVALUATE, "--streams=4"), "eval.streams = 4 is not"),
    "evaluation's mesh": ((*EVALUATE, "--config.mesh.data=3"), "mesh.data"),
    "evaluation's text": ((*EVALUATE, "--config.data.path=/no"), "does not exist"),
    "prompt": ((*GENERATE, "--prompt="), "generate.prompt is empty"),
    "top_p": ((*GENERATE, "--top_p=0"), "generate.top_p = 0.0"),
    "temperature": ((*GENERATE, "--temperature=-1"), "generate.temperature"),
    "num_tokens": ((*GENERATE, "--num_tokens=0"), "generate.num_tokens"),
}


@pytest.fixture(scope="module")
def mishaps(home: Home) -> Home:
    """Adds to `home` what can go wrong on a disk."""
    (home.path / "broken.py").write_text("def get_config(:")
    unknown = (
        "from txl_jax.config import default\ndef get_config():\n    c = default()\n"
    )
    unknown += "    c.model.update(n_layers=3)\n    return c\n"
    (home.path / "field.py").write_text(unknown)
    (home.path / "empty").write_text("")
    for name in ("bare", "damaged"):
        (home.path / name).mkdir()
        for file in ("config.json", "run.json", "vocab.json"):
            content = (home.run / file).read_bytes()
            (home.path / name / file).write_bytes(content)
    (home.path / "damaged" / "config.json").write_text('{"model": ')
    return home


def assert_refused(home: Home, done: Done, reason: str) -> None:
    assert done.status == 2
    assert done.out == ""
    assert reason.format(home=home.path) in tiny.complaint(done.err)


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_one_line_and_nothing_is_made(
    mishaps: Home, mistake: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def contents() -> dict[Path, tuple[int, int]]:
        paths = {path: path.stat() for path in mishaps.path.rglob("*")}
        return {path: (stat.st_size, stat.st_mtime_ns) for path, stat in paths.items()}

    monkeypatch.chdir(mishaps.path)  # where runs/ would be made
    argv, reason = MISTAKES[mistake]
    before = contents()
    done = command(*(flag.format(home=mishaps.path) for flag in argv))
    assert_refused(mishaps, done, reason)
    assert contents() == before


def test_a_text_too_short_for_the_streams_is_refused(home: Home) -> None:
    short = home.path / "short.txt"
    short.write_text("ten bytes\n" * 10)
    flags = (flag.format(home=home.path) for flag in NEW)
    done = command(*flags, f"--config.data.path={short}")
    # It was cut into tokens before they could be counted.
    assert "too few for 8 streams" in done.err.splitlines()[-1]
    assert done.status == 2
    assert not (home.path / "new").exists()


def test_a_workdir_of_a_changed_text_is_refused(home: Home) -> None:
    run = json.loads((home.run / "run.json").read_text())
    run["data"]["splits"]["train"]["sha256"] = "0" * 64
    changed = home.path / "changed"
    changed.mkdir()
    (changed / "run.json").write_text(json.dumps(run))
    done = command(f"--config={home.path / 'tiny.py'}", f"--workdir={changed}")
    assert_refused(home, done, "another version of corpus 'text'")
    (changed / "run.json").write_text('{"data": ')
    done = command(f"--config={home.path / 'tiny.py'}", f"--workdir={changed}")
    assert_refused(home, done, "run.json is damaged")
    assert [path.name for path in changed.iterdir()] == ["run.json"]


def test_print_config_says_what_gave_a_field_its_value(home: Home) -> None:
    """And does nothing: another workdir than the run's is not made."""
    file, other = home.path / "tiny.py", home.path / "other"
    flags = [f"--config={file}", f"--workdir={other}", "--config.optim.lr=0.5"]
    done = command(*flags, "--config.eval.split=test", "--print_config")
    assert (done.status, done.err) == (0, "")
    assert not other.exists()
    lines = done.out.splitlines()
    assert lines[0] == f"# mode train, workdir {other}"
    assert f"model.n_layer = 2  # from {file}, default 12" in lines
    assert "optim.lr = 0.5  # from a flag, default 0.00025" in lines
    assert "eval.split = test  # from a flag" in lines
    assert 'convert.source = ""' in lines
    fields = sum(len(dataclasses.fields(x)) for x in configs.SECTIONS.values())
    assert len(lines) == fields + 2
    assert lines[-1].endswith(f"of {fields} fields were set by a file or flag")
    done = home.read("evaluate", "--mem_len=5", "--print_config")
    assert "eval.mem_len = 5  # from a flag, default 512" in done.out
    assert f"n_layer = 2  # from {home.run / 'config.json'}, default 12" in done.out


@pytest.mark.parametrize("mode", MODES)
def test_a_mode_takes_several_processes_or_refuses_them(
    mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_processes(mode)
    monkeypatch.setattr(distributed, "several", lambda: True)
    if mode in ("train", "evaluate", "generate", "prepare", "table"):
        check_processes(mode)
    else:
        with pytest.raises(
            UserError, match=f"--mode={mode} runs in one process: start"
        ):
            check_processes(mode)


def test_helpfull_has_every_field() -> None:
    done = command("--helpfull")
    assert (done.status, done.err) == (0, "")
    for section, section_class in configs.SECTIONS.items():
        for field in dataclasses.fields(section_class):
            assert f"--config.{section}.{field.name}=" in done.out
    assert "[cosine]\n      one of cosine, cosine_through_warmup," in done.out
    assert command("--help").out in done.out
    assert max(len(line) for line in done.out.splitlines()) <= 90


@pytest.mark.parametrize("flag", ["--help", "-h"])
def test_help_names_every_mode_and_section(flag: str) -> None:
    done = command("--mode=generate", flag)
    assert (done.status, done.err) == (0, "")
    for word in (*MODES, *configs.SECTIONS, "--config", "--workdir"):
        assert word in done.out


def test_every_mode_has_a_function() -> None:
    assert list(modes.RUN) == list(MODES)


def test_version() -> None:
    assert command("--version").out == f"txl_jax {txl_jax.__version__}\n"


def test_the_module_is_the_command() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-m", "txl_jax.main", "--mode=evalute"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("txl_jax: --mode = 'evalute'")
    assert len(done.stderr.splitlines()) == 1
