"""Parameter initializers, boxed with the letters of their dimensions."""

import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
from jax import Array
from jax.typing import DTypeLike

from txl_jax.model.config import ModelConfig

# The arrays of a model by module and name, or their gradients, shapes or shardings.
Params = dict[str, Any]
Initializer = Callable[..., Any]  # (key, shape, dtype) -> boxed array
# Creates or reads a parameter of a layer: (name, letters, shape) -> array.
MakeWeight = Callable[[str, str, tuple[int, ...]], Array]


def initial(config: ModelConfig, letters: str) -> Initializer:
    """Returns the initializer of weights, N(0, init_std)."""
    return normal(config.init_std, letters)


def maker(module: nn.Module) -> MakeWeight:
    """Returns make(name, letters, shape) -> a weight of the module, in compute_dtype.

    The module has a field `config`, a ModelConfig.
    """
    config: ModelConfig = module.config

    def make(name: str, letters: str, shape: tuple[int, ...]) -> Array:
        x = module.param(name, initial(config, letters), shape)
        return x.astype(config.compute_dtype)

    return make


def normal(std: float, letters: str, mean: float = 0.0) -> Initializer:
    """Returns the initializer N(mean, std), or a constant if std is 0.

    `letters` name the axes; "." leaves one unnamed.
    """

    def draw(key: Array, shape: tuple[int, ...], dtype: DTypeLike = float) -> Array:
        return mean + std * jax.random.normal(key, shape, dtype)

    init = draw if std else nn.initializers.constant(mean)
    names = tuple(None if letter == "." else letter for letter in letters)
    return nn.with_logical_partitioning(init, names)


def keep_sums(primitive: object, *_: object, **__: object) -> bool:
    """A remat policy that keeps the results of sums for the backward pass."""
    return primitive is jax.lax.reduce_sum_p


def feature_norm(config: ModelConfig, name: str | None = None) -> Any:
    """Returns the norm over the features, LayerNorm or RMSNorm.

    The backward pass recomputes its float32 arrays from the input, which takes half
    the memory or less, and from the sums over the features.
    """
    fields: dict[str, Any] = {
        "epsilon": config.layer_norm_epsilon,
        "dtype": config.compute_dtype,
        "use_fast_variance": False,
        "scale_init": normal(config.norm_init_std, "D", mean=1.0),
        "name": name,
    }
    # prevent_cse is only needed outside a scan; inside, it costs time.
    remat = functools.partial(nn.remat, prevent_cse=False, policy=keep_sums)
    if config.norm == "rms":
        return remat(nn.RMSNorm)(**fields)
    fields["bias_init"] = normal(0, "D")
    return remat(nn.LayerNorm)(**fields)


def head_norm(config: ModelConfig, name: str | None = None) -> Any:
    """Returns the norm of queries or keys, or the identity without qk_norm."""
    if not config.qk_norm:
        return lambda x_BLHA: x_BLHA
    return nn.RMSNorm(
        epsilon=config.layer_norm_epsilon,
        dtype=config.compute_dtype,
        scale_init=normal(0, "A", mean=1.0),
        name=name,
    )
