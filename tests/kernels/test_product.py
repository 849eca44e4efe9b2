"""Products and their gradients agree with float64, whatever form they take."""

import contextlib
import functools
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, AxisType

import txl_jax
from tests.reference import Array
from tests.support import tiny
from txl_jax.kernels.product import float32_product, product
from txl_jax.kernels.sharded import over_streams
from txl_jax.sharding.mesh import AXES, make_mesh
from txl_jax.sharding.options import MeshConfig
from txl_jax.sharding.rules import sharding

DTYPES = pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
# Each letter has a size of its own, so that no transposed result has the right shape.
SIZES = {letter: 3 + i for i, letter in enumerate("ABCDEFHIJKLMNOPRTVXYZ")}
CALL = re.compile(r'(?<![\w.])(?:float32_)?product\(\s*"([A-Z,]+->[A-Z]+)"')
FEED_FORWARD = ["BLD,DF->BLF", "BLF,FD->BLD", "BLF,DF->BLD", "BLD,DC->BLC"]


def find_products() -> list[str]:
    """Returns the subscripts of all products in the package."""
    files = Path(txl_jax.__file__).parent.rglob("*.py")
    found = {x for path in files for x in CALL.findall(path.read_text("utf-8"))}
    assert len(found) > 20
    return sorted({*found, *FEED_FORWARD})


def make_arrays(subscripts: str, dtype: str, scale: int = 1) -> list[Array]:
    """Returns both operands and a gradient of the result, exact in the dtype."""
    rng = np.random.default_rng(0)
    shapes = [[scale * SIZES[c] for c in x] for x in re.split(",|->", subscripts)]
    return [np.asarray(rng.normal(size=shape), jnp.dtype(dtype)) for shape in shapes]


def differentiate(
    multiply: Callable[[Array, Array], jax.Array], x: Array, y: Array, grad: Array
) -> tuple[jax.Array, ...]:
    """Returns the result and the gradients of both operands."""
    result, pull = jax.vjp(multiply, x, y)
    return result, *pull(jnp.asarray(grad).astype(result.dtype))


def check(
    subscripts: str, arrays: Sequence[Array], actual: tuple[jax.Array, ...]
) -> None:
    """Compares a result of `differentiate` with float64."""
    dtype = arrays[0].dtype
    x, y, grad = (np.asarray(array, np.float64) for array in arrays)
    a, b, out = re.split(",|->", subscripts)
    expected = (
        np.einsum(subscripts, x, y),
        np.einsum(f"{out},{b}->{a}", grad, y),
        np.einsum(f"{out},{a}->{b}", grad, x),
    )
    assert [array.dtype for array in actual[1:]] == [dtype, dtype]
    tolerance = tiny.FLOAT32 if dtype == np.float32 else tiny.BFLOAT16
    for one, other in zip(actual, expected, strict=True):
        tiny.assert_close(np.asarray(one, np.float64), other, tolerance)


@pytest.mark.parametrize("subscripts", find_products())
@pytest.mark.parametrize(
    "dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.exact_bits)]
)
def test_products_and_gradients_agree_with_float64(subscripts: str, dtype: str) -> None:
    def run(*arrays: Array) -> list[tuple[jax.Array, ...]]:
        functions = (
            functools.partial(x, subscripts) for x in (product, float32_product)
        )
        return [differentiate(multiply, *arrays) for multiply in functions]

    arrays = make_arrays(subscripts, dtype)
    rounded, exact = jax.jit(run)(*arrays)
    assert (rounded[0].dtype, exact[0].dtype) == (dtype, jnp.float32)
    check(subscripts, arrays, rounded)
    check(subscripts, arrays, exact)


def on(kind: str, platform: str, count: int = 1) -> Any:
    """Returns a context of devices that are not attached."""
    device, axes = AbstractDevice(kind, None, platform), (AxisType.Auto,) * 3
    mesh = AbstractMesh((count, 1, 1), AXES, axis_types=axes, abstract_device=device)
    return jax.sharding.use_abstract_mesh(mesh)


@pytest.mark.parametrize(
    ("dtype", "rows", "context"),
    [
        ("bfloat16", 2, contextlib.nullcontext()),
        ("bfloat16", 1, contextlib.nullcontext()),
        ("float32", 2, contextlib.nullcontext()),
        ("bfloat16", 2, on("NVIDIA H100", "gpu")),
        ("bfloat16", 2, on("TPU v5p", "tpu")),
    ],
    ids=["matrix", "vector", "float32", "gpu", "tpu"],
)
def test_only_bfloat16_matrices_on_a_cpu_have_another_form(
    dtype: str, rows: int, context: Any
) -> None:
    def traced(multiply: Callable[..., jax.Array], **options: Any) -> str:
        def run(x: jax.Array, y: jax.Array) -> jax.Array:
            return multiply("BLD,HAD->BLHA", x, y, **options)

        x, y = jnp.ones((rows, 1, 8), dtype), jnp.ones((2, 4, 8), dtype)
        return str(jax.make_jaxpr(run)(x, y))

    with context:
        is_plain = traced(product) == traced(jnp.einsum)
        into_float32 = traced(jnp.einsum, preferred_element_type=jnp.float32)
        assert (traced(float32_product) == into_float32) == is_plain
    is_fast = dtype == "bfloat16" and rows == 2
    assert is_plain != (is_fast and isinstance(context, contextlib.nullcontext))


@DTYPES
@pytest.mark.parametrize("subscripts", ["BLD,HAD->BLHA", "HBLA,HZA->HBLZ"])
def test_vmap_and_checkpoint_agree_with_float64(subscripts: str, dtype: str) -> None:
    arrays = make_arrays(subscripts, dtype)
    multiply = jax.checkpoint(functools.partial(product, subscripts))
    run = jax.jit(jax.vmap(functools.partial(differentiate, multiply), (0, None, 0)))
    x, y, grad = arrays
    results = run(np.stack([x, -x]), y, np.stack([grad, -grad]))
    check(subscripts, arrays, tuple(array[0] for array in results))


@pytest.mark.exact_bits
@pytest.mark.parametrize("subscripts", find_products())
def test_products_on_several_devices_agree_with_float64(subscripts: str) -> None:
    """In bfloat16, of which XLA:CPU lacks some products."""
    mesh = make_mesh(MeshConfig(data=2, fsdp=2, model=2))
    arrays = make_arrays(subscripts, "bfloat16", scale=4)
    names = re.split(",|->", subscripts)
    placed = [
        jax.device_put(*each)
        for each in zip(arrays, (sharding(mesh, x) for x in names), strict=True)
    ]

    @jax.jit
    def run(*placed: Any) -> list[tuple[jax.Array, ...]]:
        functions = (
            functools.partial(x, subscripts) for x in (product, float32_product)
        )
        return [differentiate(multiply, *placed) for multiply in functions]

    for actual in run(*placed):
        check(subscripts, arrays, actual)


@DTYPES
@pytest.mark.parametrize("subscripts", ["BLD,HAD->BLHA", "HBLA,HBKA->HBLK"])
def test_products_on_several_devices_stay_split(subscripts: str, dtype: str) -> None:
    mesh = make_mesh(MeshConfig(data=2, fsdp=2, model=2))
    *places, place = (sharding(mesh, x) for x in re.split(",|->", subscripts))
    arrays = make_arrays(subscripts, dtype, scale=4)[:2]
    placed = [jax.device_put(*each) for each in zip(arrays, places, strict=True)]
    result = jax.jit(functools.partial(product, subscripts))(*placed)
    assert result.sharding.is_equivalent_to(place, result.ndim)


@DTYPES
def test_products_within_a_shard_agree_with_float64(dtype: str) -> None:
    """Each device multiplies its own streams: nothing is left to split."""
    mesh = make_mesh(MeshConfig(data=2, fsdp=2, model=2))
    arrays = make_arrays("BLD,HAD->BLHA", dtype, scale=4)

    def local(y: jax.Array, x: jax.Array) -> jax.Array:
        return product("BLD,HAD->BLHA", x, y)

    def multiply(x: Any, y: Any) -> jax.Array:
        return over_streams(local, y, x)

    run = jax.jit(functools.partial(differentiate, multiply))
    actual = run(*(jax.device_put(x, sharding(mesh, "B")) for x in arrays))
    check("BLD,HAD->BLHA", arrays, actual)
