"""A run whose checkpoints have gone is not started again."""

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.refusal import contents, refused
from txl_jax import config as configs
from txl_jax.checkpoint.save_restore import Checkpoints
from txl_jax.workdir.run_record import check_trainable, last_step

pytestmark = pytest.mark.promise("Damage is noticed")


def line(step: int, saving: float = 0.0, **exact: float) -> dict[str, Any]:
    seconds = {"checkpoint": saving, "evaluation": 0.0}
    return {"step": step, "exact": exact, "timing": {"total_seconds": seconds}}


BEGUN = [line(n, loss=1.0) for n in (1, 2)]
VALIDATED = [*BEGUN, line(2, valid_nll=1.0)]


@pytest.mark.parametrize(
    "lines, names, is_gone",
    [
        ([], [], False),
        (BEGUN, [], False),
        (BEGUN, ["result.json"], True),
        ([*BEGUN, line(3, saving=0.1, loss=1.0)], [], True),
        (VALIDATED, [], True),
        (VALIDATED, ["checkpoints/"], True),  # the folder on which a disk was mounted
        (VALIDATED, ["checkpoints/2.orbax-checkpoint-tmp/"], False),  # a killed save
        (VALIDATED, ["checkpoints/deleted/"], False),  # a failed save
        (VALIDATED, ["checkpoints/2/"], False),
    ],
)
def test_what_a_run_has_saved(
    lines: list[dict[str, Any]], names: list[str], is_gone: bool, tmp_path: Path
) -> None:
    (tmp_path / "metrics.jsonl").write_text(
        "".join(f"{json.dumps(x)}\n" for x in lines)
    )
    for path in (tmp_path / name for name in names):
        path.touch() if path.suffix == ".json" else path.mkdir(parents=True)
    before, config = contents(tmp_path), configs.Config()
    gone = refused("was at update ., and .*checkpoints has no checkpoint")
    with gone if is_gone else contextlib.nullcontext():
        check_trainable(tmp_path, config)
        assert last_step(tmp_path) == 2 * ("checkpoints/2/" in names)
    assert contents(tmp_path) == before


def test_a_run_killed_before_its_first_save_begins_again(tmp_path: Path) -> None:
    """A validation is logged before the save that follows it has begun."""
    lines = (json.dumps(x) for x in VALIDATED)
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    with Checkpoints(tmp_path):
        check_trainable(tmp_path, configs.Config())
