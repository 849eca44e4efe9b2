"""Memory tokens, which each segment reads and writes (Bulatov et al. 2022).

The layers read [read; x; write]: W vectors, the segment x, and the W vectors again. The
last layer's outputs at `write` are the vectors of the next segment; the first segment
of a document has learned vectors. Keys are [memory; read; x; write], with the paper's
memory of text, and distances count all of them. A call may have S segments, which are
read one after the other; gradients pass through the tokens from segment to segment.

Dims: W memory tokens, T = 2 W + L.
"""

import functools
from typing import NamedTuple

import flax.linen as nn
import flax.struct
import jax
import jax.numpy as jnp
from jax import Array

from txl_jax.model.config import ModelConfig
from txl_jax.model.initializers import initial
from txl_jax.model.memory.cache import CacheLayer, Memory
from txl_jax.model.memory.interval import last_start, window
from txl_jax.model.memory.protocol import Call, Kept, Kind, MemoryLike


@flax.struct.dataclass
class TokenMemory:
    """The paper's memory, and the tokens that the newest segment has written.

    written_B: whether a segment has written tokens_BWD; otherwise, the learned tokens
        are read instead.
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


class OpenTokens(NamedTuple):
    """A `TokenMemory` during a call."""

    memory: TokenMemory
    learned_WD: Array
    first_BL: Array
    length_B: Array

    @property
    def layers(self) -> CacheLayer:
        """The layers of the paper's memory, stacked."""
        return self.memory.text.layers

    def tokens_unless(self, starts_B: Array) -> Array:
        """Returns the memory's tokens, or learned ones where a document starts."""
        fresh_B = starts_B | ~self.memory.written_B
        tokens_BWD = self.memory.tokens_BWD
        return jnp.where(fresh_B[:, None, None], self.learned_WD, tokens_BWD)

    def append(
        self, kept: Kept, length_B: Array | None, first_BL: Array | None
    ) -> TokenMemory:
        """Returns the memory after a segment; `kept` has its states and its tokens."""
        (h_NBLD, tokens_BWD), memory, read_B = kept, self.memory, self.length_B > 0
        tokens_BWD = jnp.where(read_B[:, None, None], tokens_BWD, memory.tokens_BWD)
        text = memory.text.append(h_NBLD, self.length_B, self.first_BL)
        return TokenMemory(text, tokens_BWD, memory.written_B | read_B)


class MemoryTokens(Kind):
    """The paper's memory, and tokens."""

    field = "memory_tokens"
    by_segments = True
    restarts = False

    def empty(self, batch_size: int) -> MemoryLike:
        """Returns the initial memory."""
        return TokenMemory.empty(self.config, batch_size)

    def make_parameter(self, module: nn.Module) -> Array:
        """Returns the learned tokens."""
        config = self.config
        shape = (config.memory_tokens, config.d_model)
        tokens_WD: Array = module.param("memory_tokens", initial(config, "WD"), shape)
        return tokens_WD.astype(config.compute_dtype)

    def open(self, memory: TokenMemory, call: Call) -> OpenTokens:
        """Returns the memory as a call reads it, with the learned tokens."""
        L, first_BL, length_B, learned_WD = call
        B = len(memory.written_B)
        if first_BL is None:
            first_BL = jnp.zeros((B, L), bool)
        if length_B is None:
            length_B = jnp.full(B, L, jnp.int32)
        return OpenTokens(memory, learned_WD, first_BL, length_B)

    def surround(
        self, opened: OpenTokens, h_BLD: Array, oldest_BL: Array
    ) -> tuple[Array, Array]:
        """Returns (h_BTD, oldest_BT) of [read; segment; write]."""
        W, M, L = len(opened.learned_WD), opened.memory.mem_len, h_BLD.shape[1]
        first_BL, length_B = opened.first_BL, opened.length_B
        read_BWD = opened.tokens_unless(first_BL[:, 0])
        # Written tokens would also carry the end of one document into the next.
        write_BWD = opened.tokens_unless(last_start(length_B, first_BL) >= 0)
        # The write tokens follow the last real token, instead of padding.
        follow = functools.partial(jax.lax.dynamic_update_slice_in_dim, axis=0)
        h_BXD = jnp.concatenate([h_BLD, write_BWD], axis=1)
        h_BXD = jax.vmap(follow)(h_BXD, write_BWD, length_B)
        h_BTD = jnp.concatenate([read_BWD, h_BXD], axis=1)
        # `read` sees what the first token of the segment sees, `write` what the last
        # one does. A document that starts inside the segment does not see `read`.
        oldest_BL += jnp.where(oldest_BL > M, W, 0)
        last_B1 = jnp.maximum(length_B - 1, 0)[:, None]
        token_BT = jnp.clip(jnp.arange(L + 2 * W) - W, 0, last_B1)
        return h_BTD, jnp.take_along_axis(oldest_BL, token_BT, axis=1)

    def leave(
        self, opened: OpenTokens, h_BTD: Array, kept: Array
    ) -> tuple[Array, tuple[Array, Array]]:
        """Returns (h_BLD, (the text's states, the written tokens))."""
        W = len(opened.learned_WD)
        L = h_BTD.shape[1] - 2 * W
        written_BWD = window(h_BTD[None], W + opened.length_B, W)[0]
        return h_BTD[:, W : W + L], (kept[:, :, W : W + L], written_BWD)
