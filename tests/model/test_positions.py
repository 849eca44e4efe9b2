"""R is the sinusoid of the distance, from the farthest to the nearest."""

import jax.numpy as jnp
import numpy as np
import pytest

from tests import reference
from tests.tiny import assert_close
from txl_jax.model.positions import distance_R, sinusoid_RD

# An angle of 4,096 radians has a spacing of 4.9e-4 in float32.
LONG = 5e-4


@pytest.mark.parametrize("clamp_len", [0, 1, 5, 100])
@pytest.mark.parametrize(("R", "D"), [(1, 2), (12, 8), (64, 6)])
def test_rows_are_the_reference_in_falling_distance(
    R: int, D: int, clamp_len: int
) -> None:
    expected = [reference.position_encoding(p, D, clamp_len) for p in range(R)]
    R_RD = sinusoid_RD(distance_R(R, clamp_len), D)
    assert_close(R_RD, np.stack(expected[::-1]))


def test_distances_beyond_256_stay_apart() -> None:
    """They would not in bfloat16, whatever the dtype of the computation."""
    R_RD = sinusoid_RD(distance_R(4097, 0), 16)
    assert R_RD.dtype == jnp.float32
    expected = [reference.position_encoding(p, 16, 0) for p in range(4097)]
    assert_close(R_RD, np.stack(expected[::-1]), LONG)


def test_clamped_distances_count_as_clamp_len() -> None:
    R_RD = np.asarray(sinusoid_RD(distance_R(10, 4), 8))
    np.testing.assert_array_equal(R_RD[:6], np.stack([R_RD[5]] * 6))
    assert (R_RD[5:-1] != R_RD[6:]).any(axis=1).all()
