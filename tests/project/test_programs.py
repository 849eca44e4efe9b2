"""The programs in experiments/ treat the machine and the user as `txl` does."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from experiments.figures import program
from txl_jax import main
from txl_jax.cli import entry

ROOT = Path(__file__).parents[2]
# Runs a module as a program, without the module that is named first.
START = """
import runpy, sys
sys.modules[sys.argv[1]] = None
del sys.argv[0], sys.argv[0]
runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
"""


def start(
    name: str, flags: str, absent: str = "none", **options: Any
) -> subprocess.CompletedProcess[str]:
    """Runs a program in a process of its own; returns how it ended."""
    variables = {"PYTHONPATH": str(ROOT)} | options.pop("env", {})
    line = [sys.executable, "-c", START, absent, f"experiments.{name}", *flags.split()]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | options
    return subprocess.run(line, text=True, env=os.environ | variables, **pipes)


@pytest.mark.parametrize(
    "name, flags, variables, absent, line",
    [
        ("figures.reach", "", "JAX_PLATFORMS=toaster", "", "check JAX_PLATFORMS"),
        ("rl.ppo", "", "JAX_PLATFORMS=cuda", "", "no device (none of its kind is here"),
        (
            *("recipes.chorales", "midi", "", "music21"),
            "music21 is not installed: pip install music21",
        ),
        (
            *("recipes.compress", "encode text out", "", "constriction"),
            "constriction is not installed: pip install 'txl_jax[recipes]'",
        ),
    ],
)
def test_what_the_machine_lacks_is_one_line(
    name: str, flags: str, variables: str, absent: str, line: str, tmp_path: Path
) -> None:
    (tmp_path / "text").write_text("text")
    env = dict([variables.split("=")] if variables else [])
    done = start(name, flags, absent or "none", env=env, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    assert done.stderr.startswith("txl_jax: ") and line in done.stderr
    assert done.stderr.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["text"]


def test_an_unusable_stdout_ends_a_program_as_it_ends_txl(tmp_path: Path) -> None:
    read, write = os.pipe()
    os.close(read)
    done = start("recipes.series", "write", stdout=write, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (128 + signal.SIGPIPE, "")
    with open("/dev/full", "w") as full:
        done = start("recipes.series", "--help", stdout=full, cwd=tmp_path)
    line = "txl_jax: stdout: No space left on device\n"
    assert (done.returncode, done.stderr) == (2, line)


def test_control_c_ends_a_program_without_a_traceback() -> None:
    code = "import argparse, signal\nfrom experiments.figures import program\n"
    code += "kill = lambda _: signal.raise_signal(signal.SIGINT)\n"
    code += "program.run(argparse.ArgumentParser(), kill, None)"
    line = [sys.executable, "-c", code]
    done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, "", "")


def test_txl_and_the_programs_have_one_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[bool] = []
    monkeypatch.setattr(
        entry, "run", lambda work, is_program: started.append(is_program)
    )
    program.run(program.make_parser(None), lambda args: {}, None)
    program.run(program.make_parser(None), lambda args: {}, [])
    main.main(), main.main([])
    assert started == [True, False, True, False]
