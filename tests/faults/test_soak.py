"""Long runs neither recompile nor grow."""

import json
from pathlib import Path

import pytest

from tests.support.processes import Processes


@pytest.mark.long
def test_a_long_run_does_not_grow(tmp_path: Path) -> None:
    """The run has its own process, so that its memory can be measured."""
    soak = ("-m", "tests.faults.soak")
    run = Processes(tmp_path, "--steps=20000", python=soak, count=1)
    run.wait()
    result = json.loads(run.stdout[0].splitlines()[-1])
    assert not result["failures"], result
    assert result["compilations"][-1] > 0, "nothing counts compilations"
