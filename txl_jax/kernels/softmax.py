"""The loss of an adaptive softmax (Grave et al. 2017), exact, without stored logits.

A block's scores exist only until an online softmax has summed them; the backward pass
recomputes them. `cluster` cuts tokens and rows into blocks.

The rows of a table may be sharded over a mesh axis whose devices all have the same
tokens. Each device sums its own rows, and one reduction per cluster follows.

Dims: T = B L tokens; V rows, V0 of the first cluster; X tokens and Y rows of a block;
E0, E1.. per cluster.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import PartitionSpec

from txl_jax.kernels.cluster import (
    Cluster,
    Members,
    RowBlock,
    Rows,
    Table,
    expected_share,
    make_cluster,
    over_rows,
    part,
    put,
    visit_tokens,
)
from txl_jax.kernels.product import float32_product, product
from txl_jax.kernels.sharded import AXES, REPLICATED, over_streams, stream_mesh
from txl_jax.kernels.xla import MASKED

Grads = tuple[Array, Array, Array]  # for hidden states, and for a block of a table
# Tokens and tables, and each cluster's log-sum-exp of its tokens.
Saved = tuple[tuple[Members, ...], tuple[Table, ...], list[Array]]


class Stats(NamedTuple):
    """Per token: the highest score, the sum relative to it, and the target's score."""

    highest_T: Array
    sum_T: Array
    target_T: Array


def score(
    tokens: Members, first: Array, X: int, block: RowBlock
) -> tuple[Array, Array, Array]:
    """Returns h_XE, the scores in float32 and a mask of the targets' scores.

    The scores of repeated rows are masked.
    """
    h_XE = part(tokens.h_TE, first, X)
    score_XY = float32_product("XE,YE->XY", h_XE, block.weight_YE) + block.bias_Y
    target_X1 = part(tokens.target_T, first, X)[:, None]
    return h_XE, jnp.where(block.new_Y, score_XY, MASKED), target_X1 == block.target_Y


def add_rows(tokens: Members, cluster: Cluster, stats: Stats, block: RowBlock) -> Stats:
    """Adds the scores against a block of rows to the statistics of a cluster's tokens.

    The last block may include tokens of the next cluster; their results are discarded.
    """

    X = cluster.X

    def visit(stats: Stats, first: Array, _: Array) -> Stats:
        _, score_XY, hit_XY = score(tokens, first, X, block)
        before = Stats(*(part(x_T, first, X) for x_T in stats))
        highest_X = jnp.maximum(before.highest_T, score_XY.max(axis=1))
        sum_X = before.sum_T * jnp.exp(before.highest_T - highest_X)
        sum_X += jnp.exp(score_XY - highest_X[:, None]).sum(axis=1)
        target_X = before.target_T + jnp.where(hit_XY, score_XY, 0).sum(axis=1)
        after = Stats(highest_X, sum_X, target_X)
        return jax.tree.map(lambda x_T, x: put(x_T, x, first), stats, after)

    return visit_tokens(tokens, cluster, visit, stats)


def add_gradients(
    tokens: Members,
    cluster: Cluster,
    lse_T: Array,
    grad_T: Array,
    grads: tuple[Array, Table],
    block: RowBlock,
) -> tuple[Array, Table]:
    """Adds the gradients through a block of rows: (softmax - target) times grad_T.

    grads: gradients of a cluster's hidden states and of a table, in float32.
    """
    X = cluster.X

    def visit(carry: Grads, first: Array, real_X: Array) -> Grads:
        grad_h_TE, grad_YE, grad_Y = carry
        h_XE, score_XY, hit_XY = score(tokens, first, X, block)
        p_XY = jnp.exp(score_XY - part(lse_T, first, X)[:, None])
        grad_X1 = part(grad_T, first, X)[:, None]
        grad_XY = jnp.where(real_X[:, None], (p_XY - hit_XY) * grad_X1, 0)
        grad_Y += grad_XY.sum(axis=0)
        grad_XY = grad_XY.astype(h_XE.dtype)
        grad_XE = float32_product("XY,YE->XE", grad_XY, block.weight_YE)
        grad_YE += float32_product("XY,XE->YE", grad_XY, h_XE)
        grad_XE += part(grad_h_TE, first, X)
        return put(grad_h_TE, grad_XE, first), grad_YE, grad_Y

    grad_h_TE, grad_table = grads
    Y, E = block.weight_YE.shape
    carry = grad_h_TE, jnp.zeros((Y, E)), jnp.zeros(Y)
    grad_h_TE, *more = visit_tokens(tokens, cluster, visit, carry)

    def add(x: Array, more: Array) -> Array:
        return put(x, part(x, block.start, Y) + more, block.start)

    return grad_h_TE, Table(*map(add, grad_table, more))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 3))
def blockwise_nll(
    clusters: tuple[Cluster, ...],
    tokens: tuple[Members, ...],
    tables: tuple[Table, ...],
    axis: str | None = None,
) -> Array:
    """Returns the sum over clusters of -log softmax(target), nll_T in nats.

    Each cluster adds to its own tokens. `clusters` refer to rows of the tables.
    axis: the mesh axis over which the rows are sharded, if the call is inside a
    shard_map.
    """
    return forward(clusters, tokens, tables, axis)[0]


def forward(
    clusters: tuple[Cluster, ...],
    tokens: tuple[Members, ...],
    tables: tuple[Table, ...],
    axis: str | None,
) -> tuple[Array, Saved]:
    """Returns nll_T and the residuals, with each cluster's log-sum-exp of tokens."""
    # The last block may end after the last token. Its start is known only at run time,
    # unless the cluster has all tokens.
    real, dtype = len(tokens[0].target_T), tokens[0].h_TE.dtype
    padding = max(
        -real % cluster.X if cluster.all_tokens else cluster.X * max(cluster.fixed, 1)
        for cluster in clusters
    )
    tokens = tuple(
        own._replace(
            h_TE=jnp.pad(own.h_TE, ((0, padding), (0, 0))),
            target_T=jnp.pad(own.target_T, (0, padding)),
        )
        for own in tokens
    )
    T = real + padding
    nll_T, lses = jnp.zeros(T), []
    for cluster, own in zip(clusters, tokens, strict=True):
        stats = Stats(jnp.full(T, MASKED), jnp.zeros(T), jnp.zeros(T))
        visit = functools.partial(add_rows, own, cluster)
        for rows in cluster.rows:
            stats = over_rows(tables, rows, cluster, dtype, axis, visit, stats)
        if axis is not None:
            highest_T = jax.lax.pmax(stats.highest_T, axis)
            sum_T = stats.sum_T * jnp.exp(stats.highest_T - highest_T)
            sums = jax.lax.psum((sum_T, stats.target_T), axis)
            stats = Stats(highest_T, *sums)
        lses.append(stats.highest_T + jnp.log(stats.sum_T))
        token_T = jnp.arange(T)
        inside_T = (own.start <= token_T) & (token_T < own.start + own.size)
        nll_T += jnp.where(inside_T, lses[-1] - stats.target_T, 0)
    return nll_T[:real], (tokens, tables, lses)


def backward(
    clusters: tuple[Cluster, ...], axis: str | None, saved: Saved, grad_T: Array
) -> tuple[tuple[Members, ...], tuple[Table, ...]]:
    """Returns the gradients of tokens and tables."""
    tokens, tables, lses = saved
    real, T, dtype = len(grad_T), len(tokens[0].target_T), tokens[0].h_TE.dtype
    if axis is not None:
        # shard_map divides a replicated result's gradient by the device count.
        grad_T = jax.lax.psum(grad_T, axis)
    grad_T = jnp.pad(grad_T, (0, T - real))
    grad_tables = [Table(*(jnp.zeros(x.shape) for x in table)) for table in tables]
    grad_tokens: list[Members] = []
    for cluster, own, lse_T in zip(clusters, tokens, lses, strict=True):
        grad_h_TE = jnp.zeros(own.h_TE.shape)
        visit = functools.partial(add_gradients, own, cluster, lse_T, grad_T)
        for rows in cluster.rows:
            carry = grad_h_TE, grad_tables[rows.table]
            carry = over_rows(tables, rows, cluster, dtype, axis, visit, carry)
            grad_h_TE, grad_tables[rows.table] = carry
        # Targets and ranges are integers and have no gradient.
        grad_tokens.append(Members(grad_h_TE[:real].astype(dtype), *[None] * 3))  # type: ignore[arg-type]
    return tuple(grad_tokens), tuple(grad_tables)


blockwise_nll.defvjp(forward, backward)


class Softmax(NamedTuple):
    """The parameters of the softmax over the vocabulary.

    tables: one for all clusters, or one for each.
    projs: [Ei, D] for each cluster, or None if there is no projection.
    clusters: the first softmax's rows for the other clusters.
    """

    tables: tuple[Table, ...]
    projs: tuple[Array | None, ...]
    clusters: Table | None = None


def adaptive_nll(
    params: Softmax, hidden_BLD: Array, targets_BL: Array, cutoffs: tuple[int, ...]
) -> Array:
    """Returns -log p(target), nll_BL in nats; each cutoff starts a cluster.

    On a mesh each device scores its own streams. The tables' rows are sharded if all
    tables divide over the mesh axis of the vocabulary.
    """
    sizes = [len(table.bias_V) for table in params.tables]
    mesh, axis = stream_mesh(hidden_BLD), AXES["V"]
    parts = 1 if mesh is None else mesh.shape[axis]
    if parts == 1 or any(size % parts for size in sizes):
        axis = None
    specs: Any = Softmax(PartitionSpec(axis), REPLICATED, REPLICATED)  # type: ignore[arg-type]
    ends = (0, *cutoffs, sum(sizes))
    local = functools.partial(local_nll, ends=ends, axis=axis)
    return over_streams(local, params, hidden_BLD, targets_BL, specs=specs)


def local_nll(
    params: Softmax,
    hidden_BLD: Array,
    targets_BL: Array,
    ends: tuple[int, ...],
    axis: str | None,
) -> Array:
    """Returns nll_BL of one device's tokens; `ends` are the cluster boundaries."""
    hidden_TD = hidden_BLD.reshape(-1, hidden_BLD.shape[-1])
    target_T = targets_BL.reshape(-1)
    V, T, tables = ends[-1], len(target_T), params.tables

    def narrow(i: int) -> Array:
        proj_ED = params.projs[i]
        return (
            hidden_TD if proj_ED is None else product("TD,ED->TE", hidden_TD, proj_ED)
        )

    first = Rows(0, 0, ends[1], 0)
    if params.clusters is None:
        cluster = make_cluster((first,), T)
        tokens = Members(narrow(0), target_T, 0, T)
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
    tokens_of = [Members(narrow(0), choice_T, 0, T)]
    begin_G = jnp.searchsorted(cluster_T, jnp.arange(len(ends)))
    for i in range(1, len(ends) - 1):
        low, high = ends[i : i + 2]
        own = Rows(i, 0, high - low, low) if len(tables) > 1 else Rows(0, low, high, 0)
        expected = expected_share(low, high, V)
        clusters.append(make_cluster((own,), T, expected))
        size = begin_G[i + 1] - begin_G[i]
        tokens_of.append(Members(narrow(i), target_T, begin_G[i], size))
    tables = (*tables, params.clusters)
    nll_T = blockwise_nll(tuple(clusters), tuple(tokens_of), tables, axis)
    nll_T = jnp.zeros_like(nll_T).at[order_T].set(nll_T, unique_indices=True)
    return nll_T.reshape(targets_BL.shape)
