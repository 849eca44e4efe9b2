"""Runs of two processes, either of which may get a signal, hang or die."""

import json
import signal
from pathlib import Path

import pytest

from tests.support.processes import (
    LIMIT_SECONDS,
    Processes,
    exact,
    has_step,
    write_experiment,
)
from tests.support.refusal import contents
from txl_jax import config as configs
from txl_jax.train import plan

ENDLESS = ("--config.train.num_steps=1000000", "--config.train.eval_every=1000000")


def saved(workdir: Path) -> list[int]:
    """Returns the steps that have a complete checkpoint."""
    done = (workdir / "checkpoints").glob("*/commit_success.txt")
    return sorted(int(path.parent.name) for path in done)


@pytest.mark.promise("SIGTERM loses nothing")
def test_a_signal_to_one_of_two_processes_loses_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A single process with eight devices continues, with the same losses."""
    tiny, ended = write_experiment(tmp_path), tmp_path / "ended"
    run = Processes(tmp_path, f"--config={tiny}", f"--workdir={ended}", *ENDLESS)
    run.until(has_step(ended, 20))
    run.all[1].send_signal(signal.SIGTERM)
    assert run.wait() == [75, 75]
    step = saved(ended)[-1]
    assert step == exact(ended)[-1][0] >= 20
    line = f"txl_jax: ended at update {step}, which is saved; the same command resumes"
    assert run.said(0) == [line] and run.said(1) == []
    described = json.loads((ended / "run.json").read_text())["starts"][0]
    assert (described["process_count"], described["device_count"]) == (2, 4)

    config = configs.load(str(tiny))
    later = dict.fromkeys(("train.num_steps", "train.eval_every"), step + 10)
    losses = []
    for workdir in (ended, tmp_path / "straight"):
        with plan(configs.with_values(config, later), workdir) as resumed:
            resumed.train()
            losses.append([x["loss"] for _, x in exact(workdir) if "loss" in x])
    assert "resumed at update" in capsys.readouterr().err
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Makes a folder with an experiment, whose data the tests share."""
    folder = tmp_path_factory.mktemp("shared")
    write_experiment(folder)
    return folder


# Gradients cross four segments, and documents start in them.
ACROSS = [
    f"--config.train.{name}=4"
    for name in ("segments_per_call", "segments_per_update", "gradient_segments")
]
ACROSS += ["--config.train.reset_memory_at=,"]


@pytest.mark.long
@pytest.mark.parametrize("across", [[], ACROSS])
def test_deaths_and_signals_change_no_bit(folder: Path, across: list[str]) -> None:
    """Both runs always have two processes."""
    straight, ended = (folder / f"{x}{len(across)}" for x in ("straight", "ended"))
    flags = [f"--config={folder / 'tiny.py'}", "--config.optim.optimizer=adam"]
    flags += ["--config.optim.lr=0.001", "--config.train.eval_every=50", *across]
    # jax may abort a process that has lost another before the program notices.
    lost = (75, -signal.SIGABRT)
    step = 0
    for number, index, of_it, of_the_other in (
        (signal.SIGTERM, 0, 75, (75,)),
        (signal.SIGKILL, 1, -9, lost),
        (signal.SIGINT, 1, 130, (75,)),
        (signal.SIGKILL, 0, -9, lost),
    ):
        run = Processes(folder, *flags, ENDLESS[0], f"--workdir={ended}")
        run.until(has_step(ended, step + 40))
        run.all[index].send_signal(number)
        statuses = run.wait()
        assert statuses[index] == of_it and statuses[1 - index] in of_the_other
        step = exact(ended)[-1][0] if exact(ended) else 0
    steps = step // 50 * 50 + 100
    for workdir in (ended, straight):
        last = f"--config.train.num_steps={steps}"
        assert Processes(folder, *flags, last, f"--workdir={workdir}").wait() == [0, 0]
    assert exact(ended) == exact(straight)
    assert [step for step, x in exact(ended) if "loss" in x] == list(
        range(1, steps + 1)
    )


# Starts of a run: its processes, and its last update.
STARTS = (((1, 20), (2, 40)), ((2, 40),))


@pytest.mark.long
@pytest.mark.parametrize("more", [[], ACROSS])
def test_runs_move_between_processes_and_meshes(folder: Path, more: list[str]) -> None:
    """Both runs have the same losses."""
    losses, scores = [], []
    for parts in STARTS:
        workdir = folder / f"{len(more)}moves{len(parts)}"
        for count, steps in parts:
            flags = [f"--config={folder / 'tiny.py'}", f"--workdir={workdir}", *more]
            flags += [
                f"--config.train.{x}={steps}" for x in ("num_steps", "eval_every")
            ]
            run = Processes(folder, *flags, count=count)
            assert run.wait() == [0] * count, run.said(0)
        resumed = "resumed at update" in run.stderr[0].read_text()
        assert resumed == (len(parts) > 1)
        lines = [numbers for _, numbers in exact(workdir)]
        losses.append([numbers["loss"] for numbers in lines if "loss" in numbers])
        scores.append(lines[-1]["valid_nll"])
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert scores[0] == pytest.approx(scores[1], rel=1e-5)
    assert losses[0][-1] < losses[0][0] - 0.1


@pytest.mark.long
@pytest.mark.parametrize("phase, index", [("", 0), ("", 1), ("evaluating", 1)])
def test_a_signal_while_compiling_or_evaluating_ends_both(
    folder: Path, phase: str, index: int
) -> None:
    """They end at the same update, and the one before a validation is saved."""
    workdir = folder / f"{phase}{index}"
    flags = [f"--config={folder / 'tiny.py'}", f"--workdir={workdir}", ENDLESS[0]]
    flags += ["--config.train.eval_every=20", "--config.eval.tgt_len=1"]
    run = Processes(folder, *flags)
    run.until(has_step(workdir, 19) if phase else (workdir / "run.json").exists)
    run.all[index].send_signal(signal.SIGTERM)
    assert run.wait() == [75, 75]
    assert saved(workdir)[-1] == exact(workdir)[-1][0] >= (20 if phase else 0)


@pytest.mark.long
@pytest.mark.parametrize("index", [0, 1])
def test_a_process_that_hangs_ends_the_other(folder: Path, index: int) -> None:
    workdir = folder / f"hanging{index}"
    flags = [f"--config={folder / 'tiny.py'}", f"--workdir={workdir}", *ENDLESS]
    run = Processes(folder, *flags)
    run.until(has_step(workdir, 10))
    run.all[index].send_signal(signal.SIGSTOP)
    # jax aborts the process when it misses the other's heartbeats.
    assert run.all[1 - index].wait(LIMIT_SECONDS) in (75, -signal.SIGABRT)
    run.all[index].send_signal(signal.SIGCONT)
    run.wait()


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
def test_every_mode_works_with_two_processes_or_refuses_them(tmp_path: Path) -> None:
    """Only process 0 prints a result, and a refused command leaves no file."""
    tiny, ran, fresh = write_experiment(tmp_path), tmp_path / "run", tmp_path / "new"
    text = tmp_path / "text.txt"
    names = {"RUN": ran, "NEW": fresh, "TINY": tiny, "TEXT": text}

    def start(flags: list[str]) -> tuple[list[int], list[str], Processes]:
        for name, path in names.items():
            flags = [flag.replace(name, str(path)) for flag in flags]
        run = Processes(tmp_path, *flags)
        statuses = run.wait()
        # Gloo, which connects CPUs, writes to stdout too, in pieces of lines.
        lines = [out.splitlines(keepends=True) for out in run.stdout]
        ours = [[line for line in each if "{" in line] for each in lines]
        return statuses, ["".join(each) for each in ours], run

    few = ["--config.train.num_steps=4", "--config.train.eval_every=4"]
    windows = ["--tgt_len=1", "--mem_len=0", "--ext_len=15", "--warm_start"]
    for flags in (
        ["--mode=prepare", "--config=TINY"],
        ["--config=TINY", "--workdir=RUN", *few],
        ["--mode=evaluate", "--workdir=RUN", *windows],
        ["--mode=evaluate", "--workdir=RUN", "--sweep=mem_len=8,16"],
        ["--mode=evaluate", "--workdir=RUN", "--sweep=cold_start=16"],
        ["--mode=generate", "--workdir=RUN", "--samples=2"],
    ):
        statuses, (first, second), run = start(flags)
        assert statuses == [0, 0], (flags, run.said(0), run.said(1))
        assert json.loads(first.splitlines()[-1])["mode"] and not second, flags
        assert run.stderr[1].read_text() == "", flags
    before = contents(ran)
    for flags in ALONE:
        mode = flags[0].removeprefix("--mode=")
        statuses, out, run = start(flags)
        assert (statuses, out) == ([2, 2], ["", ""])
        for index in range(2):
            (line,) = run.stderr[index].read_text().splitlines()
            assert line.startswith(
                f"txl_jax[{index}]: --mode={mode} runs in one process"
            )
    assert contents(ran) == before and not fresh.exists()


# The program, with a choice between two kernels. In process 1, the other one would be
# the fastest.
MEASURING = """
import os, sys
from txl_jax import main
from txl_jax.kernels import measure
from txl_jax.train import Run
from txl_jax.workdir import kernel_choice

fastest = ["chunked", "xla"][int(os.environ["JAX_PROCESS_ID"])]

def time_kernel(kernel, work, options):
    return 1.0 if kernel is measure.KERNELS[fastest] else 2.0

def use_kernels(self, training, evaluation, use=Run.use_kernels):
    print(f"txl_jax takes {training} and {evaluation}", file=sys.stderr)
    use(self, training, evaluation)

kernel_choice.find_candidates = lambda *_: ["xla", "chunked"]
measure.time_kernel, Run.use_kernels = time_kernel, use_kernels
main.main()
"""


@pytest.mark.long
def test_both_take_the_kernels_that_the_first_measured(folder: Path) -> None:
    workdir = folder / "measured"
    for steps in ("4", "8"):
        flags = [f"--config.train.{x}={steps}" for x in ("num_steps", "eval_every")]
        flags += [f"--config={folder / 'tiny.py'}", f"--workdir={workdir}"]
        run = Processes(folder, *flags, python=("-c", MEASURING))
        assert run.wait() == [0, 0], (run.said(0), run.said(1))
        for index in range(2):
            assert run.said(index)[-1] == "txl_jax takes chunked and chunked"
        by_file = "by kernels.json: chunked" in run.stderr[0].read_text()
        assert by_file == (steps == "8")
