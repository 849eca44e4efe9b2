"""LAMB (You et al. 2019) as in NVIDIA's code, for NVIDIA's recipes.

Unlike `optax.lamb`, it has no bias correction, it clips the norm of the weights to 10,
and it computes norms over the tensors of NVIDIA's code.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array

from txl_jax.model.initializers import Params

MAX_WEIGHT_NORM = 10.0


class Moments(NamedTuple):
    """Running means of the gradient and of its square."""

    mu: Params
    nu: Params


def scale_by_uncorrected_adam(
    beta1: float, beta2: float, epsilon: float
) -> optax.GradientTransformation:
    """Returns optax.scale_by_adam without its bias correction."""

    def init(params: Params) -> Moments:
        return Moments(optax.tree.zeros_like(params), optax.tree.zeros_like(params))

    def update(
        grads: Params, state: Moments, params: Params | None = None
    ) -> tuple[Params, Moments]:
        mu = optax.tree.update_moment(grads, state.mu, beta1, 1)
        nu = optax.tree.update_moment(grads, state.nu, beta2, 2)
        scaled = jax.tree.map(lambda m, v: m / (jnp.sqrt(v) + epsilon), mu, nu)
        return scaled, Moments(mu, nu)

    return optax.GradientTransformation(init, update)


def scale_by_clipped_trust_ratio(epsilon: float) -> optax.GradientTransformation:
    """Scales the update of each tensor to the norm of its weights.

    If either norm is zero, the update is not scaled.
    """

    def scale(update: Array, weight_square: Array, update_square: Array) -> Array:
        weight = jnp.minimum(jnp.sqrt(weight_square), MAX_WEIGHT_NORM)
        length = jnp.sqrt(update_square)
        ratio = weight / (length + epsilon)
        return update * jnp.where((weight == 0) | (length == 0), 1, ratio)

    return optax.stateless(
        lambda updates, params: jax.tree.map(
            scale, updates, squares(params), squares(updates)
        )
    )


def squares(tree: Params) -> Params:
    """Returns the sum of squares of each of NVIDIA's tensors, to broadcast to leaves.

    Each layer of a stacked leaf is a separate tensor; q, k and v of a layer are one
    tensor; the softmax's bias is one tensor per cluster if clusters have tables.
    """

    def square(path: jax.tree_util.KeyPath, x: Array) -> Array:
        name = path[0].key
        stacked = name == "layers" or (name in ("u", "w") and x.ndim == 3)
        axes = tuple(range(int(stacked), x.ndim))
        return jnp.sum(jnp.square(x), axes, keepdims=True)

    sums = jax.tree_util.tree_map_with_path(square, tree)
    attention = sums["layers"]["attention"]
    qkv = attention["q"] + attention["k"] + attention["v"]
    attention |= {"q": qkv, "k": qkv, "v": qkv}
    embedding = tree["embedding"]
    tables = [name for name in embedding if name.startswith("table_")]
    if tables:
        sizes = np.array([len(embedding[f"table_{i}"]) for i in range(len(tables))])
        parts = jnp.split(embedding["bias"], np.cumsum(sizes)[:-1])
        bias = jnp.stack([jnp.sum(jnp.square(part)) for part in parts])
        bias_V = jnp.repeat(bias, sizes, total_repeat_length=int(sizes.sum()))
        sums["embedding"]["bias"] = bias_V
    return sums
