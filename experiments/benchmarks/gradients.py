"""Value and gradient of functions that compute the same, side by side."""

import argparse
import functools
from collections.abc import Callable
from typing import Any

import jax
from jax import Array

from experiments.benchmarks import quiet, record, subject

Loss = Callable[..., Array]


def compare(
    name: str,
    tokens: int,
    losses: dict[str, Loss],
    arguments: tuple[Any, ...],
    given: argparse.Namespace,
    watch: quiet.Watch,
) -> dict[str, Any]:
    """Returns the case of each loss, compiled with its gradient by all arguments.

    memory_ratio: how many times less temporary memory the first takes.
    """
    everything = tuple(range(len(arguments)))
    compiled = {
        side: subject.Compiled(
            jax.jit(jax.value_and_grad(loss, everything)), *arguments
        )
        for side, loss in losses.items()
    }

    def call(side: str) -> None:
        jax.block_until_ready(compiled[side].call(*arguments))

    programs = {side: functools.partial(call, side) for side in losses}
    timings = quiet.alternate(programs, given.repeats, watch)
    more = {side: found.describe() for side, found in compiled.items()}
    case = record.case(name, tokens, timings, **more)
    first, *rest = (found["temporary_bytes"] for found in more.values())
    if first and all(rest):
        case["memory_ratio"] = round(rest[0] / first, 2)
    return case
