"""The memory of a call whose tokens lie on several devices along the text.

Code that treats streams independently sees each of the P pieces of a stream's tokens as
a stream (`kernels.sharded.split_pieces`). In each layer a piece needs the newest M
inputs before it, as a stream needs its memory. Each device passes the newest inputs of
its piece to the next one (a halo exchange); the first piece has the memory.

Dims: P pieces, Y = P B rows, X tokens of a piece, T = P X.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import PartitionSpec

from txl_jax.errors import UserError
from txl_jax.kernels.operands import Kernel, Operands
from txl_jax.kernels.sharded import constrain, split_mesh, split_pieces
from txl_jax.model.config import ABSOLUTE_POSITIONS, ModelConfig
from txl_jax.model.memory.cache import Memory
from txl_jax.model.memory.interval import count_filled, count_keys, window
from txl_jax.sharding.rules import PIECES, STREAMS


def split_oldest(oldest_BT: Array, P: int) -> Array:
    """Returns the oldest key that each query sees, among M + X keys of its piece."""
    # Unconstrained, the running maximum over all tokens would gather them.
    oldest_YX = split_pieces(constrain(oldest_BT, STREAMS), P)
    first_Y = jnp.repeat(jnp.arange(P) * oldest_YX.shape[1], len(oldest_BT))
    return jnp.maximum(oldest_YX - first_Y[:, None], 0)


def check_pieces(config: ModelConfig, P: int, T: int, M: int, segment_len: int) -> None:
    """Raises UserError unless a call may read T tokens in P > 1 pieces.

    Each segment and each piece may need only the newest M states before it.
    """
    rule = f"mesh.segments = {P} splits the T = {T} tokens that are computed together"
    if config.position in ABSOLUTE_POSITIONS:
        raise UserError(
            f'{rule}, but model.position = "{config.position}" numbers them'
        )
    keys, L = count_keys(config, M), segment_len or T
    unit = 1 if 0 < keys <= M + 1 else L
    if T // P < M or T % (P * unit):
        raise UserError(
            f"{rule} into pieces of T / P = {T / P:g}: each must have whole segments "
            f"of {unit} tokens, and at least the M = {M} tokens of the memory. Set "
            "train.gradient_segments (in an evaluation, eval.segments_per_step) to a "
            f"multiple of {P * max(-(-M // L), 1)}, or lower mesh.segments"
        )


class HaloLayer(NamedTuple):
    """The newest M inputs of one layer before the first piece.

    start_Y: the start of the M states that the memory keeps, among M + X of each piece.
    """

    h_BMD: Array
    start_Y: Array

    def before(self, h_YXD: Array) -> tuple[Array, int]:
        """Returns the newest M states before each piece; all have a gradient."""
        mesh = split_mesh(h_YXD)
        assert mesh is not None
        P, M = mesh.shape["segments"], self.h_BMD.shape[1]

        def exchange(h_YXD: Array, h_BMD: Array) -> Array:
            newest_BMD = h_YXD[:, h_YXD.shape[1] - M :]
            pairs = [(p, p + 1) for p in range(P - 1)]
            passed_BMD = jax.lax.ppermute(newest_BMD, "segments", pairs)
            is_first = jax.lax.axis_index("segments") == 0
            return jnp.where(is_first, h_BMD.astype(h_YXD.dtype), passed_BMD)

        exchanged = jax.shard_map(
            exchange,
            mesh=mesh,
            in_specs=(PartitionSpec(PIECES), PartitionSpec(STREAMS)),
            out_specs=PartitionSpec(PIECES),
        )
        return exchanged(h_YXD, self.h_BMD), 0

    def attend(
        self, own: Operands, h_YKD: Array, x_YKD: Array, kernel: Kernel
    ) -> tuple[Array, Array]:
        """Returns (o_BLHA, M inputs of the layer from each piece, for the memory)."""
        h_1YKD = jax.lax.stop_gradient(h_YKD)[None]
        # `window` clamps start_Y in pieces where the kept states do not end; `append`
        # masks those pieces.
        return kernel(own), window(h_1YKD, self.start_Y, self.h_BMD.shape[1])[0]


class HaloMemory(NamedTuple):
    """A `Memory` during a call whose tokens are in P pieces of X.

    end_PB: the end of the next call's memory, relative to the start of each piece.
    """

    memory: Memory
    end_PB: Array
    piece_len: int

    @classmethod
    def of(cls, memory: Memory, P: int, T: int, length_B: Array | None) -> "HaloMemory":
        """Returns the memory for T tokens of each stream, length_B of them real."""
        if length_B is None:
            length_B = jnp.full_like(memory.filled_B, T)
        return cls(memory, length_B - T // P * jnp.arange(P)[:, None], T // P)

    @property
    def layers(self) -> HaloLayer:
        """The layers' memories, stacked."""
        h_NBMD = self.memory.layers.h_BMD
        # A piece's M + X keys begin M before it: M states that end before its token e
        # start at key e.
        start_Y = self.end_PB.ravel()
        return HaloLayer(h_NBMD, jnp.broadcast_to(start_Y, (len(h_NBMD), start_Y.size)))

    @jax.named_scope("memory")
    def append(
        self, kept: Array, length_B: Array | None, first_BL: Array | None
    ) -> Memory:
        """Returns the memory after the call, from the piece with the last token."""
        P, B = self.end_PB.shape
        if length_B is None:  # not end_PB[0], which the pieces would have to exchange
            length_B = jnp.full(B, P * self.piece_len, jnp.int32)
        last_B = jnp.maximum(length_B - 1, 0) // self.piece_len
        is_last_PB = jnp.arange(P)[:, None] == last_B
        kept_NPBMD = kept.reshape(len(kept), P, B, *kept.shape[2:])
        kept_NPBMD = jnp.where(is_last_PB[..., None, None], kept_NPBMD, 0)
        h_NBMD = jnp.sum(kept_NPBMD, axis=1).astype(self.memory.h_NBMD.dtype)
        M, filled_B = self.memory.mem_len, self.memory.filled_B
        return Memory(h_NBMD, count_filled(filled_B, M, length_B, first_BL))
