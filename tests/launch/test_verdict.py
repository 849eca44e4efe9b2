"""verdict.sh: the status of a run follows from those of its processes."""

import subprocess

import pytest

from tests.launch import world

CASES = {"0 0 0": 0, "0 75": 75, "75 134 75": 75, "lost 75": 75, "lost lost": 75}
CASES |= {"stuck 75": 75, "0 stuck": 75, "134 134": 75, "75 1 75 134": 1, "": 75}
CASES |= {"1 137": 137, "75 2 134": 2, "1 2 137": 2, "12 0": 12, "76 76": 76}
CASES |= {"75 76 137": 76, "75 130": 130}


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
