"""Cross-entropy of an adaptive softmax by blocks: exact, and no logits are stored.

Scores of T tokens with V rows of a table are made in blocks of some tokens and some
rows, which live as long as it takes to add them up; the backward pass makes them again.
The tokens come sorted by cluster: a cluster's are a range that only the run knows, and
the number of blocks follows it. So the cost follows where the tokens are, under static
shapes, and no token is dropped.

The rows of a table may be split over the devices of a mesh axis, all of which have the
same tokens. Each adds up what its own rows give, however many loops that takes it, and
one reduction per cluster follows.

Dims: T tokens, E embedding (its own per cluster), V rows, X tokens of a block, Y rows
of a block.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array


class Block(NamedTuple):
    """How many scores there are at most in a block, and of how many rows.

    step: what blocks of tokens and of rows are multiples of, where the limits allow.
    """

    scores: int
    rows: int
    step: int


class Limits(NamedTuple):
    """The greatest blocks of a cluster that all tokens are in, and of the others."""

    common: Block
    rare: Block


# A CPU's cache nearly holds 8 MiB of float32. A rare cluster has few tokens: few of
# them and many rows to a block waste least.
CPU = Limits(Block(1 << 21, 1 << 12, 8), Block(1 << 20, 1 << 14, 8))
# Elsewhere a block's rows and their gradient may come from the device's memory and go
# back there for each block of tokens, some 10 E bytes per row: with 1,024 tokens it is
# less per score than what the scores themselves move, for E up to about 2,000. The few
# tokens of a rare cluster would leave most of such a block empty.
ACCELERATOR = Limits(Block(1 << 22, 1 << 12, 128), Block(1 << 20, 1 << 12, 128))


def limits() -> Limits:
    """Returns the greatest blocks on the kind of device that the trace is for."""
    mesh = jax.sharding.get_abstract_mesh()
    device = mesh.abstract_device or jax.devices()[0]
    return CPU if device.device_kind == "cpu" else ACCELERATOR


def share(size: int, most: int, step: int) -> int:
    """Returns the size of the fewest equal blocks, multiples of step, up to `most`."""
    equal = -(-size // -(-size // most))
    return min(size, most, -(-equal // step) * step)


class Rows(NamedTuple):
    """Rows low <= row < high of a table; row r stands for the target r + first.

    whole: the table is not split over devices; one of them alone counts it.
    """

    table: int
    low: int
    high: int
    first: int
    whole: bool = False


# The rows among which one softmax chooses.
Cluster = tuple[Rows, ...]


class Stats(NamedTuple):
    """What is kept of a token's scores: the greatest, the sum, and the target's."""

    peak_T: Array
    sum_T: Array
    target_T: Array


class Tokens(NamedTuple):
    """The tokens of a cluster: `size` of all T, from `start` on."""

    h_TE: Array
    target_T: Array
    start: Array | int
    size: Array | int


class Shape(NamedTuple):
    """X tokens and up to Y rows: a block of a cluster."""

    X: int
    Y: int
    step: int


def block_shape(cluster: Cluster, T: int, all_tokens: bool) -> Shape:
    """Returns the shape of a cluster's blocks, of which all T are its tokens or not."""
    block = limits().common if all_tokens else limits().rare
    V = max(rows.high - rows.low for rows in cluster)
    X = min(T, max(block.scores // min(V, block.rows), 1))
    return Shape(share(T, X, block.step) if all_tokens else X, block.rows, block.step)


def visit_tokens(tokens: Tokens, X: int, visit: Callable[..., Any], carry: Any) -> Any:
    """Calls visit(carry, first, real_X) for each block of a cluster's tokens."""

    def turn(k: Array, carry: Any) -> Any:
        real_X = k * X + jnp.arange(X) < tokens.size
        return visit(carry, tokens.start + k * X, real_X)

    return jax.lax.fori_loop(0, (tokens.size + X - 1) // X, turn, carry)


def own_rows(rows: Rows, V: int, axis: str | None) -> tuple[Any, Any, Any]:
    """Returns (low, high, first) of the rows in this device's V of a table."""
    if axis is None:
        return rows.low, rows.high, rows.first
    device = jax.lax.axis_index(axis)
    if rows.whole:
        return rows.low, jnp.where(device == 0, rows.high, rows.low), rows.first
    low, high = (jnp.clip(end - device * V, 0, V) for end in (rows.low, rows.high))
    return low, high, rows.first + device * V


def visit_rows(
    rows: Rows,
    V: int,
    axis: str | None,
    shape: Shape,
    visit: Callable[..., Any],
    carry: Any,
) -> Any:
    """Calls visit(carry, row, new_Y, target_Y) for each block of rows, from `row` on.

    V: rows of the table here. The last block is moved back to end with the rows: what
    it has again is not new. target_Y is what the rows stand for, -1 for old ones.
    """
    low, high, first = own_rows(rows, V, axis)
    Y = share(min(rows.high - rows.low, V), shape.Y, shape.step)

    def turn(k: Array, carry: Any) -> Any:
        row = jnp.maximum(jnp.minimum(low + k * Y, high - Y), 0)
        row_Y = row + jnp.arange(Y)
        new_Y = (row_Y >= low + k * Y) & (row_Y < high)
        return visit(carry, row, new_Y, jnp.where(new_Y, row_Y + first, -1))

    return jax.lax.fori_loop(0, (high - low + Y - 1) // Y, turn, carry)


def part(x: Array, first: Array, size: int) -> Array:
    """Returns x[first : first + size]."""
    return jax.lax.dynamic_slice_in_dim(x, first, size)


def put(x: Array, values: Array, first: Array) -> Array:
    """Returns x with its elements from `first` on replaced."""
    return jax.lax.dynamic_update_slice_in_dim(x, values, first, axis=0)


def score_XY(h_XE: Array, table_YE: Array, bias_Y: Array, new_Y: Array) -> Array:
    """Returns the scores of a block in float32, as good as none of old rows."""
    product_XY = jnp.einsum(
        "XE,YE->XY", h_XE, table_YE, preferred_element_type=jnp.float32
    )
    return jnp.where(new_Y, product_XY + bias_Y, -1e30)


def add_rows(
    stats: Stats,
    tokens: Tokens,
    table_VE: Array,
    bias_V: Array,
    rows: Rows,
    shape: Shape,
    axis: str | None,
) -> Stats:
    """Adds the scores of a cluster's tokens with some rows to what is kept of them.

    Tokens of the next cluster that share the last block get numbers that none uses.
    """
    X = shape.X

    def visit_block(stats: Stats, row: Array, new_Y: Array, target_Y: Array) -> Stats:
        Y = len(new_Y)
        table_YE = part(table_VE, row, Y).astype(tokens.h_TE.dtype)
        bias_Y = part(bias_V, row, Y)

        def visit(stats: Stats, first: Array, _: Array) -> Stats:
            scores = score_XY(part(tokens.h_TE, first, X), table_YE, bias_Y, new_Y)
            hit_XY = part(tokens.target_T, first, X)[:, None] == target_Y
            before = Stats(*(part(x_T, first, X) for x_T in stats))
            peak_X = jnp.maximum(before.peak_T, scores.max(axis=1))
            sum_X = before.sum_T * jnp.exp(before.peak_T - peak_X)
            sum_X += jnp.exp(scores - peak_X[:, None]).sum(axis=1)
            target_X = before.target_T + jnp.where(hit_XY, scores, 0).sum(axis=1)
            after = Stats(peak_X, sum_X, target_X)
            return Stats(
                *(put(x_T, x, first) for x_T, x in zip(stats, after, strict=True))
            )

        return visit_tokens(tokens, X, visit, stats)

    return visit_rows(rows, len(bias_V), axis, shape, visit_block, stats)


def over_devices(stats: Stats, axis: str) -> Stats:
    """Returns what the devices of a mesh axis have of their rows, as of all rows."""
    peak_T = jax.lax.pmax(stats.peak_T, axis)
    sum_T = stats.sum_T * jnp.exp(stats.peak_T - peak_T)
    return Stats(peak_T, *jax.lax.psum((sum_T, stats.target_T), axis))


class Gradients(NamedTuple):
    """Of a cluster's tokens, a table and its bias, in float32."""

    h_TE: Array
    table_VE: Array
    bias_V: Array


def add_gradients(
    grads: Gradients,
    tokens: Tokens,
    table_VE: Array,
    bias_V: Array,
    lse_T: Array,
    grad_T: Array,
    rows: Rows,
    shape: Shape,
    axis: str | None,
) -> Gradients:
    """Adds what some rows of a table give: (softmax - target) times grad, and on."""
    X, dtype, f32 = shape.X, tokens.h_TE.dtype, jnp.float32

    def visit_block(
        grads: Gradients, row: Array, new_Y: Array, target_Y: Array
    ) -> Gradients:
        Y = len(new_Y)
        table_YE = part(table_VE, row, Y).astype(dtype)
        bias_Y = part(bias_V, row, Y)

        def visit(carry: Any, first: Array, real_X: Array) -> Any:
            grad_h_TE, grad_YE, grad_Y = carry
            h_XE = part(tokens.h_TE, first, X)
            scores = score_XY(h_XE, table_YE, bias_Y, new_Y)
            p_XY = jnp.exp(scores - part(lse_T, first, X)[:, None])
            hit_XY = part(tokens.target_T, first, X)[:, None] == target_Y
            grad_X1 = part(grad_T, first, X)[:, None]
            grad_XY = jnp.where(real_X[:, None], (p_XY - hit_XY) * grad_X1, 0)
            grad_Y += grad_XY.sum(axis=0)
            grad_XY = grad_XY.astype(dtype)
            grad_XE = jnp.einsum(
                "XY,YE->XE", grad_XY, table_YE, preferred_element_type=f32
            )
            grad_YE += jnp.einsum(
                "XY,XE->YE", grad_XY, h_XE, preferred_element_type=f32
            )
            grad_XE += part(grad_h_TE, first, X)
            return put(grad_h_TE, grad_XE, first), grad_YE, grad_Y

        zeros = jnp.zeros(table_YE.shape, f32), jnp.zeros(Y, f32)
        grad_h_TE, grad_YE, grad_Y = visit_tokens(
            tokens, X, visit, (grads.h_TE, *zeros)
        )
        return Gradients(
            grad_h_TE,
            put(grads.table_VE, part(grads.table_VE, row, Y) + grad_YE, row),
            put(grads.bias_V, part(grads.bias_V, row, Y) + grad_Y, row),
        )

    return visit_rows(rows, len(bias_V), axis, shape, visit_block, grads)


def blockwise_nll(
    clusters: tuple[Cluster, ...],
    tokens: tuple[Tokens, ...],
    tables: tuple[Array, ...],
    biases: tuple[Array, ...],
    axis: str | None = None,
) -> Array:
    """Returns the sum over clusters of -log softmax(target), nll_T in nats.

    Each cluster adds to its own tokens. `clusters` name rows of `tables` [V, E], which
    have `biases` [V]. axis: the mesh axis over which the rows of the tables here are
    split, in the order of its devices; call it within a shard_map then.
    """
    T = len(tokens[0].target_T)
    shapes = tuple(
        block_shape(cluster, T, isinstance(own.size, int))
        for cluster, own in zip(clusters, tokens, strict=True)
    )
    # The last block may end behind the last token; where one begins only a run knows,
    # unless all tokens are in it.
    behind = max(
        -T % shape.X if isinstance(own.size, int) else shape.X
        for shape, own in zip(shapes, tokens, strict=True)
    )

    def pad(own: Tokens) -> Tokens:
        return own._replace(
            h_TE=jnp.pad(own.h_TE, ((0, behind), (0, 0))),
            target_T=jnp.pad(own.target_T, (0, behind)),
        )

    padded = tuple(map(pad, tokens))
    return padded_nll(clusters, shapes, axis, padded, tables, biases)[:T]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def padded_nll(
    clusters: tuple[Cluster, ...],
    shapes: tuple[Shape, ...],
    axis: str | None,
    tokens: tuple[Tokens, ...],
    tables: tuple[Array, ...],
    biases: tuple[Array, ...],
) -> Array:
    """Returns `blockwise_nll` of tokens with padding behind them, in such blocks."""
    return forward(clusters, shapes, axis, tokens, tables, biases)[0]


def forward(
    clusters: tuple[Cluster, ...],
    shapes: tuple[Shape, ...],
    axis: str | None,
    tokens: tuple[Tokens, ...],
    tables: tuple[Array, ...],
    biases: tuple[Array, ...],
) -> tuple[Array, Any]:
    """Returns nll_T and, for the backward pass, a number per token and cluster."""
    T = len(tokens[0].target_T)
    nll_T, lses = jnp.zeros(T), []
    for cluster, shape, own in zip(clusters, shapes, tokens, strict=True):
        stats = Stats(jnp.full(T, -1e30), jnp.zeros(T), jnp.zeros(T))
        for rows in cluster:
            table_VE, bias_V = tables[rows.table], biases[rows.table]
            stats = add_rows(stats, own, table_VE, bias_V, rows, shape, axis)
        if axis is not None:
            stats = over_devices(stats, axis)
        lses.append(stats.peak_T + jnp.log(stats.sum_T))
        token_T = jnp.arange(T)
        inside_T = (own.start <= token_T) & (token_T < own.start + own.size)
        nll_T += jnp.where(inside_T, lses[-1] - stats.target_T, 0)
    return nll_T, (tokens, tables, biases, lses)


def backward(
    clusters: tuple[Cluster, ...],
    shapes: tuple[Shape, ...],
    axis: str | None,
    saved: Any,
    grad_T: Array,
) -> tuple[Any, Any, Any]:
    """Returns the gradients of tokens, tables and biases."""
    tokens, tables, biases, lses = saved
    if axis is not None:
        # What comes of a result that all devices share is shared out among them.
        grad_T = jax.lax.psum(grad_T, axis)
    grad_tables = [jnp.zeros(table.shape) for table in tables]
    grad_biases = [jnp.zeros(bias.shape) for bias in biases]
    grad_tokens: list[Any] = []
    for cluster, shape, own, lse_T in zip(clusters, shapes, tokens, lses, strict=True):
        grad_h_TE = jnp.zeros(own.h_TE.shape)
        for rows in cluster:
            i = rows.table
            grads = Gradients(grad_h_TE, grad_tables[i], grad_biases[i])
            grad_h_TE, grad_tables[i], grad_biases[i] = add_gradients(
                grads, own, tables[i], biases[i], lse_T, grad_T, rows, shape, axis
            )
        grad_tokens.append((grad_h_TE.astype(own.h_TE.dtype), None, None, None))
    return (
        tuple(Tokens(*own) for own in grad_tokens),
        tuple(grad_tables),
        tuple(grad_biases),
    )


padded_nll.defvjp(forward, backward)
