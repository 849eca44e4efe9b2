"""Two processes make one run: any may be told to end or die, and no update is lost."""

import json
import re
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.support.processes import Processes, has_step, write_experiment
from txl_jax.main import main
from txl_jax.report.log import read_metrics


def saved(workdir: Path) -> list[int]:
    """Returns the steps that have a whole checkpoint."""
    done = (workdir / "checkpoints").glob("*/commit_success.txt")
    return sorted(int(path.parent.name) for path in done)


def losses(workdir: Path) -> list[float]:
    return [line["exact"]["loss"] for line in read_metrics(workdir / "metrics.jsonl")]


@pytest.mark.promise("SIGTERM loses nothing")
def test_a_signal_and_a_death_lose_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """SIGTERM to one, then the death of one; what goes on may be a single process.

    It has eight devices instead of two times two, and makes the same numbers.
    """
    tiny, ended = write_experiment(tmp_path), tmp_path / "ended"
    flags = [f"--config={tiny}", f"--workdir={ended}"]

    run = Processes(tmp_path, *flags)
    run.until(has_step(ended, 20))
    run.all[1].send_signal(signal.SIGTERM)
    assert run.wait() == [75, 75]
    (step,) = saved(ended)
    assert step == len(losses(ended)) >= 20
    line = f"txl_jax: ended at update {step}, which is saved; the same command resumes"
    assert run.said(0) == [line] and run.said(1) == []
    described = json.loads((ended / "run.json").read_text())
    assert any((tmp_path / "cache").iterdir()), "programs are kept"
    assert (described["process_count"], described["device_count"]) == (2, 4)

    run = Processes(tmp_path, *flags)
    run.until(has_step(ended, step + 10))
    run.all[1].kill()
    statuses = run.wait()
    # In an update it is noticed at once; while orbax waits for all, jax aborts.
    assert statuses in ([75, -signal.SIGKILL], [-signal.SIGABRT, -signal.SIGKILL])
    if statuses[0] == 75:
        (line,) = run.said(0)
        assert line.startswith("txl_jax[0]: another process is lost (")
    assert "resumed at update" in run.stderr[0].read_text()

    last = max(saved(ended)) + 10
    straight = tmp_path / "straight"
    for workdir in (ended, straight):
        more = [f"--config.train.num_steps={last}", f"--config.train.eval_every={last}"]
        assert main([flags[0], f"--workdir={workdir}", *more]) == 0
    assert "resumed at update" in capsys.readouterr().err
    assert losses(ended) == pytest.approx(losses(straight), rel=1e-5)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with an experiment, whose data and programs the tests below share."""
    folder = tmp_path_factory.mktemp("shared")
    write_experiment(folder)
    return folder


def exact(workdir: Path) -> list[Any]:
    lines = read_metrics(workdir / "metrics.jsonl")
    return [(line["step"], line["exact"]) for line in lines]


@pytest.mark.long
def test_deaths_and_signals_change_no_bit(folder: Path) -> None:
    """Of two processes throughout: what was ended is what was not."""
    straight, ended = folder / "straight", folder / "ended"
    flags = [f"--config={folder / 'tiny.py'}", "--config.train.num_steps=200"]
    flags += ["--config.train.eval_every=50", "--config.optim.optimizer=adam"]
    flags += ["--config.optim.lr=0.001"]
    assert Processes(folder, *flags, f"--workdir={straight}").wait() == [0, 0]
    for step, number, index in (
        (20, signal.SIGTERM, 0),
        (70, signal.SIGKILL, 1),
        (120, signal.SIGINT, 1),
        (160, signal.SIGKILL, 0),
    ):
        run = Processes(folder, *flags, f"--workdir={ended}")
        run.until(has_step(ended, step))
        run.all[index].send_signal(number)
        statuses = run.wait()
        if number == signal.SIGKILL:
            assert statuses[index] == -number
            # jax aborts what has lost another process, where nothing saw it sooner.
            assert statuses[1 - index] in (
                (75, -signal.SIGABRT) if index == 0 else (75,)
            )
        else:
            assert statuses[1 - index] == 75
            assert statuses[index] == (130 if number == signal.SIGINT else 75)
    assert Processes(folder, *flags, f"--workdir={ended}").wait() == [0, 0]
    assert exact(ended) == exact(straight)
    assert [step for step, _ in exact(ended)] == list(range(1, 201))


@pytest.mark.long
@pytest.mark.parametrize("index", [0, 1])
def test_a_signal_while_compiling_ends_both_in_step(folder: Path, index: int) -> None:
    workdir = folder / f"compiling{index}"
    run = Processes(folder, f"--config={folder / 'tiny.py'}", f"--workdir={workdir}")
    run.until((workdir / "run.json").exists)
    run.all[index].send_signal(signal.SIGTERM)
    assert run.wait() == [75, 75]
    assert saved(workdir) == [len(losses(workdir))]


@pytest.mark.long
def test_a_signal_while_evaluating_ends_both(folder: Path) -> None:
    """In the validation; the update before it is saved."""
    workdir = folder / "evaluating"
    flags = [f"--config={folder / 'tiny.py'}", f"--workdir={workdir}"]
    flags += ["--config.train.eval_every=20", "--config.eval.tgt_len=1"]
    run = Processes(folder, *flags)
    run.until(has_step(workdir, 19))
    run.all[1].send_signal(signal.SIGTERM)
    assert run.wait() == [75, 75]
    assert saved(workdir)[-1] == len(losses(workdir)) >= 20


@pytest.mark.long
@pytest.mark.parametrize("index", [0, 1])
def test_a_process_that_hangs_ends_the_other(folder: Path, index: int) -> None:
    workdir = folder / f"hanging{index}"
    flags = [f"--config={folder / 'tiny.py'}", f"--workdir={workdir}"]
    run = Processes(folder, *flags, "--hang_seconds=20")
    run.until(has_step(workdir, 10))
    run.all[index].send_signal(signal.SIGSTOP)
    other = run.all[1 - index]
    assert other.wait(120) in (75, -signal.SIGABRT)  # the coordinator's silence
    run.all[index].send_signal(signal.SIGCONT)
    run.wait()
    if other.returncode == 75:
        assert "run.hang_seconds = 20" in run.said(1 - index)[-1]
        # Where it waits for the other: in a call, or for a call's numbers.
        assert re.search(r"train\.py.* in \w+", run.stderr[1 - index].read_text())


@pytest.mark.long
def test_each_disk_is_prepared_and_a_shared_one_once(tmp_path: Path) -> None:
    tiny = write_experiment(tmp_path)
    flags = ["--mode=prepare", f"--config={tiny}"]
    run = Processes(tmp_path, *flags)
    assert run.wait() == [0, 0]
    assert "data: preparing" in run.stderr[0].read_text()
    assert run.stderr[1].read_text() == ""


WINDOWS = ("--tgt_len=1", "--mem_len=0", "--ext_len=15", "--warm_start")
ALONE = (
    ["--mode=score", "--workdir=RUN", "--path=TEXT", "--output=NEW"],
    ["--mode=attention", "--workdir=RUN"],
    ["--mode=import", "--format=pytorch", "--source=TEXT", "--workdir=NEW"],
    ["--mode=export", "--workdir=RUN", "--format=nvidia", "--target=NEW"],
    ["--mode=compile", "--topology=v5e:2x4", "--config=TINY"],
    ["--mode=speed", "--config=TINY", "--workdir=NEW"],
    ["--mode=recl", "--config.recl.workdirs=RUN,RUN", "--workdir=NEW"],
)


@pytest.mark.long
def test_every_mode_works_with_two_processes_or_refuses_them(folder: Path) -> None:
    """Only the first prints a result; what is refused leaves no file."""
    trained, fresh = folder / "modes", folder / "new"
    tiny, text = folder / "tiny.py", folder / "text.txt"
    names = {"RUN": trained, "NEW": fresh, "TINY": tiny, "TEXT": text}

    def start(*flags: str) -> tuple[list[int], list[str], Processes]:
        for name, path in names.items():
            flags = tuple(flag.replace(name, str(path)) for flag in flags)
        run = Processes(folder, *flags)
        statuses = run.wait()
        # Gloo, which connects CPUs, writes to stdout too, in pieces of lines.
        lines = [out.splitlines(keepends=True) for out in run.stdout]
        ours = [[line for line in each if "{" in line] for each in lines]
        return statuses, ["".join(each) for each in ours], run

    def files() -> dict[str, bytes]:
        found = trained.rglob("*")
        return {str(path): path.read_bytes() for path in found if path.is_file()}

    few = ["--config.train.num_steps=4", "--config.train.eval_every=4"]
    for flags in (
        ["--mode=prepare", "--config=TINY"],
        ["--config=TINY", "--workdir=RUN", *few],
        ["--mode=evaluate", "--workdir=RUN"],
        ["--mode=evaluate", "--workdir=RUN", *WINDOWS],
        ["--mode=evaluate", "--workdir=RUN", "--sweep=mem_len=8,16"],
        ["--mode=evaluate", "--workdir=RUN", "--sweep=cold_start=16"],
        ["--mode=generate", "--workdir=RUN"],
        ["--mode=generate", "--workdir=RUN", "--samples=2"],
    ):
        statuses, (first, second), run = start(*flags)
        assert statuses == [0, 0], (flags, run.said(0), run.said(1))
        assert json.loads(first.splitlines()[-1])["mode"] and not second, flags
        assert run.stderr[1].read_text() == "", flags
    before = files()
    for flags in ALONE:
        mode = flags[0].removeprefix("--mode=")
        statuses, out, run = start(*flags)
        assert (statuses, out) == ([2, 2], ["", ""])
        for index in range(2):
            (line,) = run.stderr[index].read_text().splitlines()
            assert line.startswith(
                f"txl_jax[{index}]: --mode={mode} runs in one process"
            )
    assert files() == before and not fresh.exists()
