"""Which slots of a memory are filled, and which keys a query sees: intervals."""

from typing import NamedTuple, Protocol, Self, TypeVar

import jax
import jax.numpy as jnp
from jax import Array

from txl_jax.model.config import ModelConfig


class Writes(NamedTuple):
    """Which of the L oldest keys, which leave the memory, fast weights store.

    written_BL: whether key j, which leaves after query j, is real and of its document.
    opening_BL: whether key j is its document's first.
    start_BL: whether a document starts at query i, which then reads nothing.
    """

    written_BL: Array
    opening_BL: Array
    start_BL: Array


class Call(NamedTuple):
    """The L tokens that a call of the model reads; see `TransformerXL.__call__`.

    oldest_BL: the oldest key that each query sees (int32).
    writes: with fast weights.
    """

    first_BL: Array
    length_B: Array
    oldest_BL: Array
    writes: Writes | None


def initially_filled(config: ModelConfig, batch_size: int, M: int) -> Array:
    """Returns filled_B of a cold start: 0, or M with initial_memory = "zeros"."""
    filled = M if config.initial_memory == "zeros" else 0
    return jnp.full(batch_size, filled, jnp.int32)


def window(x: Array, start_B: Array, M: int) -> Array:
    """Returns M consecutive states of each stream, from start_B on.

    Dimension 1 of x holds streams, dimension 2 states.
    """

    def cut(x: Array, start: Array) -> Array:
        return jax.lax.dynamic_slice_in_dim(x, start, M, axis=1)

    return jax.vmap(cut, (1, 0), 1)(x, start_B)


def newest(x: Array, M: int, axis: int) -> Array:
    """Returns the last M states, padded with zeros in front if there are fewer."""
    pad = [(0, 0)] * x.ndim
    pad[axis] = max(M - x.shape[axis], 0), 0
    x = jnp.pad(x, pad)
    return jax.lax.slice_in_dim(x, x.shape[axis] - M, None, axis=axis)


def last_start(length_B: Array, first_BL: Array) -> Array:
    """Returns where the last document of a segment starts; far below 0 if none does."""
    position_L = jnp.arange(first_BL.shape[1])
    starts_BL = first_BL & (position_L < length_B[:, None])
    return jnp.max(jnp.where(starts_BL, position_L, -(2**30)), axis=1)


def count_filled(filled_B: Array, M: int, length_B: Array, first_BL: Array) -> Array:
    """Returns the number of visible slots after a segment with length_B real tokens."""
    of_document_B = length_B - last_start(length_B, first_BL)
    return jnp.minimum(jnp.minimum(filled_B + length_B, of_document_B), M)


class FastStateLike(Protocol):
    """The part of the fast weights' state on which masks depend."""

    @property
    def read_B(self) -> Array:
        """The number of tokens read of the document, at most M + 1 (int32)."""


class MemoryLike(Protocol):
    """The memory between calls: `Memory`, `KeyValueMemory` or `RingMemory`."""

    @property
    def mem_len(self) -> int:
        """The length M."""

    @property
    def filled_B(self) -> Array:
        """The number of visible slots; see `memory.Memory`."""

    @property
    def fast(self) -> FastStateLike | None:
        """The state of the fast weights."""

    def show_zeros(self, where_B: Array) -> Self:
        """Returns the memory with visible zeros in the streams where_B (bool)."""


AnyMemory = TypeVar("AnyMemory", bound=MemoryLike)


def start_call(
    config: ModelConfig,
    memory: AnyMemory,
    L: int,
    first_BL: Array | None = None,
    length_B: Array | None = None,
    segment_len: int = 0,
) -> tuple[AnyMemory, Call]:
    """Returns (memory, call) of L tokens; see `TransformerXL.__call__`."""
    B, M = len(memory.filled_B), memory.mem_len
    if first_BL is None:
        first_BL = jnp.zeros((B, L), bool)
    elif config.initial_memory == "zeros":
        memory = memory.show_zeros(first_BL[:, 0])
        first_BL = jnp.asarray(first_BL).at[:, 0].set(False)
    if length_B is None:
        length_B = jnp.full(B, L, jnp.int32)
    keys = count_keys(config, M)
    oldest_BL = find_oldest(memory.filled_B, first_BL, M, L, keys, segment_len)
    writes = None
    if memory.fast:
        writes = find_writes(memory.fast.read_B, M, first_BL, length_B)
    return memory, Call(first_BL, length_B, oldest_BL, writes)


def find_oldest(
    filled_B: Array,
    first_BL: Array,
    M: int,
    L: int,
    keys_per_query: int,
    segment_len: int = 0,
) -> Array:
    """Returns the oldest key that each query sees, int32.

    The newest is the query's own, i + M. Unfilled slots, a document that starts in the
    segment and keys_per_query (`count_keys`) exclude older keys. If the L tokens are
    several segments of segment_len tokens (0 = one), a query sees M keys before its own
    segment.
    """
    query_L = jnp.arange(L, dtype=jnp.int32)
    oldest_BL = jnp.broadcast_to(M - filled_B[:, None], (filled_B.shape[0], L))
    start_BL = jax.lax.cummax(jnp.where(first_BL, query_L + M, 0), axis=1)
    oldest_BL = jnp.maximum(oldest_BL, start_BL)
    if keys_per_query:
        oldest_BL = jnp.maximum(oldest_BL, query_L + M + 1 - keys_per_query)
    elif 0 < segment_len < L:  # keys_per_query excludes more
        oldest_BL = jnp.maximum(oldest_BL, query_L // segment_len * segment_len)
    return oldest_BL


def count_keys(config: ModelConfig, M: int) -> int:
    """Returns the number of keys each query sees, its own included; 0 = all.

    With same_length it is M in the paper's PyTorch code and in Hugging Face's, and
    M + 1 in the paper's TensorFlow code and in NVIDIA's.
    """
    return M + config.same_length_self if config.same_length else 0


def find_writes(read_B: Array, M: int, first_BL: Array, length_B: Array) -> Writes:
    """Returns what a call writes; read_B: see `fast_weights.FastState`."""
    L = first_BL.shape[1]
    step_L = jnp.arange(L)
    is_real_BL = step_L < length_B[:, None]
    # The document's first key; -1 if it has already left. In a memory with one slot
    # more, as many as read_B counts, key j is slot j + 1.
    oldest_BL = find_oldest(read_B, first_BL, M + 1, L, 0) - 1
    return Writes(
        is_real_BL & (step_L >= oldest_BL), step_L == oldest_BL, first_BL & is_real_BL
    )
