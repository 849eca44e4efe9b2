"""The loss of an adaptive softmax (Grave et al. 2017), over tokens sorted by cluster.

Dims: T = B L tokens; V0 rows of the first cluster, E0, E1.. per cluster.
"""

import functools
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array
from jax.sharding import PartitionSpec

from txl_jax.kernels.cluster import Rows, Table, Tokens, expected_share, make_cluster
from txl_jax.kernels.sharded import AXES, REPLICATED, over_streams, stream_mesh
from txl_jax.kernels.softmax import blockwise_nll


class Head(NamedTuple):
    """The parameters of the softmax over the vocabulary.

    tables: one for all clusters, or one for each.
    projs: [Ei, D] for each cluster, or None if there is no projection.
    clusters: the first softmax's rows for the other clusters.
    """

    tables: tuple[Table, ...]
    projs: tuple[Array | None, ...]
    clusters: Table | None = None


def adaptive_nll(
    head: Head, hidden_BLD: Array, targets_BL: Array, cutoffs: tuple[int, ...]
) -> Array:
    """Returns -log p(target), nll_BL in nats; each cutoff starts a cluster.

    On a mesh each device scores its own streams. The tables' rows are sharded if all
    tables divide over the mesh axis of the vocabulary.
    """
    sizes = [len(table.bias_V) for table in head.tables]
    mesh, axis = stream_mesh(hidden_BLD), AXES["V"]
    parts = 1 if mesh is None else mesh.shape[axis]
    if parts == 1 or any(size % parts for size in sizes):
        axis = None
    specs: Any = Head(PartitionSpec(axis), REPLICATED, REPLICATED)  # type: ignore[arg-type]
    ends = (0, *cutoffs, sum(sizes))
    local = functools.partial(local_nll, ends=ends, axis=axis)
    return over_streams(local, head, hidden_BLD, targets_BL, specs=specs)


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
    V, T, tables = ends[-1], len(target_T), head.tables

    def narrow(i: int) -> Array:
        proj_ED = head.projs[i]
        return hidden_TD if proj_ED is None else hidden_TD @ proj_ED.T

    first = Rows(0, 0, ends[1], 0)
    if head.clusters is None:
        cluster = make_cluster((first,), T)
        tokens = Tokens(narrow(0), target_T, 0, T)
        nll_T = blockwise_nll((cluster,), (tokens,), tables, axis)
        return nll_T.reshape(targets_BL.shape)

    cluster_T = jnp.searchsorted(jnp.asarray(ends[1:-1]), target_T, side="right")
    order_T = jnp.argsort(cluster_T, stable=True)
    hidden_TD, target_T, cluster_T = (
        x[order_T] for x in (hidden_TD, target_T, cluster_T)
    )
    # All tokens need the first softmax, which also predicts the cluster.
    rare = Rows(len(tables), 0, len(ends) - 2, V, replicated=True)
    choice_T = jnp.where(cluster_T > 0, V + cluster_T - 1, target_T)
    clusters = [make_cluster((first, rare), T)]
    tokens_of = [Tokens(narrow(0), choice_T, 0, T)]
    begin_G = jnp.searchsorted(cluster_T, jnp.arange(len(ends)))
    for i in range(1, len(ends) - 1):
        low, high = ends[i : i + 2]
        own = Rows(i, 0, high - low, low) if len(tables) > 1 else Rows(0, low, high, 0)
        expected = expected_share(low, high, V)
        clusters.append(make_cluster((own,), T, expected))
        size = begin_G[i + 1] - begin_G[i]
        tokens_of.append(Tokens(narrow(i), target_T, begin_G[i], size))
    tables = (*tables, head.clusters)
    nll_T = blockwise_nll(tuple(clusters), tuple(tokens_of), tables, axis)
    nll_T = jnp.zeros_like(nll_T).at[order_T].set(nll_T, unique_indices=True)
    return nll_T.reshape(targets_BL.shape)
