"""What keeps bad numbers out of a run: which updates are not made, and why.

An update is skipped, for good, if its loss or the norm of its gradient is not finite,
or, where the config says so, if its loss is far above the mean of those before. However
many come in a row, none is ever made.

Dims: none.
"""

import dataclasses
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from jax import Array

DECAY = 0.99  # the part of the mean loss that an update leaves
# Updates whose mean is a plain one; until they are made, no loss is judged by it.
WARM_UPDATES = 100

REASONS = (
    "",  # the update was made
    "its loss is not finite",
    "the norm of its gradient is not finite",
    "its loss is above train.max_loss_factor times the mean",
)


@flax.struct.dataclass
class Guard:
    """What updates are judged by; it is a part of the run's state."""

    mean_loss: Array  # nats, float32: of the updates made; 0 before the first
    made: Array  # int32: updates made
    skipped_in_row: Array  # int32: updates skipped since the last one made

    @classmethod
    def fresh(cls) -> "Guard":
        """Returns the guard of a run that has made no update."""
        zero = jnp.zeros((), jnp.int32)
        return cls(jnp.zeros((), jnp.float32), zero, zero)

    def judge(
        self, loss: Array, grad_norm: Array, max_loss_factor: float
    ) -> tuple[Array, "Guard"]:
        """Returns (reason, guard) of an update, from its loss in nats.

        reason (int32) is an index of REASONS: 0 if the update is to be made. The mean
        loss is of updates made alone: of the first WARM_UPDATES the plain mean, then
        an exponential one with DECAY, so that it forgets and yet starts unbiased.
        max_loss_factor = 0 leaves it out of the judgement.
        """
        reasons = [~jnp.isfinite(loss), ~jnp.isfinite(grad_norm)]
        if max_loss_factor:
            far = loss > max_loss_factor * self.mean_loss
            reasons.append(far & (self.made >= WARM_UPDATES))
        codes = [jnp.int32(1 + n) for n in range(len(reasons))]
        reason = jnp.select(reasons, codes, jnp.int32(0))
        weight = jnp.maximum(1 / (self.made + 1), 1 - DECAY)
        good = Guard(
            mean_loss=self.mean_loss + weight * (loss - self.mean_loss),
            made=self.made + 1,
            skipped_in_row=jnp.zeros_like(self.skipped_in_row),
        )
        bad = dataclasses.replace(self, skipped_in_row=self.skipped_in_row + 1)
        return reason, choose(reason == 0, good, bad)


def choose(condition: Array, new: Any, old: Any) -> Any:
    """Returns the pytree `new` where the condition holds, and else `old`.

    A selection, so that what is not finite in `new` leaves no trace.
    """
    return jax.tree.map(lambda n, o: jnp.where(condition, n, o), new, old)


def explain(metrics: dict[str, Any]) -> dict[str, Any]:
    """Returns an update's metrics, as host numbers, with its reason in words."""
    return {**metrics, "reason": REASONS[metrics["reason"]]}
