"""Dropout by a counter: the same few integer operations as the attention's.

Several times cheaper than a keyed random number for each element, to compute and above
all to compile, and as independent of the mesh: what is kept depends on global indices.

Dims: as in the glossary of `txl_jax`; the last but one is the tokens.
"""

import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import Array

from txl_jax.kernels.xla import kept, mix


class Dropout(nn.Module):
    """Dropout that is on exactly when a `dropout` rng is passed.

    variational: one mask for all tokens of a stream's segment (Gal and Ghahramani
    2016). relu: of max(x, 0).
    """

    rate: float
    variational: bool = False
    relu: bool = False

    @nn.compact
    def __call__(self, x: Array) -> Array:
        """Returns x [.., tokens, features], some zero and the rest scaled up."""
        if not self.rate or not self.has_rng("dropout"):
            return nn.relu(x) if self.relu else x
        start = seed(self)
        *leading, features = x.shape
        if self.variational:
            leading[-1] = 1
        for size in leading:
            start = mix(start[..., None] ^ jnp.arange(size, dtype=jnp.uint32))
        features_D = jnp.arange(features, dtype=jnp.uint32)
        keep = kept(self.rate, start[..., None], features_D)
        if self.relu:
            return drop_relu(x, keep, self.rate)
        return jnp.where(keep, x / (1 - self.rate), 0)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def drop_relu(x: Array, keep: Array, rate: float) -> Array:
    """Returns max(x, 0) / (1 - rate) where `keep` is true, else 0.

    The backward pass reads in the result where it is 0, so that neither of the two
    masks is kept for it: two bytes for each of the feed-forward's inner activations.
    """
    # Not x > 0, which would make a zero of what is not a number.
    return jnp.where(keep & ~(x <= 0), x / (1 - rate), 0)


def _forward(x: Array, keep: Array, rate: float) -> tuple[Array, Array]:
    y = drop_relu(x, keep, rate)
    return y, y


def _backward(rate: float, y: Array, dy: Array) -> tuple[Array, Any]:
    return jnp.where(y != 0, dy / (1 - rate), 0), None


drop_relu.defvjp(_forward, _backward)


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
