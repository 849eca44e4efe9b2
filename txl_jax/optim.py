"""The optimiser and its learning rate, from optax's parts."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import optax
from jax import Array

from txl_jax.errors import UserError, require, require_one_of

Schedule = Callable[[Array | int], Array]


@dataclasses.dataclass(frozen=True)
class OptimConfig:
    """Adam as in the paper's released recipes."""

    lr: float = 2.5e-4
    schedule: str = "cosine"  # after the warm-up: cosine or constant
    warmup_steps: int = 0  # updates during which the rate rises from 0
    min_lr_ratio: float = 0.0  # where cosine ends, as a part of lr
    clip: float = 0.25  # greatest global norm of the gradient; 0 = off
    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-8
    weight_decay: float = 0.0  # decoupled, times lr; matrices alone

    def __post_init__(self) -> None:
        """Refuses impossible values, naming the field."""
        amounts = ("lr", "warmup_steps", "clip", "weight_decay", "min_lr_ratio")
        require(self, "optim", 0, *amounts)
        for name in ("beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise UserError(f"optim.{name} must be in [0, 1)")
        if not self.epsilon > 0:
            raise UserError("optim.epsilon must be above 0")
        require_one_of(self.schedule, list(SCHEDULES), "optim.schedule")


def cosine(config: OptimConfig, num_steps: int) -> Schedule:
    """Half a cosine from lr down to lr * min_lr_ratio over num_steps updates."""
    return optax.cosine_decay_schedule(
        config.lr, max(num_steps, 1), alpha=config.min_lr_ratio
    )


def constant(config: OptimConfig, num_steps: int) -> Schedule:
    """The rate stays at lr."""
    del num_steps
    return optax.constant_schedule(config.lr)


SCHEDULES = {"cosine": cosine, "constant": constant}


def make_schedule(config: OptimConfig, num_steps: int) -> Schedule:
    """Returns the learning rate of each update, counted from 0.

    Linear from 0 during the warm-up, then the schedule over what is left of num_steps.
    """
    after = SCHEDULES[config.schedule](config, num_steps - config.warmup_steps)
    if not config.warmup_steps:
        return after
    rise = optax.linear_schedule(0.0, config.lr, config.warmup_steps)
    return optax.join_schedules([rise, after], [config.warmup_steps])


def make_optimizer(config: OptimConfig) -> optax.GradientTransformation:
    """Returns clip, Adam and weight decay; its updates are to be scaled by -lr."""
    parts = []
    if config.clip:
        parts.append(optax.clip_by_global_norm(config.clip))
    parts.append(optax.scale_by_adam(config.beta1, config.beta2, config.epsilon))
    if config.weight_decay:
        parts.append(optax.add_decayed_weights(config.weight_decay, mask=_is_matrix))
    return optax.chain(*parts)


# Norms, biases and the two attention biases are not shrunk towards zero.
UNDECAYED = {"scale", "bias", "u", "w"}


def _is_matrix(params: Any) -> Any:
    def decayed(path: tuple[Any, ...], _: Any) -> bool:
        return not any(getattr(key, "key", None) in UNDECAYED for key in path)

    return jax.tree_util.tree_map_with_path(decayed, params)
