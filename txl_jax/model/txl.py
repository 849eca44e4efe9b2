"""The Transformer-XL: (parameters, tokens, memory) -> (hidden, memory).

Dims: B streams, L segment, M memory, K = M + L, R = K distances, N layers, D model,
H heads, A head, V vocabulary.
"""

import flax.linen as nn
from jax import Array

from txl_jax.model.adaptive import Vocabulary
from txl_jax.model.attention import normal
from txl_jax.model.block import Block
from txl_jax.model.config import ModelConfig
from txl_jax.model.memory import Memory, oldest_BL
from txl_jax.model.positions import sinusoid_RD


class TransformerXL(nn.Module):
    """The model of section 3 with tied embedding and softmax.

    Dropout is on exactly when a `dropout` rng is passed. The length of the memory is
    read from its shape, so training, evaluation and generation call the same function.
    """

    config: ModelConfig

    def setup(self) -> None:
        """Makes the layers, scanned, and what they share: u, w and the vocabulary."""
        config = self.config
        block = Block
        if config.remat:
            # prevent_cse is for code outside a scan; inside one it only costs.
            block = nn.remat(Block, prevent_cse=False)
        self.layers = nn.scan(
            block,
            variable_axes={"params": 0},
            split_rngs={"params": True, "dropout": True},
            in_axes=(0, nn.broadcast, nn.broadcast, nn.broadcast, nn.broadcast),
            length=config.n_layer,
            unroll=min(config.unroll, config.n_layer),
            metadata_params={nn.PARTITION_NAME: "N"},
        )(config)
        self.embedding = Vocabulary(config)
        shape_HA = (config.n_head, config.d_head)
        self.u_HA = self.param("u", normal(config.init_std, "HA"), shape_HA)
        self.w_HA = self.param("w", normal(config.init_std, "HA"), shape_HA)
        self.drop = nn.Dropout(config.dropout)

    def __call__(
        self,
        tokens_BL: Array,
        memory: Memory,
        *,
        first_BL: Array | None = None,
        length_B: Array | None = None,
    ) -> tuple[Array, Memory]:
        """Returns (hidden_BLD, memory) after a segment.

        first_BL (bool): a document starts at this token and sees nothing before it.
        length_B: the real tokens of each stream, the rest being padding at the right
        end, which never enters the memory; all of them without it.
        """
        config = self.config
        dtype = config.compute_dtype
        deterministic = not self.has_rng("dropout")
        L, M = tokens_BL.shape[1], memory.mem_len
        h_BLD = self.drop(self.embedding.embed(tokens_BL), deterministic=deterministic)
        R_RD = sinusoid_RD(M + L, config.d_model, config.clamp_len).astype(dtype)
        R_RD = self.drop(R_RD, deterministic=deterministic)
        h_BLD, h_NBLD = self.layers(
            h_BLD,
            memory.h_NBMD,
            R_RD,
            self.u_HA.astype(dtype),
            self.w_HA.astype(dtype),
            oldest_BL(memory.filled_B, first_BL, M, L, config.same_length),
        )
        hidden_BLD = self.drop(h_BLD, deterministic=deterministic)
        return hidden_BLD, memory.append(h_NBLD, length_B, first_BL)

    def nll(
        self,
        tokens_BL: Array,
        targets_BL: Array,
        memory: Memory,
        *,
        first_BL: Array | None = None,
        length_B: Array | None = None,
    ) -> tuple[Array, Memory]:
        """Returns (-log p(target) in nats, nll_BL in token order; memory)."""
        hidden_BLD, memory = self(
            tokens_BL, memory, first_BL=first_BL, length_B=length_B
        )
        return self.embedding.nll(hidden_BLD, targets_BL), memory

    def logits(
        self,
        tokens_BL: Array,
        memory: Memory,
        *,
        first_BL: Array | None = None,
        length_B: Array | None = None,
    ) -> tuple[Array, Memory]:
        """Returns (log p of every next token, logits_BLV, normalised; memory)."""
        hidden_BLD, memory = self(
            tokens_BL, memory, first_BL=first_BL, length_B=length_B
        )
        return self.embedding.log_probs(hidden_BLD), memory
