"""A folder in which stand-ins play a cloud or a cluster and record their calls."""

import subprocess
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
STANDIN = Path(__file__).with_name("standin.sh")
LIMIT_SECONDS = 1800  # for any wait; a quiet machine needs a hundredth


def make(folder: Path, *programs: str) -> dict[str, str]:
    """Returns an environment in which `programs` are stand-ins that share `folder`."""
    bin_folder = folder / "bin"
    bin_folder.mkdir()
    (folder / "exits").mkdir()
    for program in programs:
        (bin_folder / program).symlink_to(STANDIN)
    return {
        "PATH": f"{bin_folder}:/usr/bin:/bin",
        "WORLD": str(folder),
        "TMPDIR": str(folder),
        "TPU_VM_POLL_SECONDS": "0",
    }


def plan(folder: Path, *runs: tuple[Any, ...]) -> None:
    """Plans the training: the end of each process in each run."""
    for place in range(len(runs[0])):
        lines = "".join(f"{run[place]}\n" for run in runs)
        (folder / "exits" / str(place)).write_text(lines)


def run(
    environment: dict[str, str], program: str, *arguments: str
) -> subprocess.CompletedProcess[str]:
    """Runs a script of launch/ to its end."""
    return subprocess.run(
        ["bash", str(ROOT / "launch" / program), *arguments],
        env=environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=LIMIT_SECONDS,
    )


def calls(folder: Path, word: str) -> list[list[str]]:
    """Returns the calls that have a word in their arguments."""
    path = folder / "calls"
    text = path.read_text("utf-8") if path.exists() else ""
    return [x for call in text.split("\x1e")[:-1] if word in (x := call.split("\x1f"))]


def assert_mistake(
    folder: Path, result: subprocess.CompletedProcess[str], message: str
) -> None:
    """Expects one line on stderr, status 2 and no calls."""
    assert result.returncode == 2
    assert len(result.stderr.splitlines()) == 1 and message in result.stderr
    assert not result.stdout and not (folder / "calls").exists()
