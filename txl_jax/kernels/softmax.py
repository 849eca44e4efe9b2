"""The sums of a softmax over the vocabulary, plain or in tiles.

A small vocabulary is one product and a log-sum-exp. With clusters (Grave et al. 2017),
or for more scores than `PLAIN_SCORES`, scores exist only in tiles, until an online
softmax has summed them; the backward pass recomputes them.

With clusters, tokens are sorted by target, so those of a rare cluster are a range. Its
length is known only at run time and determines the number of blocks: shapes are static,
the cost follows the number of tokens in each cluster, and no token is dropped.

The rows of a table may be sharded over a mesh axis whose devices all have the same
tokens. Each device sums its own rows, and one reduction per cluster follows.

Dims: T tokens; V rows of a table; E features, which may differ between clusters; X
tokens and Y rows of a tile.
"""

import functools
import itertools
import math
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from txl_jax.kernels.product import float32_product
from txl_jax.kernels.sharded import device_memory, target_device
from txl_jax.kernels.xla import MASKED

# Without clusters, at most this many scores are stored, 16 MiB in float32.
PLAIN_SCORES = 1 << 22


class Table(NamedTuple):
    """Rows of the softmax's weights, and their biases."""

    weight_VE: Array
    bias_V: Array


class ClusterSums(NamedTuple):
    """For each token, a cluster's log-sum-exp, and the target's score or 0."""

    lse_T: Array
    score_T: Array


Tables = tuple[Table, ...]
Gradients = tuple[Array, Table]  # for the hidden states and the table of a cluster
Carry = TypeVar("Carry")  # of a loop


def cluster_sums(
    ends: tuple[int, ...],
    axis: str | None,
    hidden: tuple[Array, ...],
    target_T: Array,
    tables: Tables,
) -> list[ClusterSums]:
    """Returns the sums of each cluster, arbitrary for tokens without a target in it.

    The first cluster has sums for all tokens; their score_T is 0 if the target is rare.

    ends: the boundaries of the clusters. axis: the mesh axis over which the rows are
    sharded. hidden: h_TE for each cluster. target_T: sorted if there are clusters.
    tables: one for all clusters, or one for each.
    """
    if len(ends) == 2 and len(target_T) * len(tables[0].bias_V) <= PLAIN_SCORES:
        sums = [plain_sums(axis, hidden[0], target_T, tables[0])]
    else:
        sums = tiled_sums(ends, axis, hidden, target_T, tables)
    return sums if axis is None else [sum_devices(*each, axis) for each in sums]


def sum_devices(lse_T: Array, score_T: Array, axis: str) -> ClusterSums:
    """Returns the sums over the rows of all devices."""
    highest_T = jax.lax.pmax(jax.lax.stop_gradient(lse_T), axis)
    sum_T, score_T = jax.lax.psum((jnp.exp(lse_T - highest_T), score_T), axis)
    return ClusterSums(highest_T + jnp.log(sum_T), score_T)


def plain_sums(
    axis: str | None, h_TE: Array, target_T: Array, table: Table
) -> ClusterSums:
    """Returns the sums of a vocabulary without clusters."""
    score_TV = scores(h_TE.dtype, h_TE, table)
    target_V = first_target(0, axis, table) + jnp.arange(score_TV.shape[1])
    hit_TV = target_T[:, None] == target_V
    score_T = jnp.where(hit_TV, score_TV, 0).sum(axis=1)
    return ClusterSums(jax.nn.logsumexp(score_TV, axis=1), score_T)


def first_target(first: int, axis: str | None, table: Table) -> Array | int:
    """Returns the target of a table's first row on this device."""
    if axis is None:
        return first
    return first + len(table.bias_V) * jax.lax.axis_index(axis)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def scores(dtype: DTypeLike, h_TE: Array, table: Table) -> Array:
    """Returns h . w + b in float32, from a product of operands in `dtype`.

    The gradients are accumulated in float32.
    """
    weight_VE = table.weight_VE.astype(dtype)
    return float32_product("TE,VE->TV", h_TE.astype(dtype), weight_VE) + table.bias_V


def scores_backward(
    dtype: DTypeLike, saved: tuple[Array, Table], grad_TV: Array
) -> Gradients:
    """Returns the gradients of hidden states and table."""
    h_TE, table = saved
    short_TV = grad_TV.astype(dtype)
    grad_TE = float32_product("TV,VE->TE", short_TV, table.weight_VE.astype(dtype))
    grad_VE = float32_product("TV,TE->VE", short_TV, h_TE.astype(dtype))
    return grad_TE.astype(h_TE.dtype), Table(grad_VE, grad_TV.sum(axis=0))


scores.defvjp(lambda *args: (scores(*args), args[1:]), scores_backward)


class Limits(NamedTuple):
    """The maximum number of scores and of rows in a tile.

    fixed: whether blocks for the expected number of tokens are always computed, so that
    no loop waits until the device has counted the tokens.
    """

    scores: int
    rows: int
    fixed: bool = False


# 4 MiB of float32 fit a CPU's cache.
CPU = Limits(1 << 20, 1 << 12)
# On accelerators each tile may transfer its rows and their gradient between the
# device's memory and the core, about 10 E bytes per row. With 1,024 tokens this is less
# than the traffic of the scores for E up to about 2,000.
ACCELERATOR = Limits(1 << 22, 1 << 12)
# The scores of a tile on a GPU take at most 1 GiB, or 1/32 of a smaller memory. On one
# H200, small tiles in loops whose length only the device knew took a third of an
# update of wt103_nvidia, and copied their condition to the host 1,042 times.
GPU_SCORES, GPU_PART, GPU_ROWS = 1 << 28, 32, 1 << 18
# Tile sizes are multiples of this number if the limits allow.
MULTIPLE = 8
# Rare clusters have blocks for this many times the tokens that Zipf's law expects,
# about twice the actual number: in WikiText-2, the words after the 10,000 most frequent
# ones are 7.1 % of the tokens; the law says 10.8 %.
SPARE = 1.25
# Unless their number is fixed, the expected tokens fill this many blocks or more, and
# fewer tokens fill fewer blocks.
RARE_BLOCKS = 4


def device_limits() -> Limits:
    """Returns the limits for the device of the running trace."""
    platform = target_device().platform
    if platform != "gpu":
        return CPU if platform == "cpu" else ACCELERATOR
    # A power of two, so that all processes compile one program.
    most = device_memory() // (4 * GPU_PART) or GPU_SCORES
    most = min(1 << (most.bit_length() - 1), GPU_SCORES)
    return Limits(most, GPU_ROWS, fixed=True)


def zipf(V: int, cutoffs: tuple[int, ...]) -> list[float]:
    """Returns the share of all tokens in each cluster, by Zipf's law: p ~ 1 / rank.

    Ids are ranks, the most frequent first, so a share is a sum of reciprocals, here the
    difference of two logarithms.
    """
    ends = [math.log(end + 0.5) for end in (0, *cutoffs, V)]
    total = ends[-1] - ends[0]
    return [(high - low) / total for low, high in itertools.pairwise(ends)]


def tile_sizes(ends: tuple[int, ...], i: int, T: int, V: int) -> tuple[int, int, int]:
    """Returns X and Y of cluster i, and how many blocks of tokens are always computed.

    T: all tokens, of any cluster; V: the most rows of the cluster on one device.
    """
    limits = device_limits()
    Y = equal_parts(V, limits.rows)
    tokens, most = T, max(limits.scores // Y, 1)
    if i:
        share = zipf(ends[-1], ends[1:-1])[i]
        tokens = min(math.ceil(SPARE * share * T / MULTIPLE) * MULTIPLE, T)
        if not limits.fixed:
            most = min(-(-tokens // RARE_BLOCKS), most)
    X = equal_parts(tokens, most)
    return X, Y, -(-tokens // X) if limits.fixed else 0


def equal_parts(size: int, most: int) -> int:
    """Returns the size of the fewest parts of at most `most`, rounded to MULTIPLE."""
    part = -(-size // -(-size // most))
    return min(size, most, -(-part // MULTIPLE) * MULTIPLE)


class Tile(NamedTuple):
    """A block of a cluster's tokens, by a block of its rows.

    A block that would end after the last token or row starts earlier. new_X is false
    for tokens of an earlier block or of another cluster; target_Y is -1 for such rows.
    """

    token: Array  # the index of the first token
    new_X: Array
    row: Array  # the index of the first row
    rows: Table
    target_Y: Array


def over_tiles(
    i: int,
    ends: tuple[int, ...],
    axis: str | None,
    target_T: Array,
    tables: Tables,
    visit: Callable[[Carry, Tile], Carry],
    carry: Carry,
) -> Carry:
    """Folds `visit` over the tiles of cluster i."""
    low, high = ends[i : i + 2]
    table, first = (tables[i], low) if len(tables) > 1 else (tables[0], 0)
    origin = first_target(first, axis, table)  # the target of the table's row 0
    T, V = len(target_T), len(table.bias_V)
    own_rows = min(high - low, V)
    X, Y, fixed_blocks = tile_sizes(ends, i, T, own_rows)
    start: Array | int = 0
    end: Array | int = T
    if i:
        start, end = ((target_T < n).sum() for n in (low, high))

    def visit_rows(row_block: Array, carry: Carry) -> Carry:
        begin = jnp.maximum(low - origin, 0) + row_block * Y
        row, new_Y = place(begin, high - origin, Y, V)
        target_Y = jnp.where(new_Y, origin + row + jnp.arange(Y), -1)
        rows = Table(*(part(x, row, Y) for x in table))

        def visit_tokens(token_block: Array, carry: Carry) -> Carry:
            token, new_X = place(start + token_block * X, end, X, T)
            return visit(carry, Tile(token, new_X, row, rows, target_Y))

        if fixed_blocks:  # up to 4 without a loop
            unroll = min(fixed_blocks, 4)
            carry = jax.lax.fori_loop(
                0, fixed_blocks, visit_tokens, carry, unroll=unroll
            )
            if not i:  # they hold all tokens
                return carry
        # After fixed blocks, usually no token is left.
        blocks = (end - start + X - 1) // X
        return jax.lax.fori_loop(fixed_blocks, blocks, visit_tokens, carry)

    return jax.lax.fori_loop(0, -(-own_rows // Y), visit_rows, carry)


def place(
    begin: Array, end: Array | int, size: int, length: int
) -> tuple[Array, Array]:
    """Returns the start of a block in an array, and which elements are in begin..end.

    The start is `begin`, or earlier if the block would exceed the array's length.
    """
    start = jnp.clip(begin, 0, length - size)
    index = start + jnp.arange(size)
    return start, (index >= begin) & (index < end)


class Stats(NamedTuple):
    """Per token: the highest score, the sum relative to it, and the target's score."""

    highest_T: Array
    sum_T: Array
    score_T: Array


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def tiled_sums(
    ends: tuple[int, ...],
    axis: str | None,
    hidden: tuple[Array, ...],
    target_T: Array,
    tables: Tables,
) -> list[ClusterSums]:
    """Returns the sums of each cluster: see `cluster_sums`."""

    def add(h_TE: Array, stats: Stats, tile: Tile) -> Stats:
        def of_tile(x_T: Array) -> Array:
            return part(x_T, tile.token, len(tile.new_X))

        h_XE, target_X = of_tile(h_TE), of_tile(target_T)
        before_X, sum_X, score_X = map(of_tile, stats)
        score_XY = scores(h_TE.dtype, h_XE, tile.rows)
        score_XY = jnp.where(tile.target_Y < 0, MASKED, score_XY)
        highest_X = jnp.maximum(before_X, score_XY.max(axis=1))
        sum_X *= jnp.exp(before_X - highest_X)
        sum_X += jnp.exp(score_XY - highest_X[:, None]).sum(axis=1)
        hit_XY = target_X[:, None] == tile.target_Y
        score_X += jnp.where(hit_XY, score_XY, 0).sum(axis=1)

        def update(x_T: Array, x_X: Array) -> Array:
            old_X = part(x_T, tile.token, len(x_X))
            return put(x_T, jnp.where(tile.new_X, x_X, old_X), tile.token)

        return Stats(*map(update, stats, (highest_X, sum_X, score_X)))

    result = []
    for i, h_TE in enumerate(hidden):
        # The sum starts at 1, so that its logarithm is finite for the tokens of other
        # clusters; a token's first scores scale this 1 to 0.
        zero_T = jnp.zeros(len(target_T))
        stats = Stats(zero_T + MASKED, zero_T + 1, zero_T)
        visit = functools.partial(add, h_TE)
        stats = over_tiles(i, ends, axis, target_T, tables, visit, stats)
        lse_T = stats.highest_T + jnp.log(stats.sum_T)
        result.append(ClusterSums(lse_T, stats.score_T))
    return result


def forward(*args: Any) -> tuple[list[ClusterSums], tuple[Any, ...]]:
    """Returns the sums and the residuals."""
    sums = tiled_sums(*args)
    return sums, (*args[2:], sums)


def backward(
    ends: tuple[int, ...], axis: str | None, saved: Any, grads: list[ClusterSums]
) -> tuple[tuple[Array, ...], None, Tables]:
    """Returns the gradients of hidden states and tables, accumulated in float32."""
    hidden, target_T, tables, sums = saved

    def add(tokens: tuple[Array, ...], carry: Gradients, tile: Tile) -> Gradients:
        h_XE, target_X, lse_X, grad_lse_X, grad_score_X = (
            part(x, tile.token, len(tile.new_X)) for x in tokens
        )
        score = functools.partial(scores, h_XE.dtype)
        score_XY, pull = jax.vjp(score, h_XE.astype(jnp.float32), tile.rows)
        grad_XY = jnp.exp(score_XY - lse_X[:, None]) * grad_lse_X[:, None]
        hit_XY = target_X[:, None] == tile.target_Y
        grad_XY += jnp.where(hit_XY, grad_score_X[:, None], 0)
        real_XY = tile.new_X[:, None] & (tile.target_Y >= 0)
        more_XE, more = pull(jnp.where(real_XY, grad_XY, 0))

        def increase(x: Array, more: Array, start: Array) -> Array:
            return put(x, part(x, start, len(more)) + more, start)

        grad_TE, grad_table = carry
        rows = tile.row, tile.row
        grad_table = Table(*map(increase, grad_table, more, rows))
        return increase(grad_TE, more_XE, tile.token), grad_table

    grad_hidden = []
    grad_tables = [jax.tree.map(jnp.zeros_like, table) for table in tables]
    for i, h_TE in enumerate(hidden):
        table = min(i, len(tables) - 1)
        visit = functools.partial(add, (h_TE, target_T, sums[i].lse_T, *grads[i]))
        carry = jnp.zeros(h_TE.shape), grad_tables[table]
        carry = over_tiles(i, ends, axis, target_T, tables, visit, carry)
        grad_TE, grad_tables[table] = carry
        grad_hidden.append(grad_TE.astype(h_TE.dtype))
    return tuple(grad_hidden), None, tuple(grad_tables)


tiled_sums.defvjp(forward, backward)


def part(x: Array, start: Array, size: int) -> Array:
    """Returns x[start : start + size]."""
    return jax.lax.dynamic_slice_in_dim(x, start, size)


def put(x: Array, values: Array, start: Array) -> Array:
    """Returns x with its elements from `start` replaced."""
    return jax.lax.dynamic_update_slice_in_dim(x, values, start, axis=0)
