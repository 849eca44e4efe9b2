"""Dropout by a counter: the same few integer operations as the attention's.

Several times cheaper than a keyed random number for each element, to compute and above
all to compile, and as independent of the mesh: what is kept depends on global indices.

Dims: as in the glossary of `txl_jax`; the last but one is the tokens.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import Array

from txl_jax.kernels.xla import kept, mix


class Dropout(nn.Module):
    """Dropout that is on exactly when a `dropout` rng is passed.

    variational: one mask for all tokens of a stream's segment (Gal and Ghahramani
    2016).
    """

    rate: float
    variational: bool = False

    @nn.compact
    def __call__(self, x: Array) -> Array:
        """Returns x [.., tokens, features], some zero and the rest scaled up."""
        if not self.rate or not self.has_rng("dropout"):
            return x
        start = seed(self)
        *leading, features = x.shape
        if self.variational:
            leading[-1] = 1
        for size in leading:
            start = mix(start[..., None] ^ jnp.arange(size, dtype=jnp.uint32))
        features_D = jnp.arange(features, dtype=jnp.uint32)
        keep = kept(self.rate, start[..., None], features_D)
        return jnp.where(keep, x / (1 - self.rate), 0)


class WordDropout(nn.Module):
    """Dropout of whole words: a word is dropped wherever it stands (Merity 2018)."""

    rate: float

    @nn.compact
    def __call__(self, h_BLD: Array, tokens_BL: Array) -> Array:
        """Returns the embeddings, zero where the token is one of the dropped."""
        if not self.rate or not self.has_rng("dropout"):
            return h_BLD
        keep_BL = kept(self.rate, mix(seed(self)), tokens_BL.astype(jnp.uint32))
        return jnp.where(keep_BL[..., None], h_BLD / (1 - self.rate), 0)


def seed(module: nn.Module) -> Array:
    """Returns the uint32 that a module's dropout counts from, new in every call."""
    return jax.random.bits(module.make_rng("dropout"), dtype=jnp.uint32)
