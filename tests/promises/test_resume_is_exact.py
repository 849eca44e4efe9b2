"""A run that is killed and resumed is bit-identical to one that was never stopped."""

from pathlib import Path
from typing import Any

import pytest

from tests.faults import kills
from tests.support import tiny

pytestmark = [pytest.mark.promise("Resume is exact"), pytest.mark.exact_bits]


ACROSS = kills.UNIFORM | {"train.gradient_segments": 2, "train.varlen": False}
# Gates and ALiBi.
KINDS = kills.UNIFORM | {f"model.{name}": x for name, x in tiny.KINDS.items()}
FAST = kills.UNIFORM | {"model.fast_weights": True, "model.dtype": "bfloat16"}


@pytest.mark.parametrize(
    "fields",
    [
        kills.UNIFORM,
        pytest.param(ACROSS, marks=pytest.mark.long),
        pytest.param(KINDS, marks=pytest.mark.long),
        pytest.param(FAST, marks=pytest.mark.long),
    ],
    ids=[
        "within segments",
        "across segments",
        "other kinds",
        "fast weights",
    ],
)
def test_kill_and_resume_is_bit_identical(
    fields: dict[str, Any], tmp_path: Path
) -> None:
    straight, killed = (
        kills.Run(tmp_path / name, fields=fields) for name in ("straight", "killed")
    )
    straight.finish()
    run = killed.start()
    first = fields["checkpoint.every_steps"]
    run.until((killed.workdir / "checkpoints" / str(first)).exists)
    run.kill()
    assert "resumed at update" in killed.finish()
    assert killed.result() == straight.result()


PER_CALL = "train.segments_per_call"


@pytest.mark.long
def test_the_number_of_updates_in_a_call_changes_no_bit(tmp_path: Path) -> None:
    """One run has calls of two updates and of one, the other only calls of one."""
    mixed, single = (
        kills.Run(tmp_path / str(count), fields=kills.FIELDS | {PER_CALL: count})
        for count in (4, 2)
    )
    mixed.finish(), single.finish()
    assert single.result() == mixed.result()


@pytest.mark.long
def test_forty_kills(tmp_path: Path) -> None:
    assert kills.torture(tmp_path, 40, seed=2)["kills"] == 40
