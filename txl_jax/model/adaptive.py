"""The vocabulary's two ends, tied: tokens to embeddings, hidden to likelihoods.

Dims: B streams, L segment, D model, V vocabulary.
"""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import Array

from txl_jax.model.config import ModelConfig


class Vocabulary(nn.Module):
    """One table [V, D] that embeds tokens and, with a bias [V], scores them.

    Logits and their logarithms are float32 whatever the dtype of the computation.
    """

    config: ModelConfig

    def setup(self) -> None:
        """Makes the table and the bias."""
        V, D = self.config.vocab_size, self.config.d_model
        table = nn.with_logical_partitioning(
            nn.initializers.normal(self.config.init_std), ("V", "D")
        )
        zeros = nn.with_logical_partitioning(nn.initializers.zeros, ("V",))
        self.table_VD: Any = self.param("table", table, (V, D))
        self.bias_V: Any = self.param("bias", zeros, (V,))

    def embed(self, tokens_BL: Array) -> Array:
        """Returns h_BLD, rows of the table times sqrt(D)."""
        dtype = self.config.compute_dtype
        h_BLD = jnp.take(self.table_VD, tokens_BL, axis=0).astype(dtype)
        return h_BLD * jnp.asarray(self.config.d_model**0.5, dtype)

    def scores(self, hidden_BLD: Array) -> Array:
        """Returns logits_BLV, not normalised."""
        table_VD = self.table_VD.astype(hidden_BLD.dtype)
        logits_BLV = jnp.einsum(
            "BLD,VD->BLV", hidden_BLD, table_VD, preferred_element_type=jnp.float32
        )
        return logits_BLV + self.bias_V

    def log_probs(self, hidden_BLD: Array) -> Array:
        """Returns the log-probability of every token, [B, L, V] in nats."""
        return jax.nn.log_softmax(self.scores(hidden_BLD))

    def nll(self, hidden_BLD: Array, targets_BL: Array) -> Array:
        """Returns -log p(target), nll_BL in nats, in token order."""
        logits_BLV = self.scores(hidden_BLD)
        target_BL = jnp.take_along_axis(logits_BLV, targets_BL[..., None], axis=-1)
        return jax.nn.logsumexp(logits_BLV, axis=-1) - target_BL[..., 0]
