"""The worked examples of the guide for contributors, `docs/changes/*.diff`."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CHANGES = sorted((ROOT / "docs" / "changes").glob("*.diff"))


@pytest.mark.parametrize("change", CHANGES, ids=lambda path: path.stem)
def test_a_change_applies_and_needs_at_most_three_files(change: Path) -> None:
    subprocess.run(["git", "apply", "--check", str(change)], cwd=ROOT, check=True)
    paths = re.findall(r"^\+\+\+ b/(.+)$", change.read_text(), re.MULTILINE)
    assert 1 <= sum(path.startswith("txl_jax/") for path in paths) <= 3
    assert any(path.startswith("tests/") for path in paths)
    guide = (ROOT / ".github" / "CONTRIBUTING.md").read_text()
    assert f"docs/changes/{change.name}" in guide


@pytest.mark.long
@pytest.mark.parametrize("change", CHANGES, ids=lambda path: path.stem)
def test_the_tests_of_a_change_pass(change: Path, tmp_path: Path) -> None:
    for name in ("txl_jax", "tests", "experiments"):
        shutil.copytree(ROOT / name, tmp_path / name, symlinks=True)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    subprocess.run(["git", "apply", str(change)], cwd=tmp_path, check=True)
    text = change.read_text()
    tests = re.findall(r"^\+\+\+ b/(tests/.*test_\w+\.py)$", text, re.MULTILINE)
    tests = tests or ["tests/data/test_corpora.py"]
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-n0", *tests]
    env = os.environ | {"PYTHONPATH": str(tmp_path)}
    subprocess.run(command, cwd=tmp_path, env=env, check=True)
