"""What an array's bits add up to: the same on any mesh, another once a bit is.

Dims: none; an array has any shape.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import NamedSharding, PartitionSpec

from txl_jax.kernels.xla import STEP, mix

# What describes an array: its dtype, its shape, and 16 hexadecimal digits.
Digest = tuple[str, tuple[int, ...], str]


def digests(tree: Any) -> dict[str, Digest]:
    """Returns the digest of each array of a pytree, by names as in "params/a/b".

    It is computed where the arrays are and depends on neither their sharding nor the
    number of processes, all of which must call this. A change of one number always
    changes it, any other change but for one in 2^64.
    """
    leaves = dict(named_leaves(tree))
    words = jax.device_get(_compiled(_replicated(tree))(leaves))
    return {
        name: (*form(leaf), f"{int(words[name][0]):08x}{int(words[name][1]):08x}")
        for name, leaf in leaves.items()
    }


def named_leaves(tree: Any) -> list[tuple[str, Any]]:
    """Returns the arrays of a pytree, or whatever else its leaves are, with names."""
    return [
        (jax.tree_util.keystr(path, simple=True, separator="/"), leaf)
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    ]


def form(leaf: Any) -> tuple[str, tuple[int, ...]]:
    """Returns the dtype and the shape of an array."""
    return str(leaf.dtype), tuple(leaf.shape)


def digest_words(x: Array) -> Array:
    """Returns the digest of one array as two uint32.

    Each number's bits are scrambled with its index, which is no linear function, and
    summed modulo 2^32: once as they are and once times an odd number of the index. A
    sum has no order, so that shards add up to the same.
    """
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    if x.dtype == jnp.bool_:
        bits = x.astype(jnp.uint32)
    else:
        width = min(x.dtype.itemsize, 4)  # wider numbers become several words
        word = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}[width]
        bits = jax.lax.bitcast_convert_type(x, word).astype(jnp.uint32)
    index = jnp.zeros(bits.shape, jnp.uint32)
    for axis in range(bits.ndim):
        stride = math.prod(bits.shape[axis + 1 :]) % 2**32
        along = jax.lax.broadcasted_iota(jnp.uint32, bits.shape, axis)
        index += along * jnp.uint32(stride)
    mixed = mix(bits + index * jnp.uint32(STEP))
    weighted = mixed * (2 * index + 1)
    return jnp.stack([jnp.sum(part, dtype=jnp.uint32) for part in (mixed, weighted)])


@functools.cache
def _compiled(place: NamedSharding | None) -> Any:
    def run(leaves: dict[str, Array]) -> dict[str, Array]:
        return {name: digest_words(leaf) for name, leaf in leaves.items()}

    return jax.jit(run, out_shardings=place)


def _replicated(tree: Any) -> NamedSharding | None:
    """Returns the sharding that gives every process the whole of a result."""
    for leaf in jax.tree.leaves(tree):
        if isinstance(place := getattr(leaf, "sharding", None), NamedSharding):
            return NamedSharding(place.mesh, PartitionSpec())
    return None
