"""How commands end: after signals, on unwritable output, with non-finite values."""

import errno
import io
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest

from tests.support import processes
from tests.support.processes import LIMIT_SECONDS, Processes
from tests.support.trained import Home, home, own_home
from txl_jax.checkpoint import save_restore
from txl_jax.cli.draw_samples import print_first
from txl_jax.cli.modes import check_finite, session
from txl_jax.errors import BadNumbers, UserError
from txl_jax.report.log import say
from txl_jax.runtime.explain import explain
from txl_jax.workdir.load import load

FIXTURES = home, own_home
MAIN = "import sys; from txl_jax.main import main; sys.exit(main())"
# Sends a signal to its own process while it imports the module.
ALARM = """
import os, signal, sys, threading, time

def alarm():
    while "{module}" not in sys.modules:
        time.sleep(0.01)
    os.kill(os.getpid(), signal.{name})

threading.Thread(target=alarm, daemon=True).start()
"""


def program(*argv: str, start: str = "", **options: Any) -> subprocess.Popen[str]:
    """Starts the program in another process, whose stderr is a pipe."""
    line = [sys.executable, "-c", start + MAIN, *argv]
    return subprocess.Popen(line, stderr=subprocess.PIPE, text=True, **options)


def error_of(run: subprocess.Popen[str]) -> str:
    """Waits for the end of a program; returns its stderr."""
    return run.communicate(timeout=LIMIT_SECONDS)[1]


@pytest.mark.parametrize("name, status", [("SIGTERM", -15), ("SIGINT", -2)])
def test_a_signal_before_a_training_ends_at_once(name: str, status: int) -> None:
    start = ALARM.format(name=name, module="jax")
    # The program waits for a second process, which is never started.
    first, _ = pair()
    run = program("--config=quickstart", "--mode=prepare", start=start, env=first)
    error = error_of(run)
    assert (run.returncode, error) == (status, "")


def pair() -> list[dict[str, str]]:
    """Returns the environments of two processes that wait for each other."""
    address = f"127.0.0.1:{processes.free_port()}"
    names = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
    return [
        os.environ | dict(zip(names, (address, "2", index), strict=True))
        for index in "01"
    ]


def test_a_closed_pipe_ends_quietly() -> None:
    read, write = os.pipe()
    os.close(read)
    run = program("--helpfull", stdout=write)
    assert error_of(run) == ""
    assert run.returncode == 128 + signal.SIGPIPE


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_behind_stdout_is_one_line() -> None:
    with open("/dev/full", "w") as full:
        run = program("--helpfull", stdout=full)
    error = error_of(run)
    assert (run.returncode, error) == (2, "txl_jax: stdout: No space left on device\n")


# Uses every stream, and a file that would get the number of a closed one.
STREAMS = """
import os, sys
from txl_jax.cli import entry

def work():
    with open("new", "w") as file:
        assert sys.stdin.read() == ""
        assert not sys.stderr.isatty() and print("a line", file=sys.stderr) is None
        os.write(1, b"from C++"), os.write(2, b"from C++")
    return 0, "a result"

sys.exit(entry.run(work, True))
"""


@pytest.mark.parametrize("close", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_a_closed_stream_is_empty_and_keeps_its_number(
    close: str, tmp_path: Path
) -> None:
    shell = ["sh", "-c", f'exec "$@" {close}', "sh", sys.executable, "-c", STREAMS]
    path = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    options: Any = {"stdin": subprocess.DEVNULL, "capture_output": True, "text": True}
    done = subprocess.run(shell, cwd=tmp_path, env=path, **options)
    assert done.returncode == 0, done.stderr
    assert ("a result" in done.stdout) == (">&-" not in close.split())
    assert ("a line" in done.stderr) == ("2>&-" not in close)
    assert (tmp_path / "new").read_bytes() == b""


def test_stdout_may_be_replaced_as_in_a_notebook() -> None:
    code = MAIN.replace(
        "sys.exit(main())", "import contextlib, io; text = io.StringIO()"
    )
    code += "\nwith contextlib.redirect_stdout(text): main()\n"
    code += "assert text.getvalue().startswith('txl')"
    subprocess.run([sys.executable, "-c", code, "--help"], check=True)


def refusal_of(*flags: str, start: str = "", **environment: str) -> str:
    """Returns the one-line error with which the program ends."""
    run = program(*flags, start=f"{start}\n", env=os.environ | environment)
    error = error_of(run)
    assert run.returncode == 2
    assert error.startswith("txl_jax: ") and len(error.splitlines()) == 1
    return error


@pytest.mark.parametrize(
    "environment, part",
    [
        ({"JAX_ENABLE_X64": "maybe"}, "'JAX_ENABLE_X64'): correct the environment"),
        ({"JAX_ENABLE_X64": "true"}, "JAX_ENABLE_X64=True is not supported: unset it"),
        ({"JAX_TRANSFER_GUARD": "disallow"}, "=disallow is not supported: unset it"),
        (  # jax is then imported in part
            {"JAX_NUM_CPU_DEVICES": "x", "JAX_NUM_PROCESSES": "2"},
            "jax_num_cpu_devices): correct the environment",
        ),
        ({"JAX_PLATFORMS": "toaster"}, "check JAX_PLATFORMS"),
        ({"JAX_PLATFORMS": "cuda", "CUDA_VISIBLE_DEVICES": ""}, "check JAX_PLATFORMS"),
    ],
)
def test_an_environment_that_jax_refuses_is_one_line(
    environment: dict[str, str], part: str
) -> None:
    assert part in refusal_of("--mode=prepare", "--config=quickstart", **environment)


def test_an_unusable_workdir_is_reported_in_one_line() -> None:
    error = refusal_of("--mode=prepare", "--workdir=caf\udce9")
    assert "caf\\udce9' is not UTF-8: give another" in error


def test_pictures_need_no_display() -> None:
    code = MAIN.replace("sys.exit(main())", "main(); import matplotlib")
    line = [sys.executable, "-c", code, "--version"]
    subprocess.run(line, env=os.environ | {"MPLBACKEND": "toaster"}, check=True)


def test_compilation_for_absent_devices_does_not_look_for_devices() -> None:
    flags = ("--mode=compile", "--config=quickstart", "--topology=toaster")
    assert "compile.topology" in refusal_of(*flags, JAX_PLATFORMS="toaster")


def test_a_terminal_gets_no_control_characters(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = "\x1b]0;owned\x07 \x9b2J \u202e 1 is "
    for name, write in (("sys.stdout", print_first), ("sys.stderr", say)):
        with io.StringIO() as terminal, monkeypatch.context() as patch:
            patch.setattr(terminal, "isatty", lambda: True)
            patch.setattr(name, terminal)
            write(prompt)
            shown = terminal.getvalue().strip()
        assert shown == r"\x1b]0;owned\x07 \x9b2J \u202e 1 is"
    done = home.read("generate", f"--prompt={prompt}", "--num_tokens=2")
    assert done.out.startswith(prompt)


def test_only_errors_of_the_machine_are_user_errors(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="x.json .No space left"), session("", False):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "x.json")
    with pytest.raises(FileNotFoundError), session("", False):
        (tmp_path / "missing").read_text()
    with pytest.raises(BrokenPipeError), session("", False):
        raise BrokenPipeError(errno.EPIPE, "Broken pipe")


def test_a_store_out_of_reach_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("gcsfs")
    error = PermissionError("Forbidden: https://storage.googleapis.com/bucket")
    line = explain(error)
    assert line and line.startswith("cannot reach gs:// (PermissionError: Forbidden: ")
    monkeypatch.delitem(sys.modules, "gcsfs")
    assert explain(error) is None, "no path is on gs://"


ADVICE = [("table", "train.batch"), ("score", "eval.mem"), ("evaluate", "eval.streams")]


@pytest.mark.parametrize("mode, advice", ADVICE)
def test_advice_on_too_little_memory_fits_the_mode(mode: str, advice: str) -> None:
    for error in (
        MemoryError(),
        RuntimeError("INTERNAL: Out of memory allocating 9 bytes"),
        RuntimeError("RESOURCE_EXHAUSTED: 9 bytes"),
    ):
        assert f": lower {advice}" in str(explain(error, mode))
    assert explain(RuntimeError("INTERNAL: a bug"), mode) is None
    error = RuntimeError("INTERNAL: CUDNN_STATUS_NOT_SUPPORTED\nin cuda_dnn.cc")
    assert "STATUS_NOT_SUPPORTED): set model.kernel to" in str(explain(error, mode))
    error = RuntimeError("DNN library initialization failed.")  # XLA's message
    assert "failed.): set model.kernel to" in str(explain(error, mode))


def test_a_nonfinite_result_is_an_error() -> None:
    nan, inf = float("nan"), float("inf")
    check_finite({"rows": [{"nll": 1.0}], "nll": None, "name": nan})
    with pytest.raises(BadNumbers, match="rows.1.nll = .* lower eval.dynamic_lr"):
        check_finite({"rows": [{"nll": 1.0}, {"nll": nan}]})
    with pytest.raises(BadNumbers, match="nll_nats.96 = "):
        check_finite({"nll_nats": {96: inf}})


def test_nonfinite_weights_are_refused(own_home: Home) -> None:
    step, name = 61, "layers/feed_forward/out/bias"
    params = load(own_home.run).params
    bias = params["layers"]["feed_forward"]["out"]["bias"]
    params["layers"]["feed_forward"]["out"]["bias"] = bias.at[1, 3].set(jnp.nan)
    with save_restore.Checkpoints(own_home.run) as manager:
        manager.save_items(step, {"params": params})
        manager.finish(step)
    done = own_home.read("export", f"--config.eval.checkpoint={step}")
    assert (done.status, done.out) == (76, "")
    assert f"parameter {name} in {own_home.run} is not finite" in done.err


@pytest.mark.long
def test_a_closed_pipe_ends_several_processes_quietly(tmp_path: Path) -> None:
    tiny = processes.write_experiment(tmp_path)
    read, write = os.pipe()
    os.close(read)
    flags = f"--config={tiny}", "--mode=prepare"
    first, second = (program(*flags, stdout=write, env=each) for each in pair())
    errors = [error_of(run) for run in (first, second)]
    assert (first.returncode, second.returncode) == (141, 0), errors
    assert not any("Traceback" in error or "lost" in error for error in errors)


DIFFERS = "    c.optim.lr = 0.1 * (1 + int(os.environ['JAX_PROCESS_ID']))\n    return c"


def test_processes_that_disagree_are_refused(tmp_path: Path) -> None:
    tiny = processes.write_experiment(tmp_path)
    source = tiny.read_text().replace("    return c", DIFFERS)
    tiny.write_text(f"import os\n{source}")
    run = Processes(tmp_path, f"--config={tiny}", f"--workdir={tmp_path / 'run'}")
    assert run.wait() == [2, 2]
    said = [run.said(index)[0] for index in range(2)]
    assert any("optim.lr differs between process 1 and" in line for line in said)
    assert not (tmp_path / "run").exists()


# Reasons to refuse one of two processes, after they have connected and in its mode.
REFUSALS = {
    "device": ({"JAX_PLATFORMS": "cuda", "CUDA_VISIBLE_DEVICES": ""}, "no device"),
    "folder": ({"TFDS_DATA_DIR": __file__}, "set data.data_dir"),
}


@pytest.mark.long
@pytest.mark.parametrize("index", [0, 1])
@pytest.mark.parametrize("cause", REFUSALS)
def test_a_refusal_of_one_process_ends_the_other(
    tmp_path: Path, cause: str, index: int
) -> None:
    """The other one notices the loss, whatever it waits for."""
    tiny = processes.write_experiment(tmp_path)
    tiny.write_text(
        tiny.read_text().replace(f"data_dir={str(tmp_path / 'data')!r}", "")
    )
    places = [{"TFDS_DATA_DIR": str(tmp_path / "data")} for _ in range(2)]
    own, line = REFUSALS[cause]
    places[index] |= own
    flags = f"--config={tiny}", f"--workdir={tmp_path / 'run'}"
    run = Processes(tmp_path, *flags, environments=places)
    statuses = run.wait()
    assert statuses[index] == 2 and line in run.said(index)[0]
    assert statuses[1 - index] in (2, 75, -signal.SIGABRT)
