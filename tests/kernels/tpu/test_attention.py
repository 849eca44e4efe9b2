"""The TPU kernels, run by Pallas' interpreter, agree with the einsum kernel.

Dims: B streams, L queries, M memory, K = M + L keys, R = K distances, H heads, A head.
"""

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from tests.reference import Array
from tests.support import tiny
from tests.support.tiny import BFLOAT16, FLOAT32, assert_close
from txl_jax.errors import UserError
from txl_jax.kernels import xla
from txl_jax.kernels.hash import Dropout
from txl_jax.kernels.tpu import attention
from txl_jax.kernels.tpu.blocks import Blocks

NAMES = ("q_BLHA", "k_BKHA", "v_BKHA", "r_RHA", "u_HA", "w_HA")
SEED = 0xC0FFEE11


def make_oldest(pattern: str, B: int, L: int, M: int) -> Array:
    """Returns oldest_BL as it comes from a model, or the most irregular there is."""
    rng = np.random.default_rng(1)
    query_L = np.arange(L)
    if pattern == "full":
        oldest_BL = np.zeros((B, L), int)
    elif pattern == "filling":  # memory of 0, 1, ... of B parts
        oldest_BL = np.repeat(M - M * np.arange(B)[:, None] // B, L, 1)
    elif pattern == "same_length":
        oldest_BL = np.repeat(query_L[None] + 1, B, 0) if M else np.zeros((B, L), int)
    elif pattern == "documents":  # one starts in the segment of each stream
        start_B1 = rng.integers(0, L, (B, 1))
        oldest_BL = np.where(query_L >= start_B1, M + start_B1, 0)
    else:
        oldest_BL = rng.integers(0, query_L + M + 1, (B, L))
    return oldest_BL.astype(np.int32)


def make_inputs(B: int, H: int, L: int, M: int, A: int, dtype: Any) -> list[Any]:
    rng = np.random.default_rng(0)
    K = M + L
    shapes = [(B, L, H, A), (B, K, H, A), (B, K, H, A), (K, H, A), (H, A), (H, A)]
    return [jnp.asarray(rng.normal(size=shape), dtype) for shape in shapes]


def gradients(kernel: Any, inputs: list[Any]) -> dict[str, Array]:
    """Returns the result, and the gradients of a random function of it."""

    def run(inputs: list[Any]) -> Any:
        o_BLHA, pull = jax.vjp(kernel, *inputs)
        rng = np.random.default_rng(2)
        do_BLHA = jnp.asarray(rng.normal(size=o_BLHA.shape), o_BLHA.dtype)
        return o_BLHA, *pull(do_BLHA)

    names = ("o_BLHA", *(f"gradient of {name}" for name in NAMES))
    results = tiny.jit(run)(inputs)
    return dict(zip(names, (np.asarray(x, np.float32) for x in results), strict=True))


def check(
    B: int,
    H: int,
    L: int,
    M: int,
    A: int,
    tile: int,
    columns: int = 128,
    pattern: str = "random",
    rate: float = 0.0,
    dtype: Any = jnp.float32,
    interpret: Any = True,
) -> None:
    """Compares result and gradients; the oracle computes in float32."""
    blocks = Blocks(L, M + L, tile, columns)
    oldest_BL = make_oldest(pattern, B, L, M)
    dropout = Dropout(rate, jnp.uint32(SEED), 3, 5) if rate else None
    inputs = make_inputs(B, H, L, M, A, dtype)
    shared: dict[str, Any] = {"oldest_BL": jnp.asarray(oldest_BL), "dropout": dropout}
    fused = functools.partial(
        attention.attend, blocks=blocks, interpret=interpret, **shared
    )
    oracle = functools.partial(xla.rel_attention, bias_HR=None, **shared)
    expected = gradients(oracle, [x.astype(jnp.float32) for x in inputs])
    tolerance = FLOAT32 if dtype == jnp.float32 else BFLOAT16
    assert_close(gradients(fused, inputs), expected, tolerance)


# B, H, L, M, A, tile, columns, pattern, rate
CASES = [
    (2, 2, 40, 50, 8, 16, 128, "random", 0.0),  # many tiles, padding everywhere
    (3, 2, 48, 64, 8, 16, 128, "documents", 0.25),
    (3, 1, 48, 32, 8, 16, 128, "filling", 0.0),
    (2, 1, 33, 31, 8, 32, 128, "same_length", 0.0),
    (1, 2, 20, 0, 5, 16, 128, "full", 0.5),  # no memory
    (2, 1, 1, 50, 8, 32, 128, "random", 0.0),  # one query
    (1, 1, 140, 130, 16, 144, 256, "random", 0.1),  # one tile, padded lanes, two strips
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_agrees_with_xla(case: tuple[Any, ...]) -> None:
    check(*case)


def test_agrees_with_xla_in_bfloat16() -> None:
    check(2, 1, 40, 50, 41, 32, rate=0.1, dtype=jnp.bfloat16)


def test_agrees_with_xla_in_the_memories_of_a_tpu() -> None:
    """Nothing is read before it is written, there or in what is overwritten."""
    check(1, 1, 40, 20, 8, 32, rate=0.2, interpret=pltpu.InterpretParams())


@pytest.mark.long
@pytest.mark.parametrize(
    "case",
    [
        (1, 2, 150, 150, 41, 304, 256, "random", 0.1),
        (1, 1, 256, 128, 16, 128, 128, "random", 0.1),  # no padding at all
    ],
    ids=str,
)
def test_agrees_with_xla_in_larger_tiles(case: tuple[Any, ...]) -> None:
    check(*case)


LENGTHS = [(5, 0), (3, 300), (16, 16), (130, 0), (100, 300), (300, 100), (150, 150)]
LENGTHS += [(256, 384), (512, 512), (17, 1000)]


PATTERNS = ["full", "filling", "same_length", "documents", "random"]


@pytest.mark.long
@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize(("L", "M"), LENGTHS)
def test_agrees_with_xla_widely(L: int, M: int, pattern: str) -> None:
    for tile in (128, 176):
        check(2, 2, L, M, 24, tile, 128, pattern, 0.1)


@pytest.mark.long
@pytest.mark.parametrize("rate", [0.0, 0.1])
@pytest.mark.parametrize(("L", "M"), LENGTHS)
def test_agrees_with_xla_widely_in_bfloat16(L: int, M: int, rate: float) -> None:
    columns = min(256, Blocks(L, M + L, 256, 128).query_width)
    check(2, 2, L, M, 64, 256, columns, "documents", rate, jnp.bfloat16)


@pytest.mark.long
@pytest.mark.parametrize("kind", ["TPU v4", "TPU v5e"])
@pytest.mark.parametrize(
    ("A", "L"), list(itertools.product((41, 64, 128), (150, 384, 768)))
)
def test_agrees_with_xla_in_chosen_blocks(kind: str, A: int, L: int) -> None:
    blocks = attention.choose(kind, L, 2 * L, A)
    check(1, 1, L, L, A, blocks.tile, blocks.columns, "random", 0.1)


def attend(
    inputs: list[Any], oldest_BL: Array, tile: int, dropout: Dropout | None = None
) -> Any:
    """Runs the kernels with tiles of a given size."""
    blocks = Blocks(inputs[0].shape[1], inputs[1].shape[1], tile, 128)
    more: dict[str, Any] = {"oldest_BL": jnp.asarray(oldest_BL), "dropout": dropout}
    return functools.partial(attention.attend, blocks=blocks, **more)(
        *inputs, interpret=True
    )


def test_tiles_out_of_sight_are_not_read() -> None:
    """Not even to be masked: what lies there cannot spoil anything."""
    B, L, M, tile = 2, 32, 64, 16
    inputs = make_inputs(B, 1, L, M, 8, jnp.float32)
    oldest_BL = np.full((B, L), 40, np.int32)  # sees tiles 2 and later of 6
    poisoned = list(inputs)
    for n in (1, 2):
        poisoned[n] = inputs[n].at[:, :32].set(jnp.nan)
    poisoned[3] = inputs[3].at[:16].set(jnp.nan)  # distances of 80 and more

    def kernel(*inputs: Any) -> Any:
        return attend(list(inputs), oldest_BL, tile)

    assert_close(gradients(kernel, poisoned), gradients(kernel, inputs))


def test_dropout_of_a_part_is_that_part_of_the_whole() -> None:
    """So streams and heads can be split over devices."""
    inputs = make_inputs(4, 3, 20, 10, 8, jnp.float32)
    oldest_BL = make_oldest("random", 4, 20, 10)

    def run(inputs: list[Any], oldest_BL: Array, *first: Any) -> Any:
        dropout = Dropout(0.3, jnp.uint32(SEED), *first)
        return attend(inputs, oldest_BL, 16, dropout)

    run = tiny.jit(run)
    whole = run(inputs, oldest_BL)
    q, k, v, r, u, w = inputs
    part = [x[2:, :, 1:] for x in (q, k, v)] + [r[:, 1:], u[1:], w[1:]]
    assert_close(run(part, oldest_BL[2:], 2, 1), whole[2:, :, 1:])


def test_a_query_that_sees_itself_alone_reads_its_value() -> None:
    inputs = make_inputs(2, 1, 1, 0, 8, jnp.float32)
    o_BLHA = tiny.jit(lambda x: attend(x, np.zeros((2, 1), np.int32), 16))(inputs)
    assert_close(o_BLHA, inputs[2])


def test_missing_biases_are_zeros() -> None:
    inputs = make_inputs(1, 2, 20, 10, 8, jnp.float32)
    oldest_BL = make_oldest("full", 1, 20, 10)
    o_BLHA = tiny.jit(lambda x: attend([*x, None, None], oldest_BL, 32))(inputs[:4])
    q, k, v, r, _, _ = inputs
    oldest = jnp.asarray(oldest_BL)
    expected = xla.rel_attention(q, k, v, r, None, None, None, oldest, None)
    assert_close(o_BLHA, expected)


def test_a_cpu_is_refused() -> None:
    q, k, v, r, u, w = make_inputs(1, 1, 4, 4, 8, jnp.float32)
    oldest_BL = jnp.zeros((1, 4), jnp.int32)
    with pytest.raises(UserError, match='TPU of v4 or later, not .cpu.*"chunked"'):
        attention.rel_attention(q, k, v, r, u, w, None, oldest_BL, None)


@pytest.mark.parametrize("missing", ["r_RHA", "bias_HR"])
def test_other_position_schemes_are_refused(
    missing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "device_kind", lambda: "TPU v5e")
    q, k, v, r, u, w = make_inputs(1, 1, 4, 4, 8, jnp.float32)
    bias_HR = jnp.zeros((1, 8)) if missing == "bias_HR" else None
    r_RHA = None if missing == "r_RHA" else r
    oldest_BL = jnp.zeros((1, 4), jnp.int32)
    with pytest.raises(UserError, match='model.kernel "xla" or "chunked"'):
        attention.rel_attention(q, k, v, r_RHA, u, w, bias_HR, oldest_BL, None)
