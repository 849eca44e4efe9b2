"""A checksum changes with every bit, and with nothing else."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from txl_jax.checkpoint.manifest import checksums
from txl_jax.sharding.mesh import AXES, make_mesh
from txl_jax.sharding.options import MeshConfig

pytestmark = pytest.mark.promise("Damage is noticed")

DTYPES = ["float32", "bfloat16", "float16", "int32", "int8", "uint8", "uint32"]


def draw(dtype: str, shape: tuple[int, ...] = (8, 8, 8)) -> np.ndarray:
    rng = np.random.default_rng(1)
    return np.asarray(rng.normal(scale=100, size=shape)).astype(jnp.dtype(dtype))


def checksum(x: Any) -> str:
    return checksums({"x": x})["x"][2]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "bool"])
def test_a_checksum_does_not_depend_on_the_mesh(dtype: str) -> None:
    x = draw(dtype)
    expected = checksum(x)
    for sizes in ((8, 1, 1), (2, 2, 2), (1, 4, 2)):
        mesh = make_mesh(MeshConfig(*sizes))
        for spec in ((), AXES[:3], ("fsdp", None, "model"), (None, "model"), (AXES,)):
            place = NamedSharding(mesh, PartitionSpec(*spec))
            assert checksum(jax.device_put(x, place)) == expected, (sizes, spec)


@pytest.mark.parametrize("dtype", [*DTYPES, "float64"])
def test_any_flipped_bit_changes_the_checksum(dtype: str) -> None:
    """The sign of zero, too."""
    x = draw(dtype, (3, 2))
    x[0, 0] = 0
    with jax.enable_x64(dtype == "float64"):
        seen = {checksum(x)}
        for bit in range(8 * x.nbytes):
            raw = bytearray(x.tobytes())
            raw[bit // 8] ^= 1 << bit % 8
            seen.add(checksum(np.frombuffer(bytes(raw), x.dtype).reshape(x.shape)))
    assert len(seen) == 1 + 8 * x.nbytes


def test_the_order_of_numbers_changes_the_checksum() -> None:
    x = draw("float32")
    others = [x[::-1], x[:, ::-1], np.roll(x, 1, 2), x.swapaxes(1, 2), np.zeros_like(x)]
    assert len({checksum(other) for other in [x, *others]}) == 6
    # Equal in a sum of bits weighted by the index.
    pair = np.array([2.0**31, 0, 0], np.float32)
    assert len({checksum(np.roll(pair, places)) for places in range(3)}) == 3
    result = checksums({"a": {"b": jnp.ones((2, 3), jnp.bfloat16)}})
    assert result["a/b"][:2] == ("bfloat16", (2, 3))
