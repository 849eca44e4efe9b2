"""run.json names the code, libraries, devices and data of a run."""

import importlib.metadata
import json
import platform
import subprocess
from pathlib import Path

import jax
import pytest

from txl_jax.report import provenance
from txl_jax.report.provenance import EXACT, differences, git_revision

CONFIG = {"train": {"seed": 7}}
DATA = {"splits": {"test": {"sha256": "abc"}}}


def test_everything_that_numbers_depend_on_is_said() -> None:
    output = provenance.provenance(CONFIG, DATA, parameters=123)
    assert json.loads(json.dumps(output)) == output
    assert (output["seed"], output["parameters"]) == (7, 123)
    assert (output["config"], output["data"]) == (CONFIG, DATA)
    assert output["versions"]["python"] == platform.python_version()
    assert output["versions"]["jax"] == jax.__version__
    for library in ("jaxlib", "flax", "optax", "orbax-checkpoint", "numpy"):
        assert output["versions"][library] == importlib.metadata.version(library)
    assert output["device_kind"] == "cpu"
    assert (output["device_count"], output["process_count"]) == (jax.device_count(), 1)
    assert output["usable_cores"] >= 1
    assert set(EXACT) <= set(output)


def test_only_what_bits_depend_on_is_a_difference() -> None:
    output = provenance.provenance(CONFIG, DATA, parameters=123)
    assert differences(output, output) == []
    later = output | {"git_revision": "other", "device_count": 4096}
    was = output["device_count"]
    assert differences(output, later) == [f"device_count was {was}, is now 4096"]
    versions = output["versions"] | {"jax": "99.0"}
    (difference,) = differences(output, output | {"versions": versions})
    assert difference.startswith("versions was ") and "99.0" in difference
    older = {name: value for name, value in output.items() if name != "usable_cores"}
    (difference,) = differences(older, output)
    assert difference.startswith("usable_cores was None")


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Holds a git repository with one file, which passes for the package's."""
    file = tmp_path / "provenance.py"
    file.write_text("# the package\n")
    monkeypatch.setattr(provenance, "__file__", str(file))
    # Without the user's git configuration.
    for name, value in {
        "GIT_CONFIG_GLOBAL": "/dev/null",
        "GIT_CONFIG_SYSTEM": "/dev/null",
        "GIT_AUTHOR_NAME": "a",
        "GIT_AUTHOR_EMAIL": "a@example.org",
        "GIT_COMMITTER_NAME": "a",
        "GIT_COMMITTER_EMAIL": "a@example.org",
    }.items():
        monkeypatch.setenv(name, value)
    git(tmp_path, "init", "--quiet")
    return tmp_path


def git(folder: Path, *arguments: str) -> str:
    command = ["git", "-C", str(folder), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def test_the_revision_is_the_commit_and_says_when_it_is_not(checkout: Path) -> None:
    git(checkout, "add", "provenance.py")
    git(checkout, "commit", "--quiet", "--message=one")
    head = git(checkout, "rev-parse", "HEAD")
    assert len(head) == 40
    assert git_revision() == head
    (checkout / "notes.txt").write_text("not the code's")
    assert git_revision() == head
    (checkout / "provenance.py").write_text("# changed\n")
    assert git_revision() == head + "+dirty"


def test_a_package_inside_another_repository_has_no_revision(checkout: Path) -> None:
    other = checkout / "their.txt"
    other.write_text("their code")
    git(checkout, "add", "their.txt")
    git(checkout, "commit", "--quiet", "--message=one")
    assert git_revision() == "none"


def test_a_package_outside_a_repository_has_no_revision(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(provenance, "__file__", str(tmp_path / "provenance.py"))
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert git_revision() == "none"


def test_a_machine_without_git_has_no_revision(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert git_revision() == "none"
