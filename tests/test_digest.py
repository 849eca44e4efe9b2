"""A digest changes with any bit, and with nothing else.

Dims: none.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from txl_jax.digest import digests
from txl_jax.sharding import AXES, MeshConfig, make_mesh

DTYPES = ["float32", "bfloat16", "float16", "int32", "int8", "uint8", "uint32", "bool"]


def draw(dtype: str, shape: tuple[int, ...] = (8, 8, 8)) -> np.ndarray:
    rng = np.random.default_rng(1)
    return np.asarray(rng.normal(scale=100, size=shape)).astype(jnp.dtype(dtype))


def digest(x: Any) -> str:
    return digests({"x": x})["x"][2]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "bool"])
def test_a_digest_is_the_same_on_every_mesh(dtype: str) -> None:
    x = draw(dtype)
    expected = digest(x)
    for sizes in ((8, 1, 1), (2, 2, 2), (1, 4, 2)):
        mesh = make_mesh(MeshConfig(*sizes))
        for spec in ((), AXES, ("fsdp", None, "model"), (None, "model"), (AXES,)):
            place = NamedSharding(mesh, PartitionSpec(*spec))
            assert digest(jax.device_put(x, place)) == expected, (sizes, spec)


@pytest.mark.parametrize("dtype", [name for name in DTYPES if name != "bool"])
def test_every_bit_counts(dtype: str) -> None:
    x = draw(dtype, (3, 2))
    seen = {digest(x)}
    for bit in range(8 * x.nbytes):
        raw = bytearray(x.tobytes())
        raw[bit // 8] ^= 1 << bit % 8
        seen.add(digest(np.frombuffer(bytes(raw), x.dtype).reshape(x.shape)))
    assert len(seen) == 1 + 8 * x.nbytes


def test_the_place_of_a_number_counts() -> None:
    x = draw("float32")
    others = [x[::-1], x[:, ::-1], np.roll(x, 1, 2), x.swapaxes(1, 2), np.zeros_like(x)]
    assert len({digest(other) for other in [x, *others]}) == 6
    # What a plain weighted sum of bits would take for the same.
    pair = np.array([2.0**31, 0, 0], np.float32)
    assert len({digest(np.roll(pair, places)) for places in range(3)}) == 3


def test_numbers_that_are_equal_but_not_the_same_bits_differ() -> None:
    assert digest(np.zeros(1)) != digest(-np.zeros(1))


def test_names_dtypes_shapes_and_keys_are_told() -> None:
    key = jax.random.key(3)
    found = digests({"a": {"b": jnp.ones((2, 3), jnp.bfloat16)}, "k": key})
    assert set(found) == {"a/b", "k"}
    assert found["a/b"][:2] == ("bfloat16", (2, 3))
    assert found["k"][:2] == ("key<fry>", ())
    assert found["k"][2] == digest(jax.random.key_data(key))
    assert found["k"][2] != digest(jax.random.key_data(jax.random.key(4)))


def test_a_wide_number_is_several_words() -> None:
    with jax.enable_x64(True):
        x = draw("float64", (5,))
        seen = {digest(x)}
        for byte in range(x.nbytes):
            raw = bytearray(x.tobytes())
            raw[byte] ^= 1
            seen.add(digest(np.frombuffer(bytes(raw), x.dtype)))
        assert len(seen) == 1 + x.nbytes
