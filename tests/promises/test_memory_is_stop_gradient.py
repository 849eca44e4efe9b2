"""No gradient passes from a segment into the one before (section 3.2, equation 2).

Dims: B streams, L segment.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.reference import Array
from tests.support import tiny
from txl_jax.model.memory import Memory
from txl_jax.model.txl import TransformerXL

B, L = 2, 4
PARAMS = tiny.make_params()
MODEL = TransformerXL(tiny.CONFIG)
TOKENS_BT = tiny.make_tokens(B, 2 * L + 1)


def nll(params: Any, memory: Memory, begin: int) -> tuple[jax.Array, Any]:
    """Returns the summed nll of the segment that begins there, and the memory."""
    inputs_BL = TOKENS_BT[:, begin : begin + L]
    targets_BL = TOKENS_BT[:, begin + 1 : begin + L + 1]
    nll_BL, after = MODEL.apply(
        {"params": params}, inputs_BL, targets_BL, memory, method="nll"
    )
    return jnp.sum(nll_BL), after


def after_first(params: Any) -> Memory:
    """Returns the memory that the second segment reads."""
    return nll(params, Memory.empty(tiny.CONFIG, B), 0)[1]


@pytest.fixture(scope="module")
def filled() -> Any:
    """The memory after the first segment, as a constant."""
    return tiny.jit(after_first)(PARAMS)


def test_no_gradient_reaches_the_memory_that_is_read(filled: Any) -> None:
    def second(h_NBMD: Array) -> jax.Array:
        return nll(PARAMS, filled.replace(h_NBMD=h_NBMD), L)[0]

    assert not np.asarray(tiny.jit(jax.grad(second))(filled.h_NBMD)).any()


def test_no_gradient_leaves_the_memory_that_is_kept() -> None:
    gradients = tiny.jit(jax.grad(lambda params: jnp.sum(after_first(params).h_NBMD)))
    for gradient in jax.tree.leaves(gradients(PARAMS)):
        assert not np.asarray(gradient).any()


def test_gradients_are_those_of_a_constant_memory(filled: Any) -> None:
    def through(params: Any) -> jax.Array:
        return nll(params, after_first(params), L)[0]

    def alone(params: Any) -> jax.Array:
        return nll(params, filled, L)[0]

    expected = tiny.jit(jax.grad(alone))(PARAMS)
    assert all(np.asarray(gradient).any() for gradient in jax.tree.leaves(expected))
    tiny.assert_close(tiny.jit(jax.grad(through))(PARAMS), expected)
