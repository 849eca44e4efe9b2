"""Similarity of distances, and sensitivity to the order of the memory.

    python -m txl_jax.experiments.figures.positions [--d_model=512] \\
        [--workdir=runs/quickstart]

Draws the cosine of the encodings of two distances against their difference, and prints
it at a few differences in one JSON line. With a workdir, the line also has the temporal
confusion of section 3.3: how much the model's predictions change when two segments in
the memory change places, and how much with positions counted within each segment.

Dims: B streams, L segment, M memory, N layers, D model, R distances, V vocabulary.
"""

import argparse
import dataclasses
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import matplotlib.figure
import numpy as np
from jax import Array

from txl_jax.data import tokens as token_files
from txl_jax.errors import UserError
from txl_jax.model.config import ModelConfig
from txl_jax.model.memory import Memory
from txl_jax.model.positions import sinusoid_RD
from txl_jax.model.txl import TransformerXL
from txl_jax.workdir import load

from . import program

DISTANCES = (1, 10, 100, 1000)


def similarity(d_model: int, distance_R: np.ndarray) -> np.ndarray:
    """Returns the cosine of the encodings of two distances that differ by distance_R.

    It depends on the difference alone: the mean of cos(d f_k) over the frequencies.
    """
    rows_RD = np.asarray(sinusoid_RD(jnp.asarray(distance_R), d_model))
    zero_D = np.asarray(sinusoid_RD(jnp.zeros(1), d_model))[0]
    # sin^2 + cos^2 = 1 for each of the D / 2 frequencies.
    return rows_RD @ zero_D / (d_model / 2)


def order_confusion(config: ModelConfig, params: Any, tokens_B3L: np.ndarray) -> float:
    """Returns how much a prediction depends on the order of the memory, in nats.

    Reads two segments, then a third twice: with the memory as it is, and with the two
    segments in the memory exchanged. The mean absolute difference of the third's
    log-probabilities is 0, but for rounding, if positions count within each token's
    own segment: a sum over keys has no order. config.mem_len is not used.
    """
    B, width = tokens_B3L.shape
    L = width // 3
    model, variables = TransformerXL(config), {"params": params}
    # A config with absolute positions may not set mem_len, but can read any memory.
    empty = Memory.empty(config, B, mem_len=2 * L)

    def predict(tokens_BL: Array, memory: Memory) -> tuple[Array, Memory]:
        return model.apply(variables, tokens_BL, memory, method="logits")  # type: ignore

    @jax.jit
    def compare(tokens_B3L: Array) -> Array:
        memory = empty
        for begin in (0, L):
            _, memory = predict(tokens_B3L[:, begin : begin + L], memory)
        h_NBMD = jnp.roll(memory.h_NBMD, L, axis=2)
        exchanged = dataclasses.replace(memory, h_NBMD=h_NBMD)
        one_BLV, other_BLV = (
            predict(tokens_B3L[:, 2 * L :], each)[0] for each in (memory, exchanged)
        )
        return jnp.mean(jnp.abs(one_BLV - other_BLV))

    return float(compare(tokens_B3L))


def measure_confusion(folder: Path, streams: int = 8) -> dict[str, float]:
    """Returns `order_confusion` of a workdir's model, by position scheme.

    The other scheme is sinusoidal: a token in the memory keeps the position that it had
    in its own segment.
    """
    loaded = load.load(folder)
    config, L = loaded.config.model, loaded.config.train.tgt_len
    if config.fast_weights or not config.mem_len:
        raise UserError(f"--workdir={folder}: its model lacks the paper's memory")
    data = loaded.config.data, loaded.vocab, loaded.trained_on
    text_T = token_files.prepare(*data).split("test")
    if len(text_T) < streams * 3 * L:
        raise UserError(f"the test split has fewer than {streams * 3 * L} tokens")
    tokens_B3L = np.asarray(text_T[: streams * 3 * L], np.int32).reshape(streams, -1)
    params = jax.device_get(loaded.params)
    absolute = dataclasses.replace(
        config, position="sinusoidal", mem_len=0, same_length=False, untie_r=False
    )
    return {
        each.position: order_confusion(each, params, tokens_B3L)
        for each in (config, absolute)
    }


def plot(d_model: int, longest: int, path: Path) -> None:
    """Draws the cosine of two distances against their difference."""
    figure = matplotlib.figure.Figure(figsize=(8, 4), layout="constrained")
    axes = figure.add_subplot()
    distance_R = np.unique(np.geomspace(1, longest, 400).astype(int))
    cosine_R = similarity(d_model, distance_R)
    axes.plot(distance_R, cosine_R, color="tab:blue", linewidth=1)
    axes.axhline(0, color="gray", linewidth=0.8)
    axes.set_xscale("log")
    axes.set(
        xlim=(1, longest),
        xlabel="difference of two distances",
        ylabel=f"cosine of their R (d_model {d_model})",
    )
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=100)


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Returns the cosines, and the confusion of a workdir's model; draws the curve."""
    if args.d_model % 2:
        raise UserError(f"--d_model={args.d_model} must be even")
    cosine_R = similarity(args.d_model, np.array(DISTANCES))
    result: dict[str, Any] = {
        "program": "positions",
        "d_model": args.d_model,
        "cosine": dict(zip(DISTANCES, cosine_R.round(4).tolist(), strict=True)),
        "picture": str(args.picture),
    }
    if args.workdir:
        result["order_confusion_nats"] = measure_confusion(args.workdir)
    plot(args.d_model, args.longest, args.picture)
    return result


def main(argv: list[str] | None = None) -> int:
    parser = program.make_parser(__doc__)
    parser.add_argument("--d_model", type=program.count, default=512)
    parser.add_argument(
        "--longest", type=program.count, default=4000, help="of the differences"
    )
    parser.add_argument("--workdir", type=program.path, help="a run with a memory")
    parser.add_argument(
        "--picture", type=program.picture, default=Path("similarity.png")
    )
    return program.run(parser, measure, argv)


if __name__ == "__main__":
    sys.exit(main())
