"""The optimiser, its learning rate and the mean of what it makes, from optax's parts.

Dims: none.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import optax
from jax import Array

from txl_jax.errors import UserError, require, require_one_of
from txl_jax.lamb import scale_by_clipped_trust_ratio, scale_by_uncorrected_adam

Schedule = Callable[[Array | int], Array]


@dataclasses.dataclass(frozen=True)
class OptimConfig:
    """How parameters are updated; the defaults are the paper's released recipes."""

    optimizer: str = "adam"  # a name in OPTIMIZERS
    lr: float = 2.5e-4  # the greatest learning rate
    schedule: str = "cosine"  # a name in SCHEDULES
    warmup_steps: int = 0  # updates during which the rate rises from 0
    min_lr_ratio: float = 0.0  # where a cosine ends, as a part of lr
    clip: float = 0.25  # greatest global norm of the gradient; 0 = off
    beta1: float = 0.9  # of adam and lamb: what the mean gradient keeps
    beta2: float = 0.999  # and what the mean squared gradient keeps
    epsilon: float = 1e-8  # NVIDIA's recipes for lamb: 1e-6
    momentum: float = 0.0  # of sgd
    weight_decay: float = 0.0  # of matrices alone; OPTIMIZERS says where it enters
    average: str = "none"  # ema or asgd: evaluate a mean of the parameters
    average_decay: float = 0.999  # of ema: the part of the mean that an update leaves
    average_from: int = 0  # the first update whose parameters count, numbered from 1

    def __post_init__(self) -> None:
        """Refuses impossible values and combinations, naming the fields."""
        amounts = ("lr", "warmup_steps", "clip", "weight_decay", "min_lr_ratio")
        require(self, "optim", 0, *amounts, "average_from")
        for name in ("beta1", "beta2", "momentum", "average_decay"):
            if not 0 <= getattr(self, name) < 1:
                raise UserError(f"optim.{name} must be in [0, 1)")
        if not self.epsilon > 0:
            raise UserError("optim.epsilon must be above 0")
        require_one_of(self.optimizer, list(OPTIMIZERS), "optim.optimizer")
        require_one_of(self.schedule, list(SCHEDULES), "optim.schedule")
        require_one_of(self.average, ["none", *AVERAGES], "optim.average")
        for name, choice, takers in (
            ("momentum", "optimizer", ("sgd",)),
            ("min_lr_ratio", "schedule", ("cosine", "cosine_through_warmup")),
            ("average_from", "average", tuple(AVERAGES)),
        ):
            if getattr(self, name) and getattr(self, choice) not in takers:
                raise UserError(
                    f"optim.{name} = {getattr(self, name)} has no meaning for "
                    f'optim.{choice} = "{getattr(self, choice)}": leave it at 0'
                )


# Learning rates. Step s, the number of updates made before, counts from 0: so with a
# warm-up the first update has rate 0, as in TensorFlow. The PyTorch codes set the rate
# s after update s: theirs are these but for the first update, made before any is set,
# which has all of lr (but 0 with a warm-up of inverse_sqrt).


def cosine(config: OptimConfig, num_steps: int) -> Schedule:
    """TensorFlow's and NVIDIA's: the cosine begins after the warm-up, at lr.

    Half a cosine from lr down to lr * min_lr_ratio over what is left of num_steps.
    """
    left = max(num_steps - config.warmup_steps, 1)
    after = optax.cosine_decay_schedule(config.lr, left, alpha=config.min_lr_ratio)
    return _warmed_up(config, config.lr, after)


def cosine_through_warmup(config: OptimConfig, num_steps: int) -> Schedule:
    """PyTorch's: the cosine spans all of num_steps, and the warm-up hides its start.

    The rate falls at the end of the warm-up, from about lr to where the cosine is.
    """
    whole = optax.cosine_decay_schedule(
        config.lr, max(num_steps, 1), alpha=config.min_lr_ratio
    )

    def after(step: Array | int) -> Array:
        return whole(step + config.warmup_steps)

    return _warmed_up(config, config.lr, after)


def inverse_sqrt(config: OptimConfig, num_steps: int) -> Schedule:
    """PyTorch's: lr * s / warmup_steps^1.5 in the warm-up, then lr / sqrt(s)."""
    del num_steps

    def after(step: Array | int) -> Array:
        # Without a warm-up the first two updates both have lr.
        return config.lr / jnp.sqrt(jnp.maximum(step + config.warmup_steps, 1))

    peak = config.lr / max(config.warmup_steps, 1) ** 0.5
    return _warmed_up(config, peak, after)


def constant(config: OptimConfig, num_steps: int) -> Schedule:
    """The rate stays at lr."""
    del num_steps
    return _warmed_up(config, config.lr, optax.constant_schedule(config.lr))


def _warmed_up(config: OptimConfig, peak: float, after: Schedule) -> Schedule:
    """Returns a rise from 0 to peak and then `after`, which counts from its end."""
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
    """Returns the learning rate of each update of num_steps, counted from 0."""
    return SCHEDULES[config.schedule](config, num_steps)


# Optimisers: what follows the clip, up to the learning rate.

Parts = list[optax.GradientTransformation]


def adam(config: OptimConfig) -> Parts:
    """Adam; weight decay is decoupled: added to its update."""
    moments = optax.scale_by_adam(config.beta1, config.beta2, config.epsilon)
    return [moments, *_decay(config)]


def lamb(config: OptimConfig) -> Parts:
    """NVIDIA's LAMB; weight decay is added to the update before its length is taken.

    `lamb.squares` says what it takes for a tensor.
    """
    moments = scale_by_uncorrected_adam(config.beta1, config.beta2, config.epsilon)
    trust = scale_by_clipped_trust_ratio(config.epsilon)
    return [moments, *_decay(config), trust]


def sgd(config: OptimConfig) -> Parts:
    """PyTorch's SGD; weight decay is added to the clipped gradient."""
    momentum = [optax.trace(config.momentum)] if config.momentum else []
    return [*_decay(config), *momentum]


OPTIMIZERS = {"adam": adam, "lamb": lamb, "sgd": sgd}


def make_optimizer(config: OptimConfig) -> optax.GradientTransformationExtraArgs:
    """Returns the clip and the optimiser; its updates are to be scaled by -lr.

    `update` wants the norm of all gradients too, as grad_norm.
    """
    clips = [clip(config.clip)] if config.clip else []
    return optax.chain(*clips, *OPTIMIZERS[config.optimizer](config))


def clip(longest: float) -> optax.GradientTransformationExtraArgs:
    """Returns optax.clip_by_global_norm for a norm that is known.

    The guard judges by it; in the branch that makes the update, the compiler would not
    see that it is the same, and read every gradient once more.
    """

    def update(
        grads: Any, state: Any, params: Any = None, *, grad_norm: Array
    ) -> tuple[Any, Any]:
        del params

        def shorten(grad: Array) -> Array:
            return jnp.where(grad_norm < longest, grad, grad / grad_norm * longest)

        return jax.tree.map(shorten, grads), state

    return optax.GradientTransformationExtraArgs(optax.init_empty_state, update)


# Norms and biases are not shrunk towards zero, nor the biases of the attention.
UNDECAYED = {"scale", "bias", "cluster_bias", "distance_bias", "u", "w"}


def _decay(config: OptimConfig) -> Parts:
    decay = optax.add_decayed_weights(config.weight_decay, mask=_is_matrix)
    return [decay] if config.weight_decay else []


def _is_matrix(params: Any) -> Any:
    def decayed(path: tuple[Any, ...], _: Any) -> bool:
        # A boxed parameter's path ends in the box's attribute, which has no key.
        return not any(getattr(key, "key", None) in UNDECAYED for key in path)

    return jax.tree_util.tree_map_with_path(decayed, params)


# The mean of the parameters, for evaluation and for whoever loads the run.


@flax.struct.dataclass
class Average:
    """A mean of parameters; count (int32): updates whose parameters are in it."""

    params: Any
    count: Array


def ema(config: OptimConfig, count: Array) -> Array:
    """Exponential: what is older than 1 / (1 - average_decay) updates fades."""
    return jnp.where(count > 0, 1 - config.average_decay, 1.0)


def asgd(config: OptimConfig, count: Array) -> Array:
    """Polyak's, in AWD-LSTM: the plain mean of all since average_from."""
    del config
    return 1.0 / jnp.maximum(count, 1)


# The weight of the newest parameters in the mean when they are number `count` in it;
# it is 1 while there are none: the mean is then the parameters.
AVERAGES = {"ema": ema, "asgd": asgd}


AddToAverage = Callable[[Average, Any, Array], Average]


def make_average(config: OptimConfig) -> AddToAverage | None:
    """Returns add(average, params, number), or None for a run without an average.

    It is called after update `number`, counted from 1, made `params`.
    """
    if config.average == "none":
        return None

    def add(average: Average, params: Any, number: Array) -> Average:
        count = average.count + (number >= config.average_from)
        weight = AVERAGES[config.average](config, count)

        def mix(mean: Array, new: Array) -> Array:
            return jnp.where(weight < 1, mean + weight * (new - mean), new)

        return Average(jax.tree.map(mix, average.params, params), count)

    return add
