"""The Transformer-XL with fixed parameters, for evaluation and generation."""

from jax import Array

from txl_jax.model.block import Block
from txl_jax.model.memory.protocol import Kept, MemoryLike
from txl_jax.model.txl import TransformerXL


class Decoder(TransformerXL):
    """The model with the parameters of `memory.layout.unstack`.

    The methods are those of `TransformerXL`. The memory is a `KeyValueMemory`, or a
    `RingMemory` for one token at a time.
    """

    def make_layers(self) -> list[Block]:
        """Returns the layers, each with its own parameters."""
        return [Block(self.config) for _ in range(self.config.n_layer)]

    def run_layers(
        self, h_BLD: Array, memory: MemoryLike, oldest_BL: Array
    ) -> tuple[Array, list[Kept]]:
        """Returns (the last layer's output, what the memory keeps of each layer)."""
        entries = []
        for block, layer in zip(self.layers, memory.layers, strict=True):
            h_BLD, kept = block(h_BLD, layer, None, None, oldest_BL)
            entries.append(kept)
        return h_BLD, entries
