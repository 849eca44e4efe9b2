"""What is learned of the copying task, as against what can be reached: a figure.

    python -m experiments.figures.copying [--delays 8 24 56 --mem_lens 0 16 64]

Trains experiments/copying.py for each delay, memory and seed, and counts the letters
that are given back right. Started again, it goes on where it was killed: every cell has
a workdir, and its result. Prints one JSON line and writes copying.json and copying.png.
"""

import argparse
import contextlib
import json
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import matplotlib.figure
import numpy as np
from absl import logging
from jax import Array

from txl_jax import config as configs
from txl_jax import restore, workdir
from txl_jax.config import Config
from txl_jax.data import tokens as token_files
from txl_jax.data.copying import FIRST_ANSWER
from txl_jax.data.streams import Segment, Streams
from txl_jax.data.tokens import Tokens
from txl_jax.errors import Interrupted, UserError
from txl_jax.evaluate.reach import farthest
from txl_jax.lock import locked
from txl_jax.model.memory import Memory
from txl_jax.report.writer import say
from txl_jax.train import train

EXPERIMENT = Path(__file__).parents[1] / "copying.py"
RESULT = "accuracy.json"
# Of the plot: how far something reaches, and how that is drawn.
BARS: dict[str, dict[str, Any]] = {
    "seen_by_all_tokens": {"linewidth": 5, "solid_capstyle": "butt"},
    "seen_by_last_tokens": {"linewidth": 2},
    "reach_tokens": {"linewidth": 2, "linestyle": ":"},
}
STREAMS = 8  # of the test; each starts cold


def read_flags() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    delays = [4, 8, 16, 24, 32, 40, 56]
    parser.add_argument("--delays", type=int, nargs="+", default=delays)
    parser.add_argument("--mem_lens", type=int, nargs="+", default=[0, 16, 32, 64])
    parser.add_argument("--seeds", type=int, nargs="+", default=[1])
    parser.add_argument("--updates", type=int, default=400)
    parser.add_argument("--workdir", type=Path, default=Path("runs/figures/copying"))
    parser.add_argument("--data_dir", default="", help="as data.data_dir")
    return parser.parse_args()


def make_config(given: argparse.Namespace, cell: dict[str, int]) -> Config:
    """Returns the config of a cell: experiments/copying.py with its sizes."""
    c = configs.load(str(EXPERIMENT))
    c.data.update(copy_delay=cell["delay"], data_dir=given.data_dir)
    c.train.update(seed=cell["seed"], num_steps=given.updates)
    c.train.update(eval_every=given.updates)
    for section in (c.model, c.eval, c.generate):
        section.mem_len = cell["mem_len"]
    return configs.parse(c)


def run_cell(given: argparse.Namespace, cell: dict[str, int]) -> dict[str, Any]:
    """Returns a cell's result, trained and counted unless that is on disk."""
    config = make_config(given, cell)
    name = "-".join(f"{key}={value}" for key, value in cell.items())
    folder = given.workdir / f"{name}-updates={given.updates}"
    if (folder / RESULT).exists():
        return json.loads((folder / RESULT).read_text("utf-8"))
    say(f"copying: {folder}")
    found = cell | describe(config) | train_and_count(config, folder)
    folder.mkdir(parents=True, exist_ok=True)
    fresh = folder / f"{RESULT}.tmp"
    fresh.write_text(json.dumps(found) + "\n", "utf-8")
    fresh.replace(folder / RESULT)
    return found


def train_and_count(config: Config, folder: Path) -> dict[str, float]:
    """Returns what `count` finds after training, which goes on where it was killed."""
    tokens = token_files.prepare(config.data, say)
    config = workdir.fit_vocab(config, len(tokens.vocab))
    with locked(folder):
        workdir.claim(folder, config, tokens)
        train(config, folder, tokens.split("train"), tokens.split("valid"))
    return count(restore.load(folder), tokens)


def describe(config: Config) -> dict[str, int]:
    """Returns what a cell's model can see, and how far its answers are, in tokens."""
    tgt_len = config.train.tgt_len
    return {
        "distance_tokens": config.data.task.distance,
        "tgt_len": tgt_len,
        "seen_by_all_tokens": config.model.mem_len,
        "seen_by_last_tokens": farthest(config.model, tgt_len, 1),
        "reach_tokens": farthest(config.model, tgt_len),
    }


def count(loaded: restore.Loaded, tokens: Tokens) -> dict[str, float]:
    """Returns the share of answers in the test that are the likeliest, and their nll.

    A letter is an answer: the model sees the letters before it.
    """
    model, tgt_len = loaded.model, loaded.config.eval.tgt_len
    streams = Streams(
        tokens.split("test"), STREAMS, tgt_len, score_ids_from=FIRST_ANSWER
    )

    @jax.jit
    def step(params: Any, memory: Memory, segment: Segment) -> tuple[Memory, Array]:
        result: Any = model.apply(
            {"params": params},
            segment.inputs_SBL[0],
            memory,
            length_B=segment.length_SB[0],
            method="logits",
        )
        logits_BLV, memory = result
        targets_BL = segment.targets_SBL[0]
        nll_BL = -jnp.take_along_axis(logits_BLV, targets_BL[..., None], -1)[..., 0]
        right_BL = jnp.argmax(logits_BLV, axis=-1) == targets_BL
        weights_BL = segment.weights_SBL[0]
        sums = [jnp.sum(weights_BL * x_BL) for x_BL in (1, right_BL, nll_BL)]
        return memory, jnp.stack(sums)

    params = jax.device_get(loaded.params)  # so few are read by one device
    memory = Memory.empty(model.config, STREAMS)
    total = np.zeros(3)
    for segment in streams.epoch():
        memory, sums = step(params, memory, segment)
        total += np.asarray(sums, np.float64)
    answers, right, nll = total.tolist()
    return {
        "answers": int(answers),
        "accuracy": right / answers,
        "nll_nats": nll / answers,
    }


def plot(cells: list[dict[str, Any]], chance: float, path: Path) -> None:
    """Draws accuracy against distance for each memory, with what it can see."""
    figure = matplotlib.figure.Figure(figsize=(8, 4.2), layout="constrained")
    axes = figure.add_subplot()
    distances = sorted({cell["distance_tokens"] for cell in cells})
    for number, mem_len in enumerate(sorted({cell["mem_len"] for cell in cells})):
        own = [cell for cell in cells if cell["mem_len"] == mem_len]
        by_distance = [
            [cell["accuracy"] for cell in own if cell["distance_tokens"] == distance]
            for distance in distances
        ]
        mean, low, high = (
            np.array([pick(values) for values in by_distance])
            for pick in (np.mean, np.min, np.max)
        )
        color = f"C{number}"
        axes.plot(
            distances, mean, "o-", color=color, label=f"memory {mem_len}", markersize=4
        )
        axes.fill_between(distances, low, high, color=color, alpha=0.2, linewidth=0)
        height = 1.04 + 0.035 * number
        start = 0
        for name, style in BARS.items():
            axes.plot([start, own[0][name]], [height, height], color=color, **style)
            start = own[0][name]
    axes.axhline(chance, color="gray", linestyle="--", linewidth=1)
    axes.annotate("chance", (0.995, chance), xycoords=("axes fraction", "data"),
                  ha="right", va="bottom", fontsize=8, color="gray")  # fmt: skip
    axes.set(
        xlabel="how many tokens back the letter is that comes next",
        ylabel="answers that are right",
        xlim=(0, 1.08 * max(distances)),
        ylim=(0, None),
        yticks=np.arange(0, 1.01, 0.2),
    )
    axes.set_title(
        "above: what every token of a segment sees (thick), what its last sees (thin), "
        "what all layers reach (dotted)",
        fontsize=9,
    )
    axes.legend(fontsize=8, loc="lower left")
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=100)


def main() -> int:
    given = read_flags()
    logging.set_verbosity(logging.FATAL)  # orbax warns of what is meant
    grid = [
        {"delay": delay, "mem_len": mem_len, "seed": seed}
        for seed in given.seeds
        for delay in given.delays
        for mem_len in given.mem_lens
    ]
    try:
        # What a library prints is not to be the result.
        with contextlib.redirect_stdout(sys.stderr):
            cells = [run_cell(given, cell) for cell in grid]
    except (UserError, Interrupted) as error:
        print(f"copying: {error}", file=sys.stderr)
        return 2
    symbols = make_config(given, grid[0]).data.copy_symbols
    picture = given.workdir / "copying.png"
    plot(cells, 1 / symbols, picture)
    result = {
        "program": "copying",
        "chance": 1 / symbols,
        "updates": given.updates,
        "cells": cells,
        "picture": str(picture),
    }
    said = json.dumps(result)
    (given.workdir / "copying.json").write_text(said + "\n", "utf-8")
    print(said)
    return 0


if __name__ == "__main__":
    sys.exit(main())
