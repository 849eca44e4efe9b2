"""No gradient passes from a segment into the one before (section 3.2, equation 2).

Dims: B streams, L segment.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support import tiny
from txl_jax.model.memory import Memory
from txl_jax.model.txl import TransformerXL

B, L = 2, 4
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
def gradients() -> dict[str, Any]:
    """The gradients of the tests, compiled as one program."""

    def through(params: Any) -> jax.Array:
        return nll(params, after_first(params), L)[0]

    def second(params: Any, memory: Memory) -> jax.Array:
        return nll(params, memory, L)[0]

    def compute(params: Any) -> dict[str, Any]:
        filled = after_first(params)
        by_params, by_memory = jax.grad(second, (0, 1), allow_int=True)(params, filled)
        kept = jax.grad(lambda params: jnp.sum(after_first(params).h_NBMD))(params)
        return {
            "constant": by_params,
            "read": by_memory.h_NBMD,
            "kept": kept,
            "through": jax.grad(through)(params),
        }

    result: dict[str, Any] = tiny.jit(compute)(tiny.make_params())
    return result


@pytest.mark.parametrize("name", ["read", "kept"])
def test_no_gradient_reaches_or_leaves_the_memory(
    gradients: dict[str, Any], name: str
) -> None:
    for gradient in jax.tree.leaves(gradients[name]):
        assert not np.asarray(gradient).any()


def test_gradients_are_those_of_a_constant_memory(gradients: dict[str, Any]) -> None:
    expected = gradients["constant"]
    assert all(np.asarray(gradient).any() for gradient in jax.tree.leaves(expected))
    tiny.assert_close(gradients["through"], expected)
