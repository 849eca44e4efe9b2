"""Mesh-independent checks of arrays: checksums, and values that are not finite."""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import NamedSharding, PartitionSpec

from txl_jax.kernels.hash import STEP, murmur3

Checksum = tuple[str, tuple[int, ...], str]  # dtype, shape, 16 hexadecimal digits
Tree = Any  # a pytree of arrays, or of their `ShapeDtypeStruct`s
Leaf = Array | jax.ShapeDtypeStruct


def checksums(tree: Tree) -> dict[str, Checksum]:
    """Returns the checksum of each array of a pytree, by names like "params/a/b".

    They are computed on the arrays' devices, and depend neither on the sharding nor on
    the number of processes, all of which must make this call. Changing one
    number of up to 32 bits always changes its array's checksum; any other change is
    missed with a probability of about 2^-63.
    """
    leaves = dict(named_leaves(tree))
    words = _stacked(checksum_words, _replicated(tree))(list(leaves.values()))
    words_N2 = jax.device_get(words.addressable_data(0))
    return {
        name: (str(leaf.dtype), tuple(leaf.shape), "{:08x}{:08x}".format(*pair))
        for (name, leaf), pair in zip(leaves.items(), words_N2, strict=True)
    }


def first_nonfinite(tree: Tree) -> str:
    """Returns the name of the first array with a NaN or an infinity, or ""."""
    leaves = dict(named_leaves(tree))
    finite = _stacked(_is_finite, _replicated(tree))(list(leaves.values()))
    marks = zip(leaves, jax.device_get(finite), strict=True)
    return next((name for name, is_finite in marks if not is_finite), "")


def named_leaves(tree: Tree) -> list[tuple[str, Leaf]]:
    """Returns the leaves of a pytree with their names."""
    return [
        (jax.tree_util.keystr(path, simple=True, separator="/"), leaf)
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    ]


def checksum_words(x: Array) -> Array:
    """Returns the checksum of one array as two uint32.

    A nonlinear hash of each number's bits and index is summed modulo 2^32, once
    unweighted and once weighted by an odd function of the index. The order of a sum
    does not matter, so shards can be summed separately.
    """
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
    mixed = murmur3(bits + index * jnp.uint32(STEP))
    weighted = mixed * (2 * index + 1)
    return jnp.stack([jnp.sum(part, dtype=jnp.uint32) for part in (mixed, weighted)])


def _is_finite(x: Array) -> Array:
    return jnp.isfinite(x).all()


@functools.cache
def _stacked(
    function: Callable[[Array], Array], out_sharding: NamedSharding | None
) -> Callable[[list[Leaf]], Array]:
    """Returns a jitted function of arrays that stacks the results of `function`."""
    return jax.jit(
        lambda leaves: jnp.stack([function(leaf) for leaf in leaves]),
        out_shardings=out_sharding,
    )


def _replicated(tree: Tree) -> NamedSharding | None:
    """Returns a sharding that replicates a result over the mesh of the arrays."""
    for leaf in jax.tree.leaves(tree):
        if isinstance(sharding := getattr(leaf, "sharding", None), NamedSharding):
            return NamedSharding(sharding.mesh, PartitionSpec())
    return None
