"""The chunked kernel agrees with the einsum kernel, without arrays of L x K.

Dims: blocks of X queries, tiles of Y keys.
"""

import functools
import itertools
import math
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.kernels.cases import (
    OLDEST,
    POSITION,
    Case,
    assert_agree,
    cast,
    check,
    differentiate,
    pack,
)
from tests.support import tiny
from tests.support.tiny import assert_close
from txl_jax.kernels import chunked, xla

SMALL = (4, 8)


def kernel(blocks: tuple[int, int] | None = SMALL) -> Callable[..., jax.Array]:
    return functools.partial(chunked.rel_attention, blocks=blocks)


CASES: list[tuple[Case, tuple[int, int]]] = [
    (Case(7, 8, "filling", 0.3), SMALL),  # one short of a block
    (Case(9, 8, "random", absent=("bias_HR", "u_HA")), SMALL),  # one over
    (Case(1, 16, "empty", 0.3, absent=POSITION), SMALL),
    (Case(9, 12, "documents", 0.3, absent=("r_RHA", "w_HA")), (1, 1)),
    (Case(36, 40, "staircase"), (8, 16)),
]


@pytest.mark.parametrize(("case", "blocks"), CASES, ids=str)
def test_value_and_gradients(case: Case, blocks: tuple[int, int]) -> None:
    check(kernel(blocks), case)


SIZES = [(4, 4), (7, 8), (8, 8), (9, 8), (8, 0), (5, 12), (1, 0), (1, 16), (3, 30)]


@pytest.mark.long
@pytest.mark.parametrize(("L", "M"), SIZES)
def test_value_and_gradients_on_a_wide_grid(L: int, M: int) -> None:
    blocks = [(4, 8), (1, 1), (3, 3), (2, 16), (9, 9), (9, 21)]
    for oldest, (X, Y) in itertools.product(OLDEST, blocks):
        if X <= L and Y <= M + L:
            check(kernel((X, Y)), Case(L, M, oldest, 0.3))


def test_bfloat16() -> None:
    # Gradients of biases are sums over 2048 queries, too many for bfloat16.
    check(kernel(None), Case(256, 256, B=8), jnp.bfloat16, tiny.BFLOAT16 / 2)


def test_larger_scores_in_older_tiles_do_not_overflow() -> None:
    inputs = Case(9, 13).inputs()
    inputs["k_BKHA"] *= 100 * np.linspace(2, 0, 22, dtype=np.float32)[:, None, None]
    o_BLHA, expected = (
        jax.jit(each)(pack(inputs)) for each in (kernel(), xla.rel_attention)
    )
    assert_close(o_BLHA, expected)


def test_hidden_tiles_are_not_computed() -> None:
    """NaN in tiles of the future, or older than `oldest`, has no effect."""
    inputs = Case(8, 24, "same_length").inputs()
    inputs["oldest_BL"] = np.maximum(inputs["oldest_BL"], 16)
    spoiled = jax.tree.map(np.copy, inputs)
    for name in ("k_BKHA", "v_BKHA"):
        spoiled[name][:, :12] = np.nan
    expected = differentiate(xla.rel_attention, inputs)
    assert_agree(differentiate(kernel(), spoiled), expected)


def greatest_array(compiled: Any) -> int:
    """Returns the number of elements of the largest array in a compiled program."""
    shapes = re.findall(r"\w\[([\d,]+)\]", compiled.as_text())
    return max(math.prod(map(int, shape.split(","))) for shape in shapes)


def test_no_array_is_as_large_as_queries_by_keys() -> None:
    L, K = 2048, 4096
    case = Case(L, K - L, rate=0.3, B=1, H=1)
    inputs = jax.eval_shape(lambda: cast(case.inputs(), jnp.float32))

    def compiled(kernel: Callable[..., jax.Array]) -> Any:
        def loss(inputs: dict[str, Any]) -> jax.Array:
            return jnp.sum(kernel(pack(inputs, case.dropout)) ** 2)

        grad = jax.grad(loss, allow_int=True)
        return jax.jit(grad).lower(inputs).compile()

    assert greatest_array(compiled(xla.rel_attention)) >= L * K
    program = compiled(chunked.rel_attention)
    assert greatest_array(program) < L * K / 8
    assert program.memory_analysis().temp_size_in_bytes < 4 * L * K
