"""Learning rates, optimizers and the average of the parameters, built from optax.

Dims: a matrix of I rows and O columns; J and K are also rows.
"""

import functools
import re
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array
from jax.typing import DTypeLike

from txl_jax.kernels.product import product
from txl_jax.model.modules import Params
from txl_jax.update.options import OptimConfig
from txl_jax.update.state import Average

Schedule = Callable[[Array | int], Array]


# Schedules. Step s = updates made so far: with a warm-up the first update has rate 0,
# as in TensorFlow. The PyTorch codes set the rate of step s after update s: their rates
# are the same except in the first update, which has the full lr (or 0 with a warm-up of
# inverse_sqrt).


def cosine(config: OptimConfig, num_steps: int) -> Schedule:
    """TensorFlow's and NVIDIA's: warm-up, then half a cosine over the remaining steps.

    The cosine falls from lr to lr * min_lr_ratio.
    """
    steps = max(num_steps - config.warmup_steps, 1)
    after = optax.cosine_decay_schedule(config.lr, steps, alpha=config.min_lr_ratio)
    return _warmed_up(config, config.lr, after)


def cosine_through_warmup(config: OptimConfig, num_steps: int) -> Schedule:
    """PyTorch's: the cosine spans all of num_steps; the warm-up replaces its start.

    At the end of the warm-up the rate jumps from about lr down to the cosine.
    """
    whole = optax.cosine_decay_schedule(
        config.lr, max(num_steps, 1), alpha=config.min_lr_ratio
    )
    return _warmed_up(config, config.lr, lambda step: whole(step + config.warmup_steps))


def inverse_sqrt(config: OptimConfig, num_steps: int) -> Schedule:
    """PyTorch's: lr * s / warmup_steps^1.5 in the warm-up, then lr / sqrt(s)."""

    def after(step: Array | int) -> Array:
        # Without a warm-up the first two updates both have lr.
        return config.lr / jnp.sqrt(jnp.maximum(step + config.warmup_steps, 1))

    peak = config.lr / max(config.warmup_steps, 1) ** 0.5
    return _warmed_up(config, peak, after)


def constant(config: OptimConfig, num_steps: int) -> Schedule:
    """A constant lr after the warm-up."""
    return _warmed_up(config, config.lr, optax.constant_schedule(config.lr))


def _warmed_up(config: OptimConfig, peak: float, after: Schedule) -> Schedule:
    """Joins a linear warm-up to peak and `after`, whose steps count from its end."""
    if not config.warmup_steps:
        return after
    rise = optax.linear_schedule(0.0, peak, config.warmup_steps)
    return optax.join_schedules([rise, after], [config.warmup_steps])


SCHEDULES = {
    "cosine": cosine,
    "cosine_through_warmup": cosine_through_warmup,
    "inverse_sqrt": inverse_sqrt,
    "constant": constant,
}


def make_schedule(config: OptimConfig, num_steps: int) -> Schedule:
    """Returns the schedule of a run of num_steps updates."""
    return SCHEDULES[config.schedule](config, num_steps)


# Optimizers: the transformations after the clip. The step scales their result by -lr.

Parts = list[optax.GradientTransformation]
# The decay rates of the two moments, as in all published recipes.
BETAS = (0.9, 0.999)
# Added to their denominators; NVIDIA's LAMB has its own.
EPSILON, LAMB_EPSILON = 1e-8, 1e-6


def adam(config: OptimConfig, _: DTypeLike) -> Parts:
    """Adam, with decoupled weight decay: it is added to the update."""
    return [optax.scale_by_adam(*BETAS, EPSILON), *_decay(config)]


def lamb(config: OptimConfig, _: DTypeLike) -> Parts:
    """NVIDIA's LAMB; weight decay is added before the norm of the update is taken.

    Unlike `optax.lamb` (You et al. 2019), it has no bias correction, it clips the norm
    of the weights to 10, and it computes norms over the tensors of NVIDIA's code.
    """
    moments = scale_by_uncorrected_adam(*BETAS, LAMB_EPSILON)
    trust = scale_by_clipped_trust_ratio(LAMB_EPSILON)
    return [moments, *_decay(config), trust]


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
    """Returns sums of squares over NVIDIA's tensors, broadcastable to the leaves.

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


def sgd(config: OptimConfig, _: DTypeLike) -> Parts:
    """PyTorch's SGD: weight decay is added to the clipped gradient."""
    return _decay(config)


def muon(config: OptimConfig, dtype: DTypeLike) -> Parts:
    """Muon (Jordan 2024) for the layers' matrices, Adam for all other parameters.

    Both have Nesterov's momentum. Updates have the size of Adam's (Liu et al. 2025),
    so both take the same lr. The products have dtype; bfloat16 is Jordan's.
    """
    parts = {
        "matrices": scale_by_muon(dtype),
        "others": optax.scale_by_adam(*BETAS, EPSILON, nesterov=True),
    }
    return [optax.partition(parts, _choose_part), *_decay(config)]


# The layers' matrices, [N, inputs or outputs .., the other dimension].
MATRICES = {"q", "k", "v", "r", "o", "kernel"}


def _choose_part(params: Params) -> Params:
    def choose(path: jax.tree_util.KeyPath, _: object) -> str:
        names = [key.key for key in path if hasattr(key, "key")]
        is_matrix = "layers" in names and names[-1] in MATRICES
        return "matrices" if is_matrix else "others"

    return jax.tree_util.tree_map_with_path(choose, params)


class Momentum(NamedTuple):
    """A running mean of gradients, and their number (int32)."""

    mu: Params
    number: Array


MOMENTUM = 0.95
NEWTON_SCHULZ = 3.4445, -4.7750, 2.0315  # the coefficients of x, (x x') x, (x x')^2 x


def scale_by_muon(dtype: DTypeLike) -> optax.GradientTransformation:
    """Returns optax.contrib.scale_by_muon for stacked matrices, with products in dtype.

    optax's products have the momentum's dtype, float32, in which they can take as long
    as the rest of a training step.
    """

    def init(params: Params) -> Momentum:
        return Momentum(optax.tree.zeros_like(params), jnp.zeros((), jnp.int32))

    def update(
        grads: Params, state: Momentum, params: Params | None = None
    ) -> tuple[Params, Momentum]:
        mu = optax.tree.update_moment(grads, state.mu, MOMENTUM, 1)
        number = state.number + 1
        grads = optax.tree.bias_correction(grads, MOMENTUM, number)
        mean = optax.tree.bias_correction(mu, MOMENTUM, number + 1)
        ahead = optax.tree.update_moment(grads, mean, MOMENTUM, 1)
        scale = functools.partial(orthogonalize, dtype=dtype)
        return jax.tree.map(scale, ahead), Momentum(mu, number)

    return optax.GradientTransformation(init, update)


def orthogonalize(x_N: Array, dtype: DTypeLike) -> Array:
    """Makes the singular values of stacked matrices nearly equal.

    Five quintic iterations of Newton and Schulz; an entry's root mean square becomes
    about 0.2, as in an update of Adam's.
    """
    x_NIO = x_N.reshape(len(x_N), -1, x_N.shape[-1])
    if is_tall := x_NIO.shape[1] > x_NIO.shape[2]:
        x_NIO = jnp.swapaxes(x_NIO, 1, 2)
    norm = jnp.linalg.norm(x_NIO, axis=(1, 2), keepdims=True)
    x_NIO = (x_NIO / (norm + EPSILON)).astype(dtype)
    first, third, fifth = NEWTON_SCHULZ
    for _ in range(5):
        square_NIJ = product("NIO,NJO->NIJ", x_NIO, x_NIO)
        power_NIJ = product("NIK,NKJ->NIJ", square_NIJ, square_NIJ)
        polynomial_NIJ = third * square_NIJ + fifth * power_NIJ
        x_NIO = first * x_NIO + product("NIJ,NJO->NIO", polynomial_NIJ, x_NIO)
    x_NIO = 0.2 * max(x_NIO.shape[1:]) ** 0.5 * x_NIO.astype(x_N.dtype)
    return (jnp.swapaxes(x_NIO, 1, 2) if is_tall else x_NIO).reshape(x_N.shape)


OPTIMIZERS = {"adam": adam, "lamb": lamb, "muon": muon, "sgd": sgd}


def make_optimizer(
    config: OptimConfig, dtype: DTypeLike = "float32"
) -> optax.GradientTransformationExtraArgs:
    """Returns the clip and the optimizer; scale its updates by -lr.

    `update` also takes grad_norm, the global norm of the gradients. dtype: of Muon's
    products.
    """
    clips = [clip(config.clip)] if config.clip else []
    parts = [*clips, *OPTIMIZERS[config.optimizer](config, dtype)]
    return optax.chain(*(parts or [optax.identity()]))  # plain SGD has none


def clip(max_norm: float) -> optax.GradientTransformationExtraArgs:
    """Like `optax.clip_by_global_norm`, with the norm as an argument.

    The step needs the norm as well. XLA does not eliminate the same expression inside
    the `cond` that makes the update, and would read every gradient again.
    """

    def update(
        grads: Params,
        state: optax.OptState,
        params: Params | None = None,
        *,
        grad_norm: Array,
    ) -> tuple[Params, optax.OptState]:
        def shorten(grad: Array) -> Array:
            return jnp.where(grad_norm < max_norm, grad, grad / grad_norm * max_norm)

        return jax.tree.map(shorten, grads), state

    return optax.GradientTransformationExtraArgs(optax.init_empty_state, update)


# Weight decay excludes scales and biases, including the attention's u and w.
UNDECAYED = re.compile(r".*scale|.*bias|u|w")


def _decay(config: OptimConfig) -> Parts:
    decay = optax.add_decayed_weights(config.weight_decay, mask=_decay_mask)
    return [decay] if config.weight_decay else []


def _decay_mask(params: Params) -> Params:
    def decayed(path: jax.tree_util.KeyPath, _: object) -> bool:
        # A boxed parameter's path ends in the box's attribute, which has no key.
        return not any(UNDECAYED.fullmatch(getattr(key, "key", "")) for key in path)

    return jax.tree_util.tree_map_with_path(decayed, params)


AddToAverage = Callable[[Average, Params, Array], Average]


def make_average(config: OptimConfig) -> AddToAverage | None:
    """Returns add(average, params, number), or None for a run without an average.

    The average is ASGD's (Polyak), as in AWD-LSTM: the plain mean of the parameters
    since update asgd_from. `params` are the parameters after update `number`, counted
    from 1; before asgd_from the average equals them.
    """
    if not config.asgd_from:
        return None

    def add(average: Average, params: Params, number: Array) -> Average:
        count = average.count + (number >= config.asgd_from)
        weight = 1.0 / jnp.maximum(count, 1)

        def mix(mean: Array, new: Array) -> Array:
            return jnp.where(weight < 1, mean + weight * (new - mean), new)

        return Average(jax.tree.map(mix, average.params, params), count)

    return add
