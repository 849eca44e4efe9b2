"""The modules from which a layer is built, and how parameters start.

Weights are boxed with the letters of their dimensions. Linear layers are einsums in the
operands' dtype, in the fast form of a device (`kernels.product`). Dropout hashes
counters, as attention does (`kernels.hash`): several times cheaper than a random number
per element, to compute and especially to compile, and independent of the mesh, because
the mask depends on global indices.

Dims: X features of an input, Y of an output, C = D.
"""

import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import Array
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike

from txl_jax.kernels.hash import keep_index, murmur3
from txl_jax.kernels.product import product
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


class Linear(nn.Module):
    """A linear layer, an einsum of features and a kernel such as BLD,DF->BLF.

    letters: the dimensions of the kernel; "." leaves one unnamed.
    """

    config: ModelConfig
    subscripts: str
    shape: tuple[int, int]
    letters: str
    use_bias: bool = True

    @nn.compact
    def __call__(self, x_BLX: Array) -> Array:
        """Returns the features y_BLY, in compute_dtype."""
        kernel = self.param("kernel", initial(self.config, self.letters), self.shape)
        dtype = self.config.compute_dtype
        y_BLY = product(self.subscripts, x_BLX.astype(dtype), kernel.astype(dtype))
        if not self.use_bias:
            return y_BLY
        target = self.subscripts[-1]
        bias_Y = self.param("bias", normal(0, target), y_BLY.shape[-1:])
        return add_bias(y_BLY, bias_Y.astype(dtype))


@jax.custom_vjp
def add_bias(y_BLY: Array, bias_Y: Array) -> Array:
    """Returns y + bias, whose gradient is summed in float32.

    In bfloat16 it would be inexact, and on a CPU such sums took 7 to 30 % of a step.
    """
    return y_BLY + bias_Y


def _add_bias_backward(_: None, grad_BLY: Array) -> tuple[Array, Array]:
    return grad_BLY, jnp.sum(grad_BLY, axis=(0, 1))  # accumulated in float32


add_bias.defvjp(lambda y_BLY, bias_Y: (y_BLY + bias_Y, None), _add_bias_backward)


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
        feature = jnp.arange(features, dtype=jnp.uint32)
        keep = keep_index(self.rate, start[..., None], feature)
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


def _drop_relu_forward(x: Array, keep: Array, rate: float) -> tuple[Array, Array]:
    y = checkpoint_name(drop_relu(x, keep, rate), "hidden")
    return y, y


def _drop_relu_backward(rate: float, y: Array, dy: Array) -> tuple[Array, None]:
    return jnp.where(y != 0, dy / (1 - rate), 0), None


drop_relu.defvjp(_drop_relu_forward, _drop_relu_backward)


class WordDropout(nn.Module):
    """Drops all occurrences of randomly chosen words (Merity et al. 2018).

    The first token of a segment is kept. Zeros that see only themselves stay zero in
    every pre-norm layer, where each norm multiplies their gradient by epsilon^-1/2.
    """

    rate: float

    @nn.compact
    def __call__(self, h_BLD: Array, tokens_BL: Array) -> Array:
        """Returns the embeddings, with zeros for dropped words."""
        if not self.rate or not self.has_rng("dropout"):
            return h_BLD
        keep_BL = keep_index(
            self.rate, murmur3(seed(self)), tokens_BL.astype(jnp.uint32)
        )
        keep_BL = keep_BL.at[:, 0].set(True)
        return jnp.where(keep_BL[..., None], h_BLD / (1 - self.rate), 0)


def seed(module: nn.Module) -> Array:
    """Returns a new dropout seed for the module, uint32."""
    return jax.random.bits(module.make_rng("dropout"), dtype=jnp.uint32)


GATE_BIAS = 2.0  # the initial b: the gates start at z = s(-2) = 0.12


def add_residual(
    config: ModelConfig, norm: Callable[[Array], Array], x_BLD: Array, y_BLD: Array
) -> Array:
    """Returns x + y, or with model.gate the gate's g; normalized unless pre_lnorm.

    x is the input of a sublayer and y its output. The calling module holds the gate's
    parameters.
    """
    if config.gate == "none":
        sum_BLD = x_BLD + y_BLD
    else:
        sum_BLD = Gate(config, name="gru")(x_BLD, nn.relu(y_BLD))
    sum_BLD = checkpoint_name(sum_BLD, "sum")
    return sum_BLD if config.pre_lnorm else norm(sum_BLD)


class Gate(nn.Module):
    """A gated recurrent unit over depth (Parisotto et al. 2020, section 3.2).

    It lets a layer begin close to the identity, which reinforcement learning needs.
    With y the ReLU of the sublayer's output and s the logistic function,

        r = s(W_r y + U_r x)
        z = s(W_z y + U_z x - b)
        g = (1 - z) * x + z * tanh(W_g y + U_g (r * x)).
    """

    config: ModelConfig

    @nn.compact
    def __call__(self, x_BLD: Array, y_BLD: Array) -> Array:
        """Returns g."""
        config, D = self.config, self.config.d_model

        def linear(name: str, x_BLD: Array) -> Array:
            shape = D, D
            layer = Linear(
                config, "BLD,DC->BLC", shape, "D.", use_bias=False, name=name
            )
            return layer(x_BLD)

        bias_D = self.param("bias", normal(0, "D", mean=GATE_BIAS), (D,))
        z_BLD = linear("W_z", y_BLD) + linear("U_z", x_BLD)
        z_BLD = nn.sigmoid(add_bias(z_BLD, -bias_D.astype(config.compute_dtype)))
        r_BLD = nn.sigmoid(linear("W_r", y_BLD) + linear("U_r", x_BLD))
        new_BLD = nn.tanh(linear("W_g", y_BLD) + linear("U_g", r_BLD * x_BLD))
        return (1 - z_BLD) * x_BLD + z_BLD * new_BLD
