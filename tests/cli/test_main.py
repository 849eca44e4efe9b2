"""The files and the output of each mode of the command line.

The tests read one tiny trained run; `tests/promises/test_bad_inputs.py` has the errors.
"""

import contextlib
import hashlib
import io
import json
import math
import os
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

import txl_jax
from tests.support.refusal import refusal
from tests.support.trained import SECRET, TEXT, Home, command, home, own_home
from txl_jax import config as configs
from txl_jax.cli import help, modes
from txl_jax.cli.flags import MODES
from txl_jax.cli.modes import check_processes
from txl_jax.evaluate.options import EvalConfig
from txl_jax.main import main
from txl_jax.report.metrics_log import read_metrics
from txl_jax.report.provenance import EXACT
from txl_jax.workdir.lock import locked

__all__ = ["home"]  # the fixture


FIXTURES = home, own_home
PAGE = Path(__file__).parents[2] / "docs/command_line.md"
ORDERS = dict(
    re.findall(r"^\| `(\w+)` \| `([^`]+)` \|$", PAGE.read_text("utf-8"), re.M)
)
DYNAMIC = [x.key for x in EvalConfig.fields() if x.key.startswith(("dynamic", "cache"))]


def documented(name: str, result: dict[str, Any], *left_out: str) -> bool:
    """Returns whether the keys have the order that the documentation states."""
    keys = ["mode"]
    for key in ORDERS[name].split():
        section, _, every = key.partition(".")
        names = [x.key for x in configs.SECTIONS[section].fields()] if every else [key]
        keys += [x for x in names if x not in (*keys, *left_out, *DYNAMIC)]
    return list(result) == keys


def test_the_environment_is_neither_kept_nor_printed(home: Home) -> None:
    """People share workdirs, and keep access tokens in the environment."""
    files = [path for path in home.run.rglob("*") if path.is_file()]
    assert len(files) > 5
    assert not [path for path in files if SECRET.encode() in path.read_bytes()]
    assert SECRET not in home.trained.out + home.trained.err


def test_the_last_line_is_the_result(home: Home) -> None:
    result = home.trained.result
    test = home.split("test").read_bytes()
    assert test.decode() == TEXT[-len(test) :]
    assert (result["mode"], result["split"], result["step"]) == ("train", "test", 60)
    assert result["tokens"] == len(test) - 1
    assert result["ppl"] == pytest.approx(math.exp(result["nll"]))
    assert result["bpc"] == pytest.approx(result["nll"] / math.log(2))
    assert (result["streams"], result["cold_tokens"]) == (8, 8 * 8)
    assert result["sha256"] == hashlib.sha256(test).hexdigest()
    assert set(result["baselines_bpc"]) == {"order-2", "order-3", "gzip -9", "xz -9"}
    assert len(home.trained.out.splitlines()) == 1 and documented("train", result)
    line = home.trained.err.splitlines()[-1]
    scores = f"test: {result['bpc']:.2f} bits/token, perplexity "
    assert line.startswith(f"{scores}{result['ppl']:.2f}, {len(test) - 1} tokens, ")
    # Uniform bytes are ln 256 = 5.5 nats.
    assert result["nll"] < 2.5


def test_the_workdir_has_the_documented_files(home: Home) -> None:
    result = home.trained.result
    files = "config.json loss.png metrics.jsonl result.json run.json sample.txt"
    expected = {"checkpoints", "tensorboard", "vocab.json", *files.split()}
    assert {path.name for path in home.run.iterdir()} >= expected
    picture = (home.run / "loss.png").read_bytes()
    assert picture.startswith(b"\x89PNG\r\n\x1a\n") and len(picture) > 10_000
    sample = (home.run / "sample.txt").read_text("utf-8")
    assert sample.startswith("1 is ") and len(sample) > len("1 is ")
    saved = json.loads((home.run / "result.json").read_text())
    assert {"mode": "train", **saved} == result
    vocab = json.loads((home.run / "vocab.json").read_text())
    assert vocab == {"kind": "byte"}
    config = configs.load(str(home.path / "tiny.py"))
    assert configs.load_json(home.run / "config.json") == config
    run = json.loads((home.run / "run.json").read_text())
    assert configs.parse(run["starts"][0]["config"]) == config
    spent = read_metrics(home.run / "metrics.jsonl")[-1]["timing"]["total_seconds"]
    assert home.trained.result["total_seconds"]["update"] == spent["update"]
    for split in ("train", "valid", "test"):
        digest = hashlib.sha256(home.split(split).read_bytes()).hexdigest()
        assert run["data"]["splits"][split]["sha256"] == digest


def test_metrics_are_one_line_per_step_and_the_loss_falls(home: Home) -> None:
    exact = [(x["step"], x["exact"]) for x in read_metrics(home.run / "metrics.jsonl")]
    valid = {step: x["valid_nll"] for step, x in exact if "valid_nll" in x}
    steps, lines = zip(*(x for x in exact if "loss" in x[1]), strict=True)
    assert [*steps] == [*range(1, 61)] and [*valid] == [30, 60]
    assert {(line["tokens"], line["skipped"]) for line in lines} == {(64, False)}
    assert lines[0]["loss"] == pytest.approx(math.log(256), abs=0.1)
    assert lines[59]["loss"] < 2.5 and valid[60] < valid[30]


def test_a_finished_run_is_only_evaluated_again(own_home: Home) -> None:
    def steps() -> dict[Path, int]:
        files = (own_home.run / "checkpoints").rglob("*")
        return {path: path.stat().st_mtime_ns for path in files}

    path = own_home.run / "run.json"
    run = json.loads(path.read_text())
    (start,) = run["starts"]
    assert (start["device_count"], start["device_kind"]) == (8, "cpu")
    names = "argv pid host time git_revision usable_cores"
    assert all(start[name] for name in names.split())
    start["device_kind"] = "TPU v5 lite"
    path.write_text(json.dumps(run))
    before, metrics = steps(), (own_home.run / "metrics.jsonl").read_bytes()
    again = command(f"--workdir={own_home.run}")
    assert "resumed at update 60" in again.err
    assert (own_home.run / "metrics.jsonl").read_bytes() == metrics
    assert steps() == before
    assert (again.result["updates"], again.result["failed_saves"]) == (60, [])
    assert again.result["nll"] == own_home.trained.result["nll"]
    difference = "device_kind was TPU v5 lite, is now cpu"
    assert f"not bit-identical to those before this start: {difference}" in again.err
    starts = json.loads(path.read_text())["starts"]
    assert starts[0] == start and len(starts) == 2 and starts[1]["device_kind"] == "cpu"


def test_a_workdir_in_use_is_refused_and_can_be_evaluated(home: Home) -> None:
    with locked(home.run):
        refused = command(f"--workdir={home.run}")
        done = home.read("evaluate")
    assert refused.status == 2
    assert f"txl_jax: {home.run} is in use by another run (process " in refused.err
    assert not (home.run / "run.lock").exists()
    assert f"the model of update 60 in {home.run}\n" in done.err
    assert len(done.out.splitlines()) == 1 and documented("evaluate", done.result)
    result, names = done.result, {"seconds", "tokens_per_second", "mode"}
    assert set(EXACT) < set(result.pop("provenance"))
    for name, value in result.items():
        assert home.trained.result[name] == value or name in names, name


@pytest.mark.parametrize("written", [0, 1, 2])
def test_a_kill_at_the_start_leaves_the_workdir_readable(
    home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, written: int
) -> None:
    names = ("config.json", "run.json", "vocab.json")
    before = {name: (home.run / name).read_bytes() for name in names}
    for name in names:
        (tmp_path / name).write_bytes(before[name])
    write_bytes = Path.write_bytes
    contents: list[bytes] = []

    def kill(path: Path, content: bytes) -> int:
        contents.append(content)
        if len(contents) <= written:
            return write_bytes(path, content)
        write_bytes(path, content[: len(content) // 2])
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "write_bytes", kill)
    with pytest.raises(KeyboardInterrupt):
        command(f"--workdir={tmp_path}")
    assert {name: (tmp_path / name).read_bytes() for name in names} == before


def test_a_sweep_equals_separate_evaluations(home: Home) -> None:
    done = home.read("evaluate", "--sweep=mem_len=0,8")
    result = done.result
    assert (result["sweep"], result["init"]) == ("mem_len", 8)
    assert result["shortest"] in (0, 8)
    assert [row["mem_len"] for row in result["rows"]] == [0, 8]
    assert result["rows"][0]["nll"] != result["rows"][1]["nll"]
    assert result["rows"][1]["nll"] == home.trained.result["nll"]
    kept = json.loads(Path(result["file"]).read_text())
    assert kept.items() <= result.items() and Path(result["picture"]).exists()
    assert documented("sweep", result, "mem_len")
    progress = re.compile("compiling|.* passed$")  # as many as the time allows
    lines = [x for x in done.err.splitlines() if not progress.match(x)]
    table = [line.split() for line in lines[-4:-1]]
    assert table[0] == ["mem_len", "perplexity", "bits/token", "tokens/s"]
    for row, cells in zip(result["rows"], table[1:], strict=True):
        assert cells[:2] == [str(row["mem_len"]), f"{row['ppl']:.2f}"]
    assert done.err.splitlines()[-1].startswith("mem_len: perplexity ")


def test_windows_and_cold_starts_have_their_flags(home: Home) -> None:
    window = ("--tgt_len=1", "--ext_len=8", "--mem_len=0", "--warm_start")
    slid = home.read("evaluate", *window, "--max_tokens=40").result
    assert (slid["tokens"], slid["ext_len"], slid["mem_len"]) == (40, 8, 0)
    assert (slid["cold_tokens"], slid["warm_start"]) == (8, True) and slid["nll"] < 4
    assert "bits_per_byte" not in slid, "bytes are known only for the whole split"
    cold = home.read("evaluate", "--sweep=cold_start=11", "--max_tokens=300").result
    assert (cold["pieces"], cold["mode"]) == (27, "evaluate")
    assert documented("cold_start", cold)
    assert cold["rows"][0]["nll"] > cold["settled_nll"]
    kept = json.loads(Path(cold["file"]).read_text())
    assert len(kept["nll_by_tokens_read"]) == 11 and Path(cold["picture"]).exists()


@pytest.mark.long
def test_speed_and_recl_read_a_run(home: Home) -> None:
    result = home.read("speed", "--sweep=mem_len=6,9", "--tgt_len=4").result
    assert [row["attention_len"] for row in result["rows"]] == [6, 9]
    assert documented("speed", result) and Path(result["picture"]).exists()
    flags = (f"--workdirs={home.run}", "--contexts=2,6,4")
    result = command("--mode=recl", f"--workdir={home.path / 'recl'}", *flags).result
    assert documented("recl", result)
    (row,) = result["members"]
    assert row["ppl"][1] < row["ppl"][0]


def test_evaluation_takes_a_split_and_checkpoints(home: Home) -> None:
    result = home.read("evaluate", "--split=valid", "--checkpoint=30").result
    assert (result["split"], result["step"]) == ("valid", 30)
    assert result["tokens"] == home.split("valid").stat().st_size - 1
    exact = [line["exact"] for line in read_metrics(home.run / "metrics.jsonl")]
    assert result["nll"] == next(x["valid_nll"] for x in exact if "valid_nll" in x)
    done = home.read("evaluate", "--config.eval.streams=16")
    assert done.result["cold_tokens"] == 16 * 8


def test_documents_begin_at_a_token(home: Home) -> None:
    """A digit is a character, not an id."""
    line, digit, none = (
        home.read("evaluate", f"--reset_memory_at={x}").result for x in (r"\n", "0", "")
    )
    assert len({line["nll"], digit["nll"], none["nll"]}) == 3
    assert none["nll"] == home.trained.result["nll"]
    assert digit["reset_memory_at"] == "0"


def test_samples_start_with_their_prompt(home: Home) -> None:
    prompt, output = "naïve 😀 " * 20, home.path / "samples.jsonl"
    settings = {"num_tokens": 6, "top_k": 20, "top_p": 0.9, "seed": 5, "samples": 2}
    flags = [f"--{name}={value}" for name, value in settings.items()]
    done = home.read("generate", f"--prompt={prompt}", *flags, f"--output={output}")
    result = done.result
    assert (result["mode"], result["step"]) == ("generate", 60)
    assert settings.items() <= result.items()
    assert documented("generate", result, "context_tokens")
    assert done.err.splitlines()[-1].startswith("2 samples: 12 tokens in ")
    assert "are used" not in done.err, "a memory reads all of it"
    first, second = result["sampled"]
    assert first["text"] == result["text"] != second["text"]
    for sample in (first, second):
        assert sample["text"].startswith(prompt) and len(sample["text"]) > len(prompt)
        assert len(sample["token_nlls"]) == sample["tokens"] == 6
    assert done.out.startswith(f"=== sample 1 of 2, seed 5\n{first['text']}\n===")
    lines = [json.loads(line) for line in output.read_text().splitlines()]
    assert lines == [first, second]


def test_a_terminal_gets_no_numbers_of_each_token(home: Home) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    flags = ["--mode=generate", f"--workdir={home.run}", "--num_tokens=3"]
    for more in ([], [f"--output={home.path / 'terminal.jsonl'}"]):
        with contextlib.redirect_stdout(Terminal()) as out:
            assert main([*flags, *more]) == 0
        (sample,) = json.loads(out.getvalue().splitlines()[-1])["sampled"]
        assert sample["tokens"] == 3 and sample["nll"] > 0
        names = {"token_texts", "token_nlls"}
        assert names & sample.keys() == (names if more else set())


def test_a_window_reports_the_part_of_the_prompt_that_it_reads(home: Home) -> None:
    flags = ("--num_tokens=4", "--temperature=0", "--mem_len=0")
    done = home.read("generate", "--context_tokens=13", *flags)
    assert "the prompt has 13 tokens: only the newest 8 are used" in done.err
    assert done.out.startswith(done.result["text"] + "\n")
    assert documented("generate", done.result, "prompt")
    assert done.result["text"][:13] in home.split("test").read_text()


def test_scoring_a_text(home: Home) -> None:
    flags = (f"--path={home.split('test')}", "--prefix=\n")
    result = home.read("score", *flags, f"--output={home.path / 'lines.jsonl'}").result
    reset = home.read("score", *flags, r"--config.eval.reset_memory_at=\n").result
    assert reset["reset_memory_at"] == r"\n" and reset["nll"] != result["nll"]
    assert (result["mode"], result["step"], result["mem_len"]) == ("score", 60, 8)
    assert documented("score", reset) and documented("score", result, "documents")
    test = home.split("test").read_text()
    assert result["scored_tokens"] == result["tokens"] == len(test)
    # Here one stream reads the split; in evaluation, eight start cold.
    assert result["nll"] == pytest.approx(home.trained.result["nll"], rel=0.05)
    lines = (home.path / "lines.jsonl").read_text().splitlines()
    assert [json.loads(line)["text"] for line in lines] == test.splitlines(True)


def test_preparing_a_text(home: Home, tmp_path: Path) -> None:
    flags = [f"--config={home.path / 'tiny.py'}", f"--data_dir={tmp_path}"]
    done = command("prepare", *flags)
    assert documented("prepare", done.result)
    (place,) = done.result["copies"]
    assert done.err.splitlines()[-1].endswith(f" tokens; copies lie in {place}")
    assert Path(done.result["folder"]).is_relative_to(place)


def test_mapping_attention(home: Home) -> None:
    result = home.read(
        "attention", "--config.eval.mem_len=12", "--max_tokens=16"
    ).result
    assert (result["span_tokens"], result["targets"]) == (12, 16)
    assert documented("attention", result) and len(result["memory_mass"]) == 2
    files = {name: Path(path) for name, path in result["files"].items()}
    assert all(path.parent == home.run for path in files.values())
    assert "</html>" in files["page"].read_text()


@pytest.mark.parametrize(
    "mode, flag, name, reason",
    [
        ("attention", "--max_tokens=16", "attention_heads.png", "not a regular file"),
        ("evaluate", "--sweep=cold_start=9", "cold_start.json", "not a regular file"),
        ("train", "--config.eval.split=valid", "sample.txt", "not a regular file"),
    ],
)
def test_unwritten_files(
    own_home: Home, mode: str, flag: str, name: str, reason: str
) -> None:
    path = own_home.run / name
    path.unlink(missing_ok=True)
    path.mkdir()
    done = own_home.read(mode, flag)
    path.rmdir()
    result = json.loads(done.out)
    line = f"cannot use {path} ({reason}): fix this and run the command again"
    assert (done.status, result["unwritten"]) == (2, line)
    assert done.err.splitlines()[-1] == f"txl_jax: {line}"
    assert result["split"] and own_home.read(mode, flag).status == 0


def test_characters_that_stdout_lacks_are_escaped(home: Home) -> None:
    words = ["generate", f"--workdir={home.run}", "--prompt=天", "--num_tokens=1"]
    done = subprocess.run(
        [sys.executable, "-m", "txl_jax", *words],
        env=os.environ | {"PYTHONIOENCODING": "ascii", "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0 and done.stdout.startswith(r"\u5929"), done.stderr


def test_print_config_prints_values_and_their_origins(home: Home) -> None:
    file, other = home.path / "tiny.py", home.path / "other"
    flags = [f"--config={file}", f"--workdir={other}", "--config.optim.lr=0.5"]
    done = command(*flags, "--config.eval.split=test", "--print_config")
    assert (done.status, done.err) == (0, "") and not other.exists()
    lines = done.out.splitlines()
    assert lines[0] == f"# mode train, workdir {other}"
    assert f"model.n_layer = 2  # from {file}, default 12" in lines
    assert "optim.lr = 0.5  # from a flag, default 0.00025" in lines
    assert "eval.split = test  # from a flag" in lines
    assert 'convert.source = ""' in lines and len(lines) == len(configs.FIELDS) + 2
    assert lines[-1].endswith(f"of {len(lines) - 2} fields were set by a file or flag")
    same = "--config.train.num_steps=60"  # would be refused if it changed the value
    done = home.read("evaluate", "--mem_len=5", same, "--print_config")
    assert "eval.mem_len = 5  # from a flag, default 512" in done.out
    assert f"n_layer = 2  # from {home.run / 'config.json'}, default 12" in done.out


def test_a_mode_takes_several_processes_or_refuses_them() -> None:
    for mode in MODES:
        if mode in ("train", "evaluate", "generate", "prepare", "table"):
            check_processes(mode)
        else:
            error = refusal(check_processes, mode)
            assert f"--mode={mode} runs in one process: start" in error
    assert "reads one stream" in refusal(check_processes, "train", "sgd")


def test_help_names_every_mode_section_and_field() -> None:
    short, full = command("-h"), command("--helpfull")
    assert (short.status, short.err, full.status, full.err) == (0, "", 0, "")
    for word in (*MODES, *configs.SECTIONS, "--config", "--workdir"):
        assert word in short.out
    assert short.out == command("--help").out and short.out in full.out
    for name in configs.FIELDS:
        assert f"--config.{name}=" in full.out
    assert "[cosine]\n      Schedule of the learning rate. One of cosine, " in full.out
    assert max(len(line) for line in full.out.splitlines()) <= 90
    for name, section in configs.SECTIONS.items():
        assert section.name == name and help.summary(section).endswith(".")
        whole = re.compile(r"[A-Z][^|]*\.")  # a sentence, also in a table of the docs
        for field in section.fields():
            assert whole.fullmatch(help.meaning(field)), field.name


def test_every_field_is_read_by_modes_that_exist() -> None:
    for field in configs.FIELDS.values():
        assert field.modes and {*field.modes} <= MODES.keys(), field.name


@pytest.mark.parametrize("mode", MODES)
def test_help_after_a_mode_has_its_own_flags(mode: str) -> None:
    own = command(mode, "--help")
    assert own == command(f"--mode={mode}", "-h") and (own.status, own.err) == (0, "")
    names = re.findall(r"^  --(\w+)=", own.out, re.M)
    fields = configs.SECTIONS[MODES[mode].section].fields()
    assert names == [field.key for field in fields if mode in field.modes]
    assert own.out.startswith(f"txl {mode}: {MODES[mode].summary}")


def test_a_mode_is_a_flag_or_the_first_word(home: Home) -> None:
    words = ["evaluate", f"--workdir={home.run}", "--print_config"]
    first = command(*words)
    assert (first.status, first.out.split()[2]) == (0, "evaluate,")
    assert first == command("--mode=evaluate", *words[1:])
    assert first == command(*words, "--mode=evaluate")
    for words, error in (
        (["train", "--mode=score"], "'train' and --mode=score are two modes"),
        (["train", "score"], "unknown flag 'score'"),
    ):
        done = command(*words)
        assert (done.status, done.out) == (2, "") and error in done.err


def test_version_and_modes() -> None:
    def run(**variables: str) -> str:
        words = [sys.executable, "-m", "txl_jax", "--version"]
        environment = {**os.environ, **variables}
        return subprocess.check_output(words, text=True, env=environment)

    known = f"txl_jax {txl_jax.__version__}\n"
    for name in ("jax", "jaxlib"):
        known += f"{name} {metadata.version(name)}\n"
    devices = r"devices [1-9]\d* cpu\nprocessor .+, .*bf(loat)?16\n"
    assert re.fullmatch(re.escape(known) + devices, run())
    line = run(JAX_PLATFORMS="rocm").removeprefix(f"{known}devices 0 (no device (")
    assert line.endswith("check JAX_PLATFORMS)\n") and "rocm" in line
    assert list(modes.RUN) == list(MODES)
