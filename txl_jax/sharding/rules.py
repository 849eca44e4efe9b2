"""The table that maps dimensions to axes of the mesh, and the resulting shardings.

Dims: as in the glossary of `txl_jax`; a letter that RULES does not name is replicated.
"""

import math
from collections.abc import Iterable
from typing import Any

import flax.linen as nn
import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from txl_jax.errors import UserError

Tree = Any  # a pytree of arrays, or of their shapes, letters or shardings

# Streams are split over data and fsdp, parameters over fsdp (a group's devices together
# hold one copy) and, within a layer, over model.
STREAMS = ("data", "fsdp")
RULES: tuple[tuple[str, str | tuple[str, ...]], ...] = (
    ("B", STREAMS),
    ("D", "fsdp"),
    ("E", "fsdp"),  # unless D has taken it
    ("H", "model"),
    ("F", "model"),
    ("V", "model"),
)


def sharding(mesh: Mesh, letters: Iterable[str | None]) -> NamedSharding:
    """Returns the sharding of an array whose dimensions are `letters`.

    A mesh axis splits at most one dimension: the first that RULES maps to it.
    """
    return NamedSharding(mesh, mesh_axes(PartitionSpec(*letters)))


def mesh_axes(specs: Tree, streams: tuple[str, ...] = STREAMS) -> Tree:
    """Maps a pytree of PartitionSpecs from letters to axes of the mesh.

    `streams` are the axes that split B.
    """
    rules = [("B", streams or None), *RULES[1:]]
    return jax.tree.map(
        lambda spec: nn.logical_to_mesh_axes(tuple(spec), rules) or PartitionSpec(),
        specs,
        is_leaf=lambda spec: isinstance(spec, PartitionSpec),
    )


def shardings(mesh: Mesh, specs: Tree) -> Tree:
    """Returns the shardings of a pytree of PartitionSpecs of letters."""
    return jax.tree.map(
        lambda spec: sharding(mesh, spec),
        specs,
        is_leaf=lambda spec: isinstance(spec, PartitionSpec),
    )


def abstract(arrays: Tree, shardings: Tree) -> Tree:
    """Returns the shapes, dtypes and shardings of arrays, as `ShapeDtypeStruct`s."""
    return jax.tree.map(
        lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
        arrays,
        shardings,
    )


def letters(tree: Tree) -> Tree:
    """Returns each array's dimensions, the letters after "_" in its field's name."""

    def spec(path: jax.tree_util.KeyPath, _: object) -> PartitionSpec:
        names = [key.name for key in path if hasattr(key, "name")]
        return PartitionSpec(*names[-1].partition("_")[2])

    return jax.tree_util.tree_map_with_path(spec, tree)


def shards(mesh: Mesh | AbstractMesh, letter: str) -> int:
    """Returns the number of shards into which RULES splits a dimension."""
    axes = dict(RULES)[letter]
    axes = (axes,) if isinstance(axes, str) else axes
    return math.prod(mesh.shape[axis] for axis in axes)


def place_segments(mesh: Mesh, segments: Tree) -> Tree:
    """Moves host arrays [S, B, ..] of this process's streams to the mesh."""
    # With several processes, jax treats this as an implicit transfer.
    with jax.transfer_guard_host_to_device("allow"):
        return jax.tree.map(
            lambda x: jax.make_array_from_process_local_data(
                sharding(mesh, "SBL"[: x.ndim]), x
            ),
            segments,
        )


def check_streams(mesh: Mesh | AbstractMesh, batch_size: int, field: str) -> None:
    """Raises UserError, naming the config's field, if streams do not divide."""
    parts = shards(mesh, "B")
    if batch_size % parts:
        raise UserError(
            f"{field} = {batch_size} is not divisible by mesh.data x mesh.fsdp = "
            f"{parts} shards: make it a multiple of {parts}, or raise mesh.model"
        )


def host_rows(mesh: Mesh, batch_size: int, field: str) -> np.ndarray:
    """Returns the indices of the streams that this process reads, in rising order.

    They need not be contiguous: neighbours in the mesh are neighbours on the chips'
    torus, and the chips of a TPU host may be far apart in the mesh. Raises UserError,
    naming the config's `field`, if the streams do not divide over the mesh.
    """
    check_streams(mesh, batch_size, field)
    places = sharding(mesh, "B").addressable_devices_indices_map((batch_size,))
    ranges = {place[0].indices(batch_size)[:2] for place in places.values() if place}
    return np.concatenate([np.arange(*each) for each in sorted(ranges)])
