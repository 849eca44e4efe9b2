"""Compares the attention kernels at a list of shapes; prints one JSON line.

    python -m experiments.benchmarks.attention [--shapes=2x8x512+512x64 ..]

A shape is streams x heads x queries + memory x head size. The benchmark times the sum
of the squared outputs and its gradient with respect to every input of the kernel.

Dims: B streams, H heads, L queries, M memory, K = M + L keys, A head.
"""

import argparse
import re
import sys
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from experiments.benchmarks import gradients, quiet, record
from txl_jax.kernels.dispatch import KERNELS
from txl_jax.kernels.hash import AttentionDropout
from txl_jax.kernels.operands import Operands, PositionTerms

SHAPES = ["8x8x128+128x32", "4x10x150+150x41", "2x8x512+512x64", "1x8x2048+2048x64"]
TINY = ["1x2x8+8x4"]


def read_shape(text: str) -> tuple[int, ...]:
    """Parses a shape such as 2x8x512+512x64 into (B, H, L, M, A)."""
    match = re.fullmatch(r"(\d+)x(\d+)x(\d+)\+(\d+)x(\d+)", text)
    if not match:
        raise argparse.ArgumentTypeError(f"{text!r} is not a shape such as {SHAPES[0]}")
    return tuple(map(int, match.groups()))


def attend(
    args: argparse.Namespace, watch: quiet.Watch, shape: tuple[int, ...]
) -> dict[str, Any]:
    """Measures the kernels at one shape."""
    B, H, L, M, A = shape
    K = M + L
    shapes = [(B, L, H, A), (B, K, H, A), (B, K, H, A), (K, H, A), (H, A), (H, A)]
    keys = jax.random.split(jax.random.key(0), len(shapes))
    arguments = tuple(map(jax.random.normal, keys, shapes))
    oldest_BL = jnp.zeros((B, L), jnp.int32)
    dropout = AttentionDropout(args.dropatt, jnp.uint32(1)) if args.dropatt else None

    def make_loss(kernel: Any) -> gradients.Loss:
        def loss(*arguments: Array) -> Array:
            q_BLHA, k_BKHA, v_BKHA, *terms = arguments
            position = PositionTerms(*terms)
            return jnp.sum(
                kernel(Operands(q_BLHA, k_BKHA, v_BKHA, position, oldest_BL, dropout))
                ** 2
            )

        return loss

    losses = {name: make_loss(KERNELS[name]) for name in args.kernels}
    name = f"{B}x{H}x{L}+{M}x{A}"
    return gradients.compare(name, B * L, losses, arguments, args, watch)


def measure(args: argparse.Namespace, watch: quiet.Watch) -> dict[str, Any]:
    """Measures each shape."""
    shapes = map(read_shape, TINY) if args.tiny else args.shapes
    return {"cases": [attend(args, watch, shape) for shape in shapes]}


def main(argv: list[str] | None = None) -> int:
    parser = record.make_parser(__doc__)
    shapes = list(map(read_shape, SHAPES))
    parser.add_argument("--shapes", nargs="+", type=read_shape, default=shapes)
    parser.add_argument(
        "--kernels", nargs="+", choices=list(KERNELS), default=["chunked", "xla"]
    )
    parser.add_argument("--dropatt", type=float, default=0.0)
    return record.run("attention", parser, measure, argv)


if __name__ == "__main__":
    sys.exit(main())
