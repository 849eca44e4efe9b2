"""A run that is killed anywhere ends bit-identical to one that never was."""

from pathlib import Path

import jax
import pytest

from tests.faults import kills

pytestmark = pytest.mark.promise("Resume is exact")


@pytest.mark.long
def test_a_kill(tmp_path: Path) -> None:
    compiled = jax.config.values["jax_compilation_cache_dir"]
    assert kills.torture(tmp_path, 1, seed=1, compiled=compiled)["kills"] == 1


@pytest.mark.long
def test_forty_kills(tmp_path: Path) -> None:
    assert kills.torture(tmp_path, 40, seed=2)["kills"] == 40
