"""Compares the values and gradients of functions that compute the same result."""

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
    args: argparse.Namespace,
    watch: quiet.Watch,
) -> dict[str, Any]:
    """Times each loss together with its gradient with respect to all arguments.

    memory_ratio: the second loss's temporary memory divided by the first's.
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
    timings = quiet.alternate(programs, args.repeats, watch)
    more = {side: program.describe() for side, program in compiled.items()}
    case = record.case(name, tokens, timings, **more)
    first, *rest = (numbers["temporary_bytes"] for numbers in more.values())
    if first and all(rest):
        case["memory_ratio"] = round(rest[0] / first, 2)
    return case
