"""Dropout by a counter hash, as in attention (`kernels.hash`).

The hash is several times cheaper than a random number per element, to compute and
especially to compile. The mask depends on global indices and therefore not on the mesh.
"""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import Array
from jax.ad_checkpoint import checkpoint_name

from txl_jax.kernels.hash import keep_index, murmur3


class Dropout(nn.Module):
    """Dropout that is on exactly when a `dropout` rng is passed.

    variational: a stream's tokens in a segment share a mask (Gal, Ghahramani 2016).
    relu: apply ReLU before dropout.
    """

    rate: float
    variational: bool = False
    relu: bool = False

    @nn.compact
    def __call__(self, x: Array) -> Array:
        """Returns x [.., tokens, features] with dropout."""
        if not self.rate or not self.has_rng("dropout"):
            return nn.relu(x) if self.relu else x
        start = seed(self)
        *leading, features = x.shape
        for size in [*leading[:-1], 1] if self.variational else leading:
            start = murmur3(start[..., None] ^ jnp.arange(size, dtype=jnp.uint32))
        features_D = jnp.arange(features, dtype=jnp.uint32)
        keep = keep_index(self.rate, start[..., None], features_D)
        if self.relu:
            return drop_relu(x, keep, self.rate)
        return jnp.where(keep, x / (1 - self.rate), 0)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def drop_relu(x: Array, keep: Array, rate: float) -> Array:
    """Returns max(x, 0) / (1 - rate) where `keep` is true, else 0.

    The backward pass recovers both masks from the zeros of the result, which saves two
    bytes for each of the feed-forward's inner activations.
    """
    # Not x > 0, which would turn NaN into 0.
    return jnp.where(keep & ~(x <= 0), x / (1 - rate), 0)


def _forward(x: Array, keep: Array, rate: float) -> tuple[Array, Array]:
    y = checkpoint_name(drop_relu(x, keep, rate), "hidden")
    return y, y


def _backward(rate: float, y: Array, dy: Array) -> tuple[Array, None]:
    return jnp.where(y != 0, dy / (1 - rate), 0), None


drop_relu.defvjp(_forward, _backward)


class WordDropout(nn.Module):
    """Drops all occurrences of randomly chosen words (Merity et al. 2018)."""

    rate: float

    @nn.compact
    def __call__(self, h_BLD: Array, tokens_BL: Array) -> Array:
        """Returns the embeddings, with zeros for dropped words."""
        if not self.rate or not self.has_rng("dropout"):
            return h_BLD
        keep_BL = keep_index(
            self.rate, murmur3(seed(self)), tokens_BL.astype(jnp.uint32)
        )
        return jnp.where(keep_BL[..., None], h_BLD / (1 - self.rate), 0)


def seed(module: nn.Module) -> Array:
    """Returns a new dropout seed for the module, uint32."""
    return jax.random.bits(module.make_rng("dropout"), dtype=jnp.uint32)
