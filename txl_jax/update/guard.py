"""Decides which updates are skipped, so that bad numbers never enter the state.

An update is skipped if its loss or the norm of its gradient is not finite, or, where
the config sets a limit, if its loss is far above the mean of the previous ones. A
skipped update is never applied later, however many are skipped in a row.
"""

import dataclasses
import functools
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from jax import Array

DECAY = 0.99  # of the exponential mean of the loss
# The first updates, whose mean is plain; only later losses are compared with the mean.
WARM_UPDATES = 100

REASONS = (
    "",  # the update was made
    "its loss is not finite",
    "the norm of its gradient is not finite",
    "its loss is above train.max_loss_factor times the mean",
)


@flax.struct.dataclass
class Guard:
    """The statistics of a run by which the next update is judged."""

    mean_loss: Array  # nats, float32: of the updates made; 0 before the first
    made: Array  # int32: updates made
    skipped_in_row: Array  # int32: updates skipped since the last one made

    @classmethod
    def fresh(cls) -> "Guard":
        """Returns the guard of a run before its first update."""
        zero = jnp.zeros((), jnp.int32)
        return cls(jnp.zeros((), jnp.float32), zero, zero)

    def judge(
        self, loss: Array, grad_norm: Array, max_loss_factor: float
    ) -> tuple[Array, "Guard"]:
        """Returns (reason, guard) of an update; the loss is in nats.

        reason (int32) is an index of REASONS, 0 if the update is to be made. Only
        updates that are made enter the mean loss: a plain mean of the first
        WARM_UPDATES, which starts unbiased, then an exponential one with DECAY.
        max_loss_factor = 0 sets no limit.
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
        # A NaN in one of them does not reach the other.
        select = functools.partial(jnp.where, reason == 0)
        return reason, jax.tree.map(select, good, bad)


def explain(metrics: dict[str, Any]) -> dict[str, Any]:
    """Replaces the reason's code in an update's metrics with its text."""
    return {**metrics, "reason": REASONS[metrics["reason"]]}
