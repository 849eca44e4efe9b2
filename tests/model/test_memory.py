"""The memory can be reset, and can start as visible zeros.

`test_txl` compares what it keeps and what queries see with the reference.
"""

from typing import Any

import jax.numpy as jnp
import numpy as np

from tests.reference import Array
from tests.support import tiny
from txl_jax.model.interval import start_call
from txl_jax.model.memory import Memory


def test_reset_hides_everything_in_some_streams() -> None:
    rng = np.random.default_rng(0)
    h_NBMD, h_NBLD = (
        jnp.asarray(rng.normal(size=(tiny.N, 3, size, tiny.D))) for size in (4, 2)
    )
    memory = Memory(h_NBMD, jnp.array([4, 3, 1]))
    after = memory.reset(jnp.array([False, True, False]))
    np.testing.assert_array_equal(after.filled_B, [4, 0, 1])
    np.testing.assert_array_equal(after.h_NBMD, memory.h_NBMD)
    # Only later tokens are visible.
    after, call = start_call(tiny.CONFIG, after, L=2)
    np.testing.assert_array_equal(after.append(h_NBLD, call).filled_B, [4, 2, 3])


def test_zeros_are_seen_from_the_start_and_from_a_document_on() -> None:
    """As in TensorFlow and Hugging Face: M keys of zero, which the softmax counts."""
    config = tiny.config(mem_len=3, initial_memory="zeros")
    params, tokens_BL = tiny.make_params(), tiny.make_tokens(2, 4)
    zeros, none_BL = Memory.empty(config, 2), np.zeros((2, 4), bool)
    np.testing.assert_array_equal(zeros.filled_B, [3, 3])

    def read(memory: Memory, first_BL: Array) -> Any:
        return tiny.apply(config, params, tokens_BL, memory, first_BL=first_BL)

    fresh_BLD, after = read(zeros, none_BL)
    np.testing.assert_array_equal(after.filled_B, [3, 3])
    going_on_BLD, _ = read(after, none_BL)
    first_BL = none_BL.copy()
    first_BL[1, 0] = True
    again_BLD, memory = read(after, first_BL)
    tiny.assert_close(again_BLD[1], fresh_BLD[1])
    tiny.assert_close(again_BLD[0], going_on_BLD[0])
    tiny.assert_close(memory.h_NBMD[:, 1], after.h_NBMD[:, 1])
    np.testing.assert_array_equal(memory.filled_B, [3, 3])
