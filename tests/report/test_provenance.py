"""run.json names the code, libraries, devices and data of a run."""

import json
import platform
import subprocess
from pathlib import Path

import jax
import pytest

from txl_jax.report import provenance
from txl_jax.report.provenance import EXACT, describe_changes, git_revision


def test_only_differences_that_may_change_bits_are_reported() -> None:
    output = provenance.start({"train": {"seed": 7}})
    assert json.loads(json.dumps(output)) == output
    assert output["versions"]["jax"] == jax.__version__
    assert set(EXACT) <= set(output) and describe_changes(output, output) == []
    later = output | {"git_revision": "other", "device_count": 4096}
    was = output["device_count"]
    assert describe_changes(output, later) == [f"device_count was {was}, is now 4096"]
    versions = output["versions"] | {"jax": "99.0"}
    (difference,) = describe_changes(output, output | {"versions": versions})
    assert difference.startswith("versions was ") and "99.0" in difference


def test_revision_of_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def git(*arguments: str) -> str:
        author = ("-c", "user.name=a", "-c", "user.email=a@example.org")
        command = ["git", "-C", str(tmp_path), *author, *arguments]
        return subprocess.check_output(command, text=True).strip()

    names = "package.py", "notes.txt", "results.json"
    package, notes, results = (tmp_path / name for name in names)
    for file in (package, notes, results):
        file.write_text("first\n")
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    for name in ("GIT_CONFIG_GLOBAL", "GIT_CONFIG_SYSTEM"):  # ignore the user's
        monkeypatch.setenv(name, "/dev/null")
    assert git_revision(package) == "none", "outside of a repository"
    git("init", "--quiet")
    git("add", "package.py", "results.json")
    git("commit", "--quiet", "--message=one")
    head = git("rev-parse", "HEAD")
    assert len(head) == 40 and git_revision(package) == head
    assert git_revision(notes) == "none", "installed in another repository"
    results.write_text("changed\n")
    assert git_revision(package) == head
    package.write_text("changed\n")
    assert git_revision(package) == head + "+dirty"
    monkeypatch.setenv("PATH", str(tmp_path))
    assert git_revision(package) == "none", "without git"


@pytest.mark.parametrize(
    ("cpuinfo", "description"),
    [
        (
            "model name : AMD EPYC 9B45\nstepping : 0\nflags : avx512_bf16",
            "avx512_bf16",
        ),
        ("model name : AMD EPYC 9B45\nstepping : 0\nflags : avx2", "no fast bfloat16"),
        ("Features : asimd", None),
        ("", None),
    ],
)
def test_the_processor_is_described_by_what_linux_lists(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    cpuinfo: str,
    description: str | None,
) -> None:
    monkeypatch.setattr(provenance, "CPUINFO", tmp_path / "cpuinfo")
    if cpuinfo:
        (tmp_path / "cpuinfo").write_text(cpuinfo)
    expected = f"AMD EPYC 9B45, {description}" if description else platform.machine()
    assert provenance.describe_processor() == expected
