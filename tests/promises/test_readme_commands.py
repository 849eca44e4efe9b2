"""The program accepts and runs every command in the README.

The long test runs all commands of this project's programs with --quick, in order, in
one folder.
"""

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from txl_jax import config
from txl_jax.cli import flags

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "README.md").read_text("utf-8")
BLOCKS = re.findall(r"```sh\n(.*?)```", TEXT, re.S)
LINES = [line for block in BLOCKS for line in block.splitlines()]
COMMANDS = [line.partition("  #")[0] for line in LINES if not line.startswith("#")]
INSTALL = "python3 -m venv .venv && .venv/bin/pip install -e "
OURS = re.compile(r"\.venv/bin/(?:txl|python -m txl_jax\.main) (.*)")


def test_the_first_two_commands_start_on_a_bare_machine() -> None:
    train, test = COMMANDS[:2]
    assert train == (
        f"{INSTALL}. && .venv/bin/python -m txl_jax.main "
        "--config=experiments/quickstart.py"
    )
    assert test == f"{INSTALL}'.[test]' && .venv/bin/pytest"


def test_flags_are_accepted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A config stands in for the runs that commands read."""
    (tmp_path / "experiments").symlink_to(ROOT / "experiments")
    monkeypatch.chdir(tmp_path)
    quickstart = config.load("experiments/quickstart.py")
    for name in ("quickstart", "imported"):
        (tmp_path / "runs" / name).mkdir(parents=True)
        text = json.dumps(config.to_json(quickstart))
        Path("runs", name, "config.json").write_text(text)
    ours = [match[1] for line in COMMANDS if (match := OURS.search(line))]
    assert len(ours) > 5
    for arguments in ours:
        flags.parse(shlex.split(arguments))
        flags.parse(shlex.split(f"{arguments} --quick"))


def programs() -> Iterator[tuple[str, list[str]]]:
    """Yields the small commands of this project's programs, split into words."""
    for command in COMMANDS:
        words = shlex.split(f"{command.rpartition('&& ')[2]} --quick")
        if words[0] == ".venv/bin/txl":
            words[:1] = [".venv/bin/python", "-m", "txl_jax.main"]
        if words[:2] != [".venv/bin/python", "-m"] or "benchmarks" in words[2]:
            continue
        if "compile" in words and find_spec("libtpu") is None:
            continue
        yield command, [sys.executable, *words[1:]]


def run(words: list[str], folder: Path) -> str:
    """Returns the last line on stdout of a program that ended well."""
    more = {
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        "JAX_PLATFORMS": "cpu",
        "TFDS_DATA_DIR": str(folder / "data"),
    }
    done = subprocess.run(
        words, cwd=folder, env=os.environ | more, capture_output=True, text=True
    )
    assert done.returncode == 0, f"{shlex.join(words)}\n{done.stderr[-2000:]}"
    return (done.stdout.splitlines() or [""])[-1]


@pytest.mark.long
def test_every_command_runs(tmp_path: Path) -> None:
    """Except installation, the tests, and timing against Hugging Face's port."""
    (tmp_path / "experiments").symlink_to(ROOT / "experiments")
    (tmp_path / "book.txt").write_bytes(Path(os.__file__).read_bytes())
    for command, words in programs():
        print(command, run(words, tmp_path)[:300], sep="\n", flush=True)
    for block in re.findall(r"```python\n(.*?)```", TEXT, re.S):
        run([sys.executable, "-c", block], tmp_path)


def test_links_lead_to_files() -> None:
    for link in re.findall(r"\]\(([^)#\s]+)\)", TEXT):
        assert re.match(r"https?:", link) or (ROOT / link).exists(), link
