"""The blocks in which a softmax scores clusters of tokens against rows of tables.

Tokens are sorted by cluster. The range of a cluster's tokens is known only at run time
and determines the number of blocks: shapes are static, the cost follows the number of
tokens in each cluster, and no token is dropped.

Dims: T tokens, E embedding, V rows of a table, X tokens of a block, Y rows of a block.
"""

import math
from collections.abc import Callable
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from txl_jax.kernels.sharded import device_memory, target_device

Carry = TypeVar("Carry")  # of a loop
Visit = Callable[[Carry, Array, Array], Carry]  # (carry, first, real_X) -> carry


class Largest(NamedTuple):
    """The maximum number of scores and of rows in a block.

    step: block sizes are multiples of this number if the limits allow.
    """

    scores: int
    rows: int
    step: int


class Limits(NamedTuple):
    """The limits for the cluster that contains all tokens, and for rare ones.

    fixed: whether blocks for the expected number of tokens are always computed, so that
    no loop waits until the device has counted the tokens.
    """

    common: Largest
    rare: Largest
    fixed: bool = False


# 8 MiB of float32 nearly fit a CPU's cache. A rare cluster has few tokens, so blocks of
# few tokens and many rows waste the least work.
CPU = Limits(Largest(1 << 21, 1 << 12, 8), Largest(1 << 20, 1 << 14, 8))
# On accelerators each block may transfer its rows and their gradient between the
# device's memory and the core, about 10 E bytes per row. With 1,024 tokens this is less
# than the traffic of the scores for E up to about 2,000. A rare cluster's few tokens
# would leave most of a block that large empty.
ACCELERATOR = Limits(Largest(1 << 22, 1 << 12, 128), Largest(1 << 20, 1 << 12, 128))
# The scores of a block on a GPU take 1 GiB, or 1/32 of a memory below 32 GiB. On one
# H200, small blocks in loops whose length only the device knew took a third of an
# update of wt103_nvidia, and copied their condition to the host 1,042 times.
GPU_SCORES, GPU_PART, GPU_ROWS = 1 << 28, 32, 1 << 18
# Fixed blocks hold this many times the tokens that Zipf's law expects in a cluster,
# about twice the actual number: in WikiText-2, the words after the 10,000 most frequent
# ones are 7.1 % of the tokens; the law says 11.5 %.
SPARE = 1.25


def device_limits() -> Limits:
    """Returns the limits for the device of the running trace."""
    platform = target_device().platform
    if platform != "gpu":
        return CPU if platform == "cpu" else ACCELERATOR
    # A power of two, so that all processes compile one program.
    most = device_memory() // (4 * GPU_PART) or GPU_SCORES
    largest = Largest(min(1 << (most.bit_length() - 1), GPU_SCORES), GPU_ROWS, 128)
    return Limits(largest, largest, fixed=True)


def expected_share(low: int, high: int, V: int) -> float:
    """Returns the share of tokens low <= token < high of V by Zipf's law.

    The frequency of the n-th most frequent token is proportional to 1 / n.
    """
    return math.log((high + 1) / (low + 1)) / math.log(V + 1)


def block_size(size: int, most: int, step: int) -> int:
    """Returns the block size for the fewest blocks of at most `most`, in steps."""
    equal = -(-size // -(-size // most))
    return min(size, most, -(-equal // step) * step)


class Table(NamedTuple):
    """Rows of the softmax's weights, and their biases."""

    weight_VE: Array
    bias_V: Array


class Rows(NamedTuple):
    """Rows low <= row < high of a table; row r is the target r + first.

    replicated: the table is not sharded; only the first device counts its rows.
    """

    table: int
    low: int
    high: int
    first: int
    replicated: bool = False


class Members(NamedTuple):
    """A cluster's tokens: `size` of the T tokens, from `start` on."""

    h_TE: Array
    target_T: Array
    start: Array | int
    size: Array | int


class Cluster(NamedTuple):
    """The rows of one softmax, and its blocks; X is the number of tokens in a block."""

    rows: tuple[Rows, ...]
    X: int
    largest: Largest
    all_tokens: bool  # otherwise a part of the tokens, known only at run time
    fixed: int  # the number of blocks that are computed even without tokens


def make_cluster(rows: tuple[Rows, ...], T: int, expected: float = 1.0) -> Cluster:
    """Returns the cluster of all or some of T tokens, with its blocks.

    expected: the share of the tokens that the cluster probably has; 1 = all of them.
    """
    device, all_tokens = device_limits(), expected == 1
    largest = device.common if all_tokens else device.rare
    V = max(part.high - part.low for part in rows)
    X, fixed = min(T, max(largest.scores // min(V, largest.rows), 1)), 0
    if all_tokens or device.fixed:
        steps = math.ceil(SPARE * expected * T / largest.step)
        tokens = T if all_tokens else min(steps * largest.step, T)
        X = block_size(tokens, X, largest.step)
        fixed = -(-tokens // X) if device.fixed else 0
    return Cluster(rows, X, largest, all_tokens, fixed)


def visit_tokens(
    tokens: Members, cluster: Cluster, visit: Visit[Carry], carry: Carry
) -> Carry:
    """Calls visit(carry, first, real_X) for each block of a cluster's tokens."""
    X, fixed = cluster.X, cluster.fixed

    def turn(k: Array, carry: Carry) -> Carry:
        real_X = k * X + jnp.arange(X) < tokens.size
        return visit(carry, tokens.start + k * X, real_X)

    if fixed:  # up to 4 blocks without a loop
        carry = jax.lax.fori_loop(0, fixed, turn, carry, unroll=min(fixed, 4))
        if cluster.all_tokens:
            return carry
    # After fixed blocks, usually no token is left.
    return jax.lax.fori_loop(fixed, (tokens.size + X - 1) // X, turn, carry)


class RowBlock(NamedTuple):
    """Rows of a table from `start` on.

    The last block is moved back so that it ends at the last row: new_Y is false for its
    repeated rows. target_Y has the targets of new rows, and -1 for repeated rows.
    """

    start: Array
    weight_YE: Array
    bias_Y: Array
    new_Y: Array
    target_Y: Array


def over_rows(
    tables: tuple[Table, ...],
    rows: Rows,
    cluster: Cluster,
    dtype: DTypeLike,
    axis: str | None,
    visit: Callable[[Carry, RowBlock], Carry],
    carry: Carry,
) -> Carry:
    """Folds `visit` over the blocks of rows, with weights in a dtype."""
    table = tables[rows.table]
    V = len(table.bias_V)
    low, high, first = own_rows(rows, V, axis)
    _, most, step = cluster.largest
    most_rows = min(rows.high - rows.low, V)
    Y = block_size(most_rows, most, step)

    def turn(k: Array, carry: Carry) -> Carry:
        start = jnp.maximum(jnp.minimum(low + k * Y, high - Y), 0)
        row_Y = start + jnp.arange(Y)
        new_Y = (row_Y >= low + k * Y) & (row_Y < high)
        target_Y = jnp.where(new_Y, row_Y + first, -1)
        weight_YE, bias_Y = (part(x, start, Y) for x in table)
        weight_YE = weight_YE.astype(dtype)
        return visit(carry, RowBlock(start, weight_YE, bias_Y, new_Y, target_Y))

    blocks = (high - low + Y - 1) // Y
    if cluster.fixed:  # also for a device that has fewer rows of a sharded table
        blocks = -(-most_rows // Y)
    return jax.lax.fori_loop(0, blocks, turn, carry)


def own_rows(
    rows: Rows, V: int, axis: str | None
) -> tuple[Array | int, Array | int, Array | int]:
    """Returns (low, high, first) of the rows within this device's V table rows."""
    if axis is None:
        return rows.low, rows.high, rows.first
    device = jax.lax.axis_index(axis)
    if rows.replicated:
        return rows.low, jnp.where(device == 0, rows.high, rows.low), rows.first
    low, high = (jnp.clip(end - device * V, 0, V) for end in (rows.low, rows.high))
    return low, high, rows.first + device * V


def part(x: Array, first: Array, size: int) -> Array:
    """Returns x[first : first + size]."""
    return jax.lax.dynamic_slice_in_dim(x, first, size)


def put(x: Array, values: Array, first: Array) -> Array:
    """Returns x with its elements from `first` replaced."""
    return jax.lax.dynamic_update_slice_in_dim(x, values, first, axis=0)
