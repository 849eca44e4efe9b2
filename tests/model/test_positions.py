"""Sinusoids and learned tables, by distance from the farthest, or by place."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import reference
from tests.support import tiny
from tests.support.tiny import assert_close
from txl_jax.errors import UserError
from txl_jax.model.config import POSITIONS
from txl_jax.model.memory import Memory
from txl_jax.model.positions import SCHEMES, encode_distances, learned_rows
from txl_jax.model.txl import TransformerXL

# An angle of 4,096 radians has a spacing of 4.9e-4 in float32.
LONG = 5e-4


@pytest.mark.parametrize("clamp_len", [0, 1, 5, 100])
@pytest.mark.parametrize(("R", "D"), [(1, 2), (12, 8), (64, 6)])
def test_rows_are_the_reference_in_falling_distance_to_clamp_len(
    R: int, D: int, clamp_len: int
) -> None:
    R_RD = encode_distances(tiny.config(d_model=D, clamp_len=clamp_len), R)
    farthest = min(R - 1, clamp_len) if clamp_len else R - 1
    expected = [reference.position_encoding(p, D, 0) for p in range(farthest + 1)]
    assert_close(R_RD, np.stack(expected[::-1]))


def test_distances_beyond_256_stay_apart() -> None:
    """They would not in bfloat16, whatever the dtype of the computation."""
    R_RD = encode_distances(tiny.config(d_model=16, dtype="bfloat16"), 4097)
    assert R_RD.dtype == jnp.float32
    expected = [reference.position_encoding(p, 16, 0) for p in range(4097)]
    assert_close(R_RD, np.stack(expected[::-1]), LONG)


def test_every_scheme_of_the_config_is_here() -> None:
    assert set(SCHEMES) == set(POSITIONS)


@pytest.mark.parametrize(
    ("P", "clamp_len", "rows"), [(4, 0, 4), (8, 0, 6), (8, 2, 3), (2, 5, 2)]
)
def test_learned_distances_are_the_last_rows(P: int, clamp_len: int, rows: int) -> None:
    config = tiny.config(position="shaw", n_position=P, clamp_len=clamp_len)
    assert learned_rows(config, 6) == rows


def test_a_segment_longer_than_its_places_is_refused() -> None:
    config = tiny.config(position="learned", n_position=4, mem_len=0)
    tokens_BL = np.zeros((1, 5), np.int32)
    with pytest.raises(UserError, match=r"5 tokens .* model.n_position = 4"):
        TransformerXL(config).init(
            jax.random.key(0), tokens_BL, Memory.empty(config, 1)
        )
