"""Positions beyond the limits of floating point or of a learned table.

`test_txl` compares all schemes with the reference.
"""

import jax.numpy as jnp
import numpy as np
import pytest

from tests import reference
from tests.support import tiny
from tests.support.tiny import assert_close
from txl_jax.model.positions import encode_distances

# An angle of 4,096 radians has a spacing of 4.9e-4 in float32.
LONG = 5e-4


@pytest.mark.parametrize("clamp_len", [0, 300])
def test_bfloat16_distinguishes_distances_beyond_256(clamp_len: int) -> None:
    """Encodings are float32 for every dtype: bfloat16 could not distinguish them."""
    config = tiny.config(d_model=16, dtype="bfloat16", clamp_len=clamp_len)
    R_RD = encode_distances(config, 4097)
    assert R_RD.dtype == jnp.float32
    rows = range((clamp_len or 4096) + 1)
    expected = [reference.position_encoding(row, 16, 0) for row in rows]
    assert_close(R_RD, np.stack(expected[::-1]), LONG)
