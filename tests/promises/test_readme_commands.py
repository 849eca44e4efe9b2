"""Every command in the README is one that the program takes."""

import re
import shlex
from pathlib import Path

import pytest

from txl_jax import config, flags, main

ROOT = Path(__file__).parents[2]
BLOCKS = re.findall(r"```sh\n(.*?)```", (ROOT / "README.md").read_text("utf-8"), re.S)
COMMANDS = [line for block in BLOCKS for line in block.splitlines()]
INSTALL = "python3 -m venv .venv && .venv/bin/pip install -e "


def test_the_first_two_commands_start_on_a_bare_machine() -> None:
    train, test = COMMANDS[:2]
    assert train == (
        f"{INSTALL}. && .venv/bin/python -m txl_jax.main "
        "--config=experiments/quickstart.py"
    )
    assert test == f"{INSTALL}'.[test]' && .venv/bin/pytest"


@pytest.mark.parametrize(
    "command", [line for line in COMMANDS if "-m txl_jax.main" in line]
)
def test_flags_are_taken(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a command reads what the first one left, its config lies there."""
    (tmp_path / "runs/quickstart").mkdir(parents=True)
    (tmp_path / "experiments").symlink_to(ROOT / "experiments")
    monkeypatch.chdir(tmp_path)
    quickstart = config.parse(config.load("experiments/quickstart.py"))
    config.save_json(quickstart, Path("runs/quickstart/config.json"))
    arguments = command.partition("-m txl_jax.main")[2]
    flags.parse(shlex.split(arguments), list(main.MODES))


def test_python_in_the_readme_is_python() -> None:
    text = (ROOT / "README.md").read_text("utf-8")
    for block in re.findall(r"```python\n(.*?)```", text, re.S):
        compile(block, "README.md", "exec")
