"""The loss of an adaptive softmax (Grave et al. 2017), over tokens sorted by cluster.

Dims: B streams, L segment, T = B L tokens, D model, V vocabulary (V0 in the first
cluster), E embedding (E0, E1.. per cluster), G rare clusters.
"""

import functools
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array
from jax.sharding import PartitionSpec

from txl_jax.kernels.cluster import Cluster, Rows, Tokens
from txl_jax.kernels.sharded import AXES, over_streams, stream_mesh
from txl_jax.kernels.softmax import blockwise_nll


class Head(NamedTuple):
    """The parameters of the softmax over the vocabulary.

    tables, biases: one [V, E] and [V] for all clusters, or [Vi, Ei] and [Vi] for each.
    projs: [Ei, D] for each cluster, or None if there is no projection.
    cluster_table_GE, cluster_bias_G: the first softmax's rows for the other clusters.
    """

    tables: tuple[Array, ...]
    biases: tuple[Array, ...]
    projs: tuple[Array | None, ...]
    cluster_table_GE: Array | None = None
    cluster_bias_G: Array | None = None


def adaptive_nll(
    head: Head, hidden_BLD: Array, targets_BL: Array, cutoffs: tuple[int, ...]
) -> Array:
    """Returns -log p(target), nll_BL in nats; each cutoff starts a cluster.

    On a mesh each device scores its own streams. The tables' rows are sharded if all
    tables divide over the mesh axis of the vocabulary.
    """
    ends = (0, *cutoffs, sum(map(len, head.biases)))
    mesh, axis = stream_mesh(hidden_BLD), AXES["V"]
    parts = 1 if mesh is None else mesh.shape[axis]
    if parts == 1 or any(len(bias_V) % parts for bias_V in head.biases):
        axis = None
    rows = PartitionSpec(axis)
    specs: Any = Head(rows, rows, *[PartitionSpec()] * 3)  # type: ignore[arg-type]
    local = functools.partial(local_nll, ends=ends, axis=axis)
    return over_streams(local, specs)(head, hidden_BLD, targets_BL)


def local_nll(
    head: Head,
    hidden_BLD: Array,
    targets_BL: Array,
    ends: tuple[int, ...],
    axis: str | None,
) -> Array:
    """Returns nll_BL of one device's tokens; `ends` are the cluster boundaries."""
    hidden_TD = hidden_BLD.reshape(-1, hidden_BLD.shape[-1])
    target_T = targets_BL.reshape(-1)
    if len(ends) == 2:
        nll_T = sorted_nll(head, hidden_TD, target_T, None, ends, axis)
        return nll_T.reshape(targets_BL.shape)
    cutoffs = jnp.asarray(ends[1:-1])
    cluster_T = jnp.searchsorted(cutoffs, target_T, side="right")
    order_T = jnp.argsort(cluster_T, stable=True)
    cluster_T = cluster_T[order_T]
    nll_T = sorted_nll(
        head, hidden_TD[order_T], target_T[order_T], cluster_T, ends, axis
    )
    nll_T = jnp.zeros_like(nll_T).at[order_T].set(nll_T, unique_indices=True)
    return nll_T.reshape(targets_BL.shape)


def sorted_nll(
    head: Head,
    hidden_TD: Array,
    target_T: Array,
    cluster_T: Array | None,
    ends: tuple[int, ...],
    axis: str | None,
) -> Array:
    """Returns nll_T of tokens in the order of their targets' clusters, cluster_T."""

    def narrow(i: int) -> Array:
        proj_ED = head.projs[i]
        return hidden_TD if proj_ED is None else hidden_TD @ proj_ED.T

    V, T = ends[-1], len(target_T)
    tables, biases = head.tables, head.biases
    separate = len(tables) > 1
    first: Cluster = (Rows(0, 0, ends[1], 0),)
    if cluster_T is None:
        tokens = Tokens(narrow(0), target_T, 0, T)
        return blockwise_nll((first,), (tokens,), tables, biases, axis)

    # All tokens need the first softmax, which also predicts the cluster.
    assert head.cluster_table_GE is not None and head.cluster_bias_G is not None
    first += (Rows(len(tables), 0, len(ends) - 2, V, replicated=True),)
    tables, biases = (*tables, head.cluster_table_GE), (*biases, head.cluster_bias_G)
    choice_T = jnp.where(cluster_T > 0, V + cluster_T - 1, target_T)
    clusters, tokens_of = [first], [Tokens(narrow(0), choice_T, 0, T)]
    begin_G = jnp.searchsorted(cluster_T, jnp.arange(len(ends)))
    for i in range(1, len(ends) - 1):
        low, high = ends[i : i + 2]
        rows = Rows(i, 0, high - low, low) if separate else Rows(0, low, high, 0)
        clusters.append((rows,))
        size = begin_G[i + 1] - begin_G[i]
        tokens_of.append(Tokens(narrow(i), target_T, begin_G[i], size))
    return blockwise_nll(tuple(clusters), tuple(tokens_of), tables, biases, axis)
