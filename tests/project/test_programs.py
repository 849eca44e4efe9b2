"""The programs in experiments/ treat the machine and the user as `txl` does."""

import os
import subprocess
import sys
from pathlib import Path

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
    name: str, flags: str, absent: str, env: dict[str, str], folder: Path
) -> subprocess.CompletedProcess[str]:
    """Runs a program in a process of its own; returns how it ended."""
    line = [sys.executable, "-c", START, absent, f"experiments.{name}", *flags.split()]
    env = os.environ | {"PYTHONPATH": str(ROOT)} | env
    return subprocess.run(line, text=True, env=env, cwd=folder, capture_output=True)


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
    done = start(name, flags, absent or "none", env, tmp_path)
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    assert done.stderr.startswith("txl_jax: ") and line in done.stderr
    assert done.stderr.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["text"]


def test_txl_and_the_programs_have_one_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[bool] = []
    monkeypatch.setattr(
        entry, "run", lambda work, is_program: started.append(is_program)
    )
    program.run(program.make_parser(None), lambda args: {}, None)
    program.run(program.make_parser(None), lambda args: {}, [])
    main.main(), main.main([])
    assert started == [True, False, True, False]
