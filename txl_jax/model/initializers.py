"""What parameters are before training, boxed with the letters of their dimensions.

Dims: as in the glossary of `txl_jax`.
"""

from typing import Any

import flax.linen as nn
import jax
from jax import Array

from txl_jax.model.config import ModelConfig


def boxed(init: Any, letters: str) -> Any:
    """Returns the initialiser with its axes named; "." names none."""
    names = tuple(None if letter == "." else letter for letter in letters)
    return nn.with_logical_partitioning(init, names)


def weight(config: ModelConfig, letters: str) -> Any:
    """Returns the initialiser of weights: normal, or uniform if init_range is set."""
    if not config.init_range:
        return boxed(nn.initializers.normal(config.init_std), letters)

    def uniform(key: Array, shape: tuple[int, ...], dtype: Any = float) -> Array:
        bound = config.init_range
        return jax.random.uniform(key, shape, dtype, -bound, bound)

    return boxed(uniform, letters)


def normal(std: float, letters: str, mean: float = 0.0) -> Any:
    """Returns an initialiser N(mean, std); a constant where std is 0."""

    def draw(key: Array, shape: tuple[int, ...], dtype: Any = float) -> Array:
        return mean + std * jax.random.normal(key, shape, dtype)

    return boxed(draw if std else nn.initializers.constant(mean), letters)


def layer_norm(config: ModelConfig, name: str | None = None) -> nn.LayerNorm:
    """Returns LayerNorm over the features.

    The backward pass makes its float32 arrays once more from the input, which is half
    as large or less, instead of reading them.
    """
    # prevent_cse is for code outside a scan; inside one it only costs.
    return nn.remat(nn.LayerNorm, prevent_cse=False)(
        epsilon=config.layer_norm_epsilon,
        dtype=config.compute_dtype,
        use_fast_variance=False,
        scale_init=normal(config.norm_init_std, "D", mean=1.0),
        bias_init=normal(0, "D"),
        name=name,
    )
