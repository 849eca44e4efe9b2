"""A folder in which stand-ins play a cloud or a cluster and record their calls."""

import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
STANDIN = Path(__file__).with_name("standin.sh")
LIMIT_SECONDS = 1800  # for any wait; a quiet machine needs a hundredth
# A worker's programs.
MACHINE = ("python3", "curl", "sudo", "findmnt", "mount", "apt-get", "training")


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
        "TPU_WORKER_FOLDER": "share",  # in each machine's home
        "TPU_VM_POLL_SECONDS": "0",
    }


def plan(folder: Path, *runs: tuple[Any, ...]) -> None:
    """Plans the training: the behaviour of each process in each run."""
    for place in range(len(runs[0])):
        lines = "".join(f"{run[place]}\n" for run in runs)
        (folder / "exits" / str(place)).write_text(lines)


def run(
    environment: dict[str, str], program: str, *arguments: str
) -> subprocess.CompletedProcess[str]:
    """Runs a script of launch/, or of launch/ in $CHECKOUT, to its end."""
    root = Path(environment.get("CHECKOUT", ROOT))
    return subprocess.run(
        ["bash", str(root / "launch" / program), *arguments],
        env=environment,
        cwd=environment.get("SLURM_SUBMIT_DIR", os.fspath(root)),
        capture_output=True,
        text=True,
        timeout=LIMIT_SECONDS,
    )


def calls(folder: Path, *words: str) -> list[list[str]]:
    """Returns the calls that have all the `words` in their arguments."""
    path = folder / "calls"
    text = path.read_text("utf-8").replace("\x1d", "\n") if path.exists() else ""
    every = [call.split("\x1f") for call in text.split("\x1e")[:-1]]
    return [call for call in every if set(words) <= set(" ".join(call).split())]


def assert_mistake(
    folder: Path, result: subprocess.CompletedProcess[str], message: str
) -> None:
    """Expects one line on stderr, status 2 and no calls."""
    assert result.returncode == 2
    assert len(result.stderr.splitlines()) == 1 and message in result.stderr
    assert not result.stdout
    assert not calls(folder)


def wait_until(happened: Callable[[], bool]) -> None:
    """Waits for an event of another process."""
    limit = time.monotonic() + LIMIT_SECONDS
    while not happened():
        assert time.monotonic() < limit
        time.sleep(0.01)
