"""A folder in which stand-ins play a cloud or a cluster, and what they were asked."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
STANDIN = Path(__file__).with_name("standin.py")
QUICK = {"TPU_VM_POLL_SECONDS": "0", "TPU_WORKER_FINISH_SECONDS": "2"}
MACHINE = ("python3", "sudo", "findmnt", "mount", "apt-get")  # a worker's programs


def make(folder: Path, *programs: str) -> dict[str, str]:
    """Returns an environment in which `programs` are stand-ins that share `folder`."""
    bin_folder = folder / "bin"
    bin_folder.mkdir()
    (folder / "exits").mkdir()
    for program in programs:
        path = bin_folder / program
        path.write_text(
            f'#!/bin/sh\nexec {sys.executable} -ESs {STANDIN} {program} "$@"\n'
        )
        path.chmod(0o755)
    path_variable = f"{bin_folder}:/usr/bin:/bin"
    return {
        "PATH": path_variable,
        "WORLD": str(folder),
        "TMPDIR": str(folder),
        "TPU_WORKER_FOLDER": "share",  # in each machine's home
        **QUICK,
    }


def plan(folder: Path, *runs: tuple[Any, ...]) -> None:
    """Says what the training does: for each run a tuple with an entry per process."""
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
        cwd=environment.get("SLURM_SUBMIT_DIR", os.fspath(ROOT)),
        capture_output=True,
        text=True,
        timeout=60,
    )


def calls(folder: Path, *words: str) -> list[list[str]]:
    """Returns the calls that have all the `words` in their arguments."""
    path = folder / "calls"
    lines = path.read_text().splitlines() if path.exists() else []
    every = [json.loads(line) for line in lines]
    return [call for call in every if set(words) <= set(" ".join(call).split())]
