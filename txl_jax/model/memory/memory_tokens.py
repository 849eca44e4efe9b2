"""Memory tokens, which each segment reads and writes (Bulatov et al. 2022).

The layers read [read; x; write]: W vectors, the segment x, and the W vectors again. The
last layer's outputs at `write` are the vectors of the next segment; the first segment
of a document has learned ones. Keys are [memory; read; x; write], with the paper's
memory of text, and distances count all of them. A call may have S segments, which are
read one after the other; gradients pass through the tokens from segment to segment.

Dims: W memory tokens, T = 2 W + L.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import flax.struct
import jax
import jax.numpy as jnp
from jax import Array

from txl_jax.model.config import ModelConfig
from txl_jax.model.initializers import weight
from txl_jax.model.memory.cache import CacheLayer, Memory
from txl_jax.model.memory.interval import find_oldest, last_start, window
from txl_jax.model.memory.protocol import CallMemory, Kept, Kind, MemoryLike

# `TransformerXL.run_layers`, with the module as the first argument.
RunLayers = Callable[[Any, Array, CallMemory, Array, int, int], tuple[Array, Kept]]


@flax.struct.dataclass
class TokenMemory:
    """The paper's memory, and the tokens that the newest segment has written.

    written_B: whether a segment has written tokens_BWD; otherwise, the learned ones are
        read in their place.
    """

    text: Memory
    tokens_BWD: Array
    written_B: Array

    @classmethod
    def empty(cls, config: ModelConfig, batch_size: int) -> "TokenMemory":
        """Returns the initial memory; see `cache.Memory.empty`."""
        shape = (batch_size, config.memory_tokens, config.d_model)
        tokens_BWD = jnp.zeros(shape, config.compute_dtype)
        text = Memory.empty(config, batch_size)
        return cls(text, tokens_BWD, jnp.zeros(batch_size, bool))

    @property
    def mem_len(self) -> int:
        """The length M of the paper's memory."""
        return self.text.mem_len

    @property
    def filled_B(self) -> Array:
        """The visible slots of the paper's memory."""
        return self.text.filled_B

    def append(
        self, kept: Kept, length_B: Array | None, first_BL: Array | None
    ) -> "TokenMemory":
        """Returns the memory after a segment; `kept` has its states and its tokens."""
        assert length_B is not None
        (h_NBLD, tokens_BWD), read_B = kept, length_B > 0
        tokens_BWD = jnp.where(read_B[:, None, None], tokens_BWD, self.tokens_BWD)
        text = self.text.append(h_NBLD, length_B, first_BL)
        return TokenMemory(text, tokens_BWD, self.written_B | read_B)


class OpenTokens(NamedTuple):
    """A `TokenMemory` during a call of S segments; `kept` is the memory after it."""

    memory: TokenMemory
    learned_WD: Array
    first_BL: Array
    length_B: Array
    segment_len: int

    @property
    def layers(self) -> CacheLayer:
        """The layers of the paper's memory, stacked."""
        return self.memory.text.layers

    def append(
        self, kept: TokenMemory, length_B: Array | None, first_BL: Array | None
    ) -> TokenMemory:
        """Returns the memory after the call."""
        return kept


class MemoryTokens(Kind):
    """The paper's memory, and tokens."""

    field = "memory_tokens"
    by_segments = True

    def empty(self, batch_size: int) -> MemoryLike:
        """Returns the initial memory."""
        return TokenMemory.empty(self.config, batch_size)

    def make_parameter(self, module: nn.Module) -> Array:
        """Returns the learned tokens."""
        config = self.config
        shape = (config.memory_tokens, config.d_model)
        tokens_WD: Array = module.param("memory_tokens", weight(config, "WD"), shape)
        return tokens_WD.astype(config.compute_dtype)

    def open(
        self,
        memory: TokenMemory,
        parameter: Any,
        L: int,
        first_BL: Array | None,
        length_B: Array | None,
        segment_len: int,
    ) -> OpenTokens:
        """Returns the memory for a call of L tokens; `parameter` are learned tokens."""
        B = len(memory.written_B)
        if first_BL is None:
            first_BL = jnp.zeros((B, L), bool)
        if length_B is None:
            length_B = jnp.full(B, L, jnp.int32)
        return OpenTokens(memory, parameter, first_BL, length_B, segment_len or L)


def with_memory_tokens(run_layers: RunLayers) -> RunLayers:
    """Decorates `run_layers`, so that segments read and write the memory's tokens."""

    def read_segment(
        module: nn.Module,
        state: tuple[TokenMemory, Array],
        segment: tuple[Array, Array, Array],
    ) -> tuple[tuple[TokenMemory, Array], Array]:
        (memory, learned_WD), (h_BLD, first_BL, length_B) = state, segment
        W, M, L = len(learned_WD), memory.mem_len, h_BLD.shape[1]

        def unless(starts_B: Array) -> Array:
            fresh_B = starts_B | ~memory.written_B
            return jnp.where(fresh_B[:, None, None], learned_WD, memory.tokens_BWD)

        read_BWD = unless(first_BL[:, 0])
        # These, too, would carry the end of one document into the next.
        write_BWD = unless(last_start(length_B, first_BL) >= 0)
        # They follow the last real token, instead of padding.
        follow = functools.partial(jax.lax.dynamic_update_slice_in_dim, axis=0)
        h_BXD = jnp.concatenate([h_BLD, write_BWD], axis=1)
        h_BXD = jax.vmap(follow)(h_BXD, write_BWD, length_B)
        h_BTD = jnp.concatenate([read_BWD, h_BXD], axis=1)
        # `read` sees what the first token of the segment sees, `write` what the last
        # one does. A document that starts inside the segment does not see `read`.
        oldest_BL = find_oldest(memory.filled_B, first_BL, M, L, reach=0)
        oldest_BL += jnp.where(oldest_BL > M, W, 0)
        last_B1 = jnp.maximum(length_B - 1, 0)[:, None]
        token_BT = jnp.clip(jnp.arange(L + 2 * W) - W, 0, last_B1)
        oldest_BT = jnp.take_along_axis(oldest_BL, token_BT, axis=1)
        h_BTD, kept_NBTD = run_layers(
            module, h_BTD, memory.text, oldest_BT, M, L + 2 * W
        )
        written_BWD = window(h_BTD[None], W + length_B, W)[0]
        kept = kept_NBTD[:, :, W : W + L], written_BWD
        memory = memory.append(kept, length_B, first_BL)
        return (memory, learned_WD), h_BTD[:, W : W + L]

    @functools.wraps(run_layers)
    def read_segments(
        module: nn.Module,
        h_BTD: Array,
        memory: CallMemory,
        oldest_BT: Array,
        M: int,
        T: int,
    ) -> tuple[Array, Kept]:
        if not isinstance(memory, OpenTokens):
            return run_layers(module, h_BTD, memory, oldest_BT, M, T)
        B, L = len(h_BTD), memory.segment_len

        def cut(x_BT: Array) -> Array:
            x_BSL = x_BT.reshape(B, T // L, L, *x_BT.shape[2:])
            return jnp.swapaxes(x_BSL, 0, 1)

        length_SB = jnp.clip(memory.length_B - jnp.arange(0, T, L)[:, None], 0, L)
        scan: Any = nn.scan(
            read_segment,
            variable_broadcast="params",
            split_rngs={"params": False, "dropout": True},
        )
        segments = cut(h_BTD), cut(memory.first_BL), length_SB
        (after, _), h_SBLD = scan(module, (memory.memory, memory.learned_WD), segments)
        return jnp.swapaxes(h_SBLD, 0, 1).reshape(h_BTD.shape), after

    return read_segments
