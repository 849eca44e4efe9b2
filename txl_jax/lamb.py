"""LAMB (You et al. 2019) as NVIDIA's code has it, with which its recipes train.

Unlike optax's, it does not correct Adam's means for their start at zero, no tensor of
weights counts as longer than 10, and a tensor is what that code has as one.

Dims: V vocabulary.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array

LONGEST = 10.0


class Moments(NamedTuple):
    """Running means of the gradient and of its square."""

    mu: Any
    nu: Any


def scale_by_uncorrected_adam(
    beta1: float, beta2: float, epsilon: float
) -> optax.GradientTransformation:
    """Returns optax.scale_by_adam without its bias correction."""

    def init(params: Any) -> Moments:
        return Moments(optax.tree.zeros_like(params), optax.tree.zeros_like(params))

    def update(grads: Any, state: Moments, params: Any = None) -> tuple[Any, Moments]:
        del params
        mu = optax.tree.update_moment(grads, state.mu, beta1, 1)
        nu = optax.tree.update_moment(grads, state.nu, beta2, 2)
        return jax.tree.map(lambda m, v: m / (jnp.sqrt(v) + epsilon), mu, nu), Moments(
            mu, nu
        )

    return optax.GradientTransformation(init, update)


def scale_by_clipped_trust_ratio(epsilon: float) -> optax.GradientTransformation:
    """Returns what makes each tensor's update as long as its weights.

    An update stays as it is where it or the weights are zero.
    """

    def scale(update: Array, weight_square: Array, update_square: Array) -> Array:
        weight = jnp.minimum(jnp.sqrt(weight_square), LONGEST)
        length = jnp.sqrt(update_square)
        ratio = weight / (length + epsilon)
        return update * jnp.where((weight == 0) | (length == 0), 1, ratio)

    return optax.stateless(
        lambda updates, params: jax.tree.map(
            scale, updates, squares(params), squares(updates)
        )
    )


def squares(tree: Any) -> Any:
    """Returns the sum of squares of each tensor, to broadcast against the leaves.

    What belongs to one layer is a tensor of its own, though our layers are stacked; q,
    k and v of a layer are one together; the softmax's bias is one per cluster where
    each cluster has its own table.
    """

    def square(path: tuple[Any, ...], x: Array) -> Array:
        name = path[0].key
        stacked = name == "layers" or (name in ("u", "w") and x.ndim == 3)
        axes = tuple(range(int(stacked), x.ndim))
        return jnp.sum(jnp.square(x), axes, keepdims=True)

    found = jax.tree_util.tree_map_with_path(square, tree)
    attention = found["layers"]["attention"]
    together = attention["q"] + attention["k"] + attention["v"]
    attention |= {"q": together, "k": together, "v": together}
    if "table_0" in tree["embedding"]:
        found["embedding"]["bias"] = _bias_squares(tree["embedding"])
    return found


def _bias_squares(embedding: dict[str, Array]) -> Array:
    """Returns, for each token, the sum of squares of its cluster's biases."""
    tables = [name for name in embedding if name.startswith("table_")]
    sizes = np.array([len(embedding[f"table_{i}"]) for i in range(len(tables))])
    parts = jnp.split(embedding["bias"], np.cumsum(sizes)[:-1])
    sums = jnp.stack([jnp.sum(jnp.square(part)) for part in parts])
    return jnp.repeat(sums, sizes, total_repeat_length=int(sizes.sum()))
