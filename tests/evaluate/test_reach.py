"""The formula of the dependency length is exact: every bit of an output is compared."""

from pathlib import Path
from typing import Any

import pytest

from tests import tiny
from txl_jax.errors import UserError
from txl_jax.evaluate.reach import farthest, make_changes, measured, plot, reach

pytestmark = pytest.mark.usefixtures("quick_compiler")

N = 3


@pytest.mark.parametrize(
    "tgt_len, mem_len, more",
    [
        (4, 4, {}),
        (3, 5, {}),  # a memory of no whole number of segments
        (5, 2, {}),  # a memory shorter than a segment
        (4, 3, {"same_length": True}),
    ],
    ids=str,
)
def test_the_formula_is_exact(
    tgt_len: int, mem_len: int, more: dict[str, Any], tmp_path: Path
) -> None:
    config = tiny.config(n_layer=N, mem_len=mem_len, **more)
    change_NT = reach(config, tgt_len)
    formula = [farthest(config, tgt_len, n) for n in range(1, N + 1)]
    assert change_NT.shape[1] > formula[-1] + tgt_len
    assert measured(change_NT) == formula
    # Everything nearer is seen as well.
    for change_T, distance in zip(change_NT, formula, strict=True):
        assert (change_T[: distance + 1] > 0).all()
        assert (change_T[distance + 1 :] == 0).all()
    plot(change_NT, config, tgt_len, tmp_path / "reach.png")
    assert (tmp_path / "reach.png").read_bytes().startswith(b"\x89PNG")


def test_the_papers_numbers() -> None:
    # 24 layers of segments and memories of 512 reach 12,288 tokens before the segment.
    config = tiny.config(n_layer=24, mem_len=512)
    assert farthest(config, 512) == 24 * 512 + 511
    assert farthest(config, 1) == 24 * 512
    assert farthest(tiny.config(n_layer=24, mem_len=0), 512) == 511
    assert farthest(tiny.config(n_layer=3, mem_len=8, same_length=True), 4) == 3 * 7
    own = {"same_length": True, "same_length_self": True}
    assert farthest(tiny.config(n_layer=3, mem_len=8, **own), 4) == 3 * 8


def test_without_a_memory_it_is_the_segment() -> None:
    with pytest.raises(UserError, match="is its segment"):
        make_changes(tiny.config(mem_len=0), 4)
