"""The attention's kernels side by side, at a list of shapes: one JSON line.

    python -m experiments.benchmarks.attention [--shapes=2x8x512+512x64 ..]

A shape is streams x heads x queries + memory x size of a head. Measured is the value
of a sum of squares and its gradient by all that a kernel is given.

Dims: B streams, H heads, L queries, M memory, K = M + L keys, A head.
"""

import argparse
import re
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from experiments.benchmarks import gradients, quiet, record
from txl_jax.kernels.choice import KERNELS
from txl_jax.kernels.xla import Dropout

SHAPES = ["8x8x128+128x32", "4x10x150+150x41", "2x8x512+512x64", "1x8x2048+2048x64"]
TINY = ["1x2x8+8x4"]


def read_shape(text: str) -> tuple[int, ...]:
    """Returns (B, H, L, M, A) of a shape as text."""
    found = re.fullmatch(r"(\d+)x(\d+)x(\d+)\+(\d+)x(\d+)", text)
    if not found:
        raise argparse.ArgumentTypeError(f"{text!r} is not like {SHAPES[0]}")
    return tuple(map(int, found.groups()))


def attend(
    given: argparse.Namespace, watch: quiet.Watch, shape: tuple[int, ...]
) -> dict[str, Any]:
    """Measures the kernels at one shape."""
    B, H, L, M, A = shape
    K = M + L
    shapes = [(B, L, H, A), (B, K, H, A), (B, K, H, A), (K, H, A), (H, A), (H, A)]
    keys = jax.random.split(jax.random.key(0), len(shapes))
    arguments = tuple(map(jax.random.normal, keys, shapes))
    oldest_BL = jnp.zeros((B, L), jnp.int32)
    dropout = Dropout(given.dropatt, jnp.uint32(1)) if given.dropatt else None

    def make_loss(kernel: Any) -> gradients.Loss:
        def loss(*arguments: Array) -> Array:
            return jnp.sum(kernel(*arguments, None, oldest_BL, dropout) ** 2)

        return loss

    losses = {name: make_loss(KERNELS[name]) for name in given.kernels}
    name = f"{B}x{H}x{L}+{M}x{A}"
    return gradients.compare(name, B * L, losses, arguments, given, watch)


def measure(given: argparse.Namespace, watch: quiet.Watch) -> dict[str, Any]:
    """Measures each shape."""
    shapes = map(read_shape, TINY) if given.tiny else given.shapes
    return {"cases": [attend(given, watch, shape) for shape in shapes]}


def main() -> None:
    parser = record.make_parser(__doc__)
    shapes = list(map(read_shape, SHAPES))
    parser.add_argument("--shapes", nargs="+", type=read_shape, default=shapes)
    parser.add_argument(
        "--kernels", nargs="+", choices=list(KERNELS), default=["chunked", "xla"]
    )
    parser.add_argument("--dropatt", type=float, default=0.0)
    record.run("attention", parser.parse_args(), measure)


if __name__ == "__main__":
    main()
