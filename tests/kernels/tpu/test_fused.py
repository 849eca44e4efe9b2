"""The TPU kernels, run by Pallas' interpreter, agree with the einsum kernel."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic import tpu_info
from jax._src.pallas.mosaic.interpret import interpret_pallas_call
from jax.experimental.pallas import tpu as pltpu

from tests.kernels.cases import (
    OLDEST,
    POSITION,
    Case,
    assert_agree,
    check,
    differentiate,
    pack,
)
from txl_jax.errors import UserError
from txl_jax.kernels import xla
from txl_jax.kernels.tpu import fused
from txl_jax.kernels.tpu.blocks import make_blocks
from txl_jax.kernels.tpu.scores import LOG2E, dot


def case(
    *sizes: int, oldest: str = "random", rate: float = 0.0, absent: Any = ("bias_HR",)
) -> Case:
    """Returns a case of B, H, L, M and A, with the paper's position terms."""
    B, H, L, M, A = sizes
    return Case(L, M, oldest, rate, absent, B, H, A)


ALIBI = ("r_RHA", "u_HA", "w_HA")


def kernel(
    case: Case, tile: int, columns: int = 128, interpret: Any = True
) -> Callable[..., jax.Array]:
    """Returns the kernel in tiles of a given size, run by an interpreter."""
    blocks = make_blocks(case.L, case.M + case.L, tile, columns)
    return functools.partial(fused.rel_attention, blocks=blocks, interpret=interpret)


# Cases, with the sizes of tiles and strips.
CASES = [
    # Many tiles, padding everywhere.
    (case(2, 2, 33, 47, 8, oldest="documents", rate=0.25), 16, 128),
    # Segments in parallel, whose boundaries are inside tiles.
    (case(2, 1, 36, 40, 8, oldest="staircase"), 16, 128),
    # One query, no biases.
    (Case(1, 50, "filling", absent=("u_HA", "w_HA", "bias_HR")), 32, 128),
    # One tile, padded lanes, two strips.
    (case(1, 1, 140, 130, 16, rate=0.1), 144, 256),
    # No position terms, as with rotary positions.
    (case(2, 1, 33, 47, 8, oldest="documents", rate=0.25, absent=POSITION), 16, 128),
    (case(2, 2, 20, 40, 8, oldest="filling", absent=ALIBI), 32, 128),
    # Both kinds of terms by distance.
    (case(1, 2, 33, 20, 41, oldest="documents", absent=()), 16, 128),
]


@pytest.mark.parametrize(("case", "tile", "columns"), CASES, ids=str)
def test_agrees_with_xla(case: Case, tile: int, columns: int) -> None:
    check(kernel(case, tile, columns), case)


SHORT = case(2, 1, 40, 20, 41, rate=0.1)


@pytest.mark.parametrize(
    "absent",
    [
        ("bias_HR",),
        pytest.param(POSITION, marks=pytest.mark.long),
        pytest.param(ALIBI, marks=pytest.mark.long),
    ],
    ids=str,
)
def test_agrees_with_xla_in_bfloat16(absent: Any) -> None:
    check(kernel(SHORT, 32), SHORT._replace(absent=absent), jnp.bfloat16)


def test_agrees_with_xla_in_simulated_tpu_memory() -> None:
    """No memory is read before it is written."""
    small = case(1, 1, 18, 12, 8, rate=0.2)
    check(kernel(small, 16, interpret=pltpu.InterpretParams()), small)


GRID = [(*each, jnp.float32) for each in CASES] + [(SHORT, 32, 128, jnp.bfloat16)]


@pytest.mark.long
@pytest.mark.parametrize("bounds", ["logical", "padded"])
@pytest.mark.parametrize(("case", "tile", "columns", "dtype"), GRID, ids=str)
def test_two_cores_do_not_race(
    case: Case, tile: int, columns: int, dtype: Any, bounds: Any, monkeypatch: Any
) -> None:
    """Nothing outside a buffer is used: that would raise, or padding would be NaN."""
    for name, value in (("device_kind", "TPU v5p"), ("num_device_cores", 2)):
        monkeypatch.setattr(tpu_info, f"get_{name}", lambda value=value: value)
    params = pltpu.InterpretParams(
        detect_races=True, num_cores_or_threads=2, random_seed=3, buffer_bounds=bounds
    )
    check(kernel(case, tile, columns, params), case, dtype)
    races = interpret_pallas_call.races
    assert races and not races.races_found


SIZES = [(5, 0), (3, 300), (16, 16), (130, 0), (100, 300), (300, 100), (150, 150)]
SIZES += [(256, 384), (512, 512), (17, 1000)]


@pytest.mark.long
@pytest.mark.parametrize("oldest", OLDEST)
@pytest.mark.parametrize(("L", "M"), SIZES)
def test_agrees_with_xla_on_a_wide_grid(L: int, M: int, oldest: str) -> None:
    wide = case(2, 2, L, M, 24, oldest=oldest, rate=0.1)
    for tile in (128, 176):
        check(kernel(wide, tile), wide)


@pytest.mark.long
@pytest.mark.parametrize("kind", ["TPU v5p", "TPU v5e"])
@pytest.mark.parametrize("L", [150, 384, 768])
@pytest.mark.parametrize("A", [41, 64, 128])
def test_agrees_with_xla_for_chosen_tiles(kind: str, A: int, L: int) -> None:
    blocks = fused.choose(kind, L, 2 * L, A)
    wide = case(1, 1, L, L, A, rate=0.1)
    for dtype in (jnp.float32, jnp.bfloat16):
        check(kernel(wide, blocks.tile, blocks.columns), wide, dtype)


def test_bfloat16_holds_a_bias_exactly() -> None:
    """ALiBi's largest biases have more digits than one bfloat16 number."""
    bias_HR = -(jnp.arange(8191, -1, -1) / jnp.array([[2.0], [3.0]]))
    make = jax.jit(fused.by_distance, static_argnums=(2, 3))
    sum_HR = np.asarray(make(None, bias_HR, 64, jnp.bfloat16), np.float64).sum(1)
    np.testing.assert_allclose(sum_HR, bias_HR * LOG2E / 8, rtol=1e-6)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_products_ignore_the_default_precision(dtype: str) -> None:
    """The TPU compiler refuses bfloat16 products of the precision "highest"."""
    a_XA = jnp.ones((2, 3), dtype)
    stated = {}
    for default in (None, "highest"):
        with jax.default_matmul_precision(default):
            (product,) = jax.make_jaxpr(lambda a: dot(a, a, "XA,YA"))(a_XA).eqns
        stated[default] = product.params["precision"]
    assert stated["highest"] == stated[None] is not None


def test_hidden_tiles_are_not_read() -> None:
    """NaN in hidden tiles has no effect."""
    hidden = case(1, 1, 32, 64, 8)
    inputs = hidden.inputs()
    inputs["oldest_BL"][:] = 40  # sees tiles 2 and later of 6
    spoiled = jax.tree.map(np.copy, inputs)
    for name in ("k_BKHA", "v_BKHA"):
        spoiled[name][:, :32] = np.nan
    spoiled["r_RHA"][:16] = np.nan  # distances of 80 and more
    expected = differentiate(xla.rel_attention, inputs)
    assert_agree(differentiate(kernel(hidden, 16), spoiled), expected)


def test_other_devices_are_refused() -> None:
    with pytest.raises(UserError, match='TPU of v5e or later, not .cpu.*"chunked"'):
        fused.rel_attention(pack(Case(4, 4).inputs()))
