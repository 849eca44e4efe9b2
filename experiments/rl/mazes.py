"""The return of agents against the length of a T-maze or another task: a figure.

    python -m txl_jax.experiments.rl.mazes [--lengths 10 25 50 100 200 \\
        --seeds 1 2 3 4 5]
    python -m txl_jax.experiments.rl.mazes --environment=repeat_previous \\
        --lengths 4 32 64

Trains every agent of AGENTS, at equal parameters and steps, for each length and seed.
Every cell has its own workdir and result, so the same command resumes after a kill.
Prints one JSON line and writes mazes.json and mazes.png; with --finished, it trains
nothing and omits the cells that have no result yet.
"""

import argparse
import itertools
import sys
from pathlib import Path
from typing import Any

import numpy as np

from txl_jax.errors import refuse
from txl_jax.report import plots
from txl_jax.report.log import say
from txl_jax.report.output import to_json
from txl_jax.runtime import programs
from txl_jax.runtime.storage import Json, refusing_damage, write_atomically
from txl_jax.workdir.results import cached

from ..figures import program
from . import ppo
from .environments import ENVIRONMENTS

# The flags of each agent.
AGENTS: dict[str, dict[str, Any]] = {
    "Transformer-XL": {},
    "gated": {"gate": "gru", "d_model": 24},  # its gates have parameters, too
    "gradients across segments": {"gradient_segments": 4},
    "fast weights": {"fast_weights": True},
    "GRU": {"core": "gru", "gradient_segments": 4},
}
RESULT = "result.json"


def make_parser() -> argparse.ArgumentParser:
    """Returns the parser of the flags."""
    parser = program.make_parser(__doc__)
    lengths = [10, 25, 50, 100, 200]
    parser.add_argument("--environment", choices=ENVIRONMENTS, default="t_maze")
    parser.add_argument("--lengths", type=int, nargs="+", default=lengths)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3, 4, 5])
    parser.add_argument("--agents", nargs="+", choices=AGENTS, default=[*AGENTS])
    parser.add_argument("--updates", type=int, default=100)
    parser.add_argument("--workdir", type=program.path, default=Path("runs/rl/mazes"))
    parser.add_argument("--finished", action="store_true", help="train nothing")
    parser.add_argument("--stop", action="store_true", help="stop at solved mazes")
    return parser


def make_options(
    args: argparse.Namespace, length: int, agent: str, seed: int
) -> ppo.Options:
    """Returns the flags of a cell."""
    flags: dict[str, Any] = {"d_model": 36, "steps": 128, **AGENTS[agent]}
    return ppo.Options(
        environment=args.environment,
        length=length,
        seed=seed,
        updates=args.updates,
        stop=args.stop,
        **flags,
    )


def run_cell(folder: Path, options: ppo.Options) -> Json:
    """Trains a cell unless its result is on disk; returns the result."""

    def train() -> Json:
        say(f"mazes: {folder}")
        return ppo.train(options, folder)

    path = folder / RESULT
    result = cached(path, {}, train)
    returns = "return", "max_return", "best_return"
    names = "parameters", "steps", *returns, "solved_after", "provenance"
    with refusing_damage(path):
        seconds = sum(result["seconds"].values())
        return {**{name: result[name] for name in names}, "seconds": seconds}


def plot(cells: list[Json], path: Path) -> None:
    """Draws the return of every seed, and their mean, against the length, by agent."""
    agents = dict.fromkeys(cell["agent"] for cell in cells)
    figure = plots.empty(1 + 2 * len(agents), 3)
    panels = figure.subplots(1, len(agents), sharex=True, sharey=True, squeeze=False)
    lengths = sorted({cell["length"] for cell in cells})
    for axes, agent in zip(panels[0], agents, strict=True):
        by_length: dict[int, list[float]] = {}
        for cell in cells:
            if cell["agent"] == agent:
                name = "best_return" if "best_return" in cell else "return"
                by_length.setdefault(cell["length"], []).append(cell[name])
        means = [np.mean(by_length[length]) for length in sorted(by_length)]
        axes.plot(sorted(by_length), means, color="#0072B2")
        for length, returns in by_length.items():
            style = {"color": "#0072B2", "alpha": 0.5, "clip_on": False}
            axes.plot([length] * len(returns), returns, "o", markersize=4, **style)
        axes.set_title(agent, fontsize=9)
        axes.set_xscale("log")
        axes.set_xticks(lengths, list(map(str, lengths)))
        axes.set_xticks([], minor=True)
    figure.supxlabel("length of the task in steps", fontsize=10)
    panels[0][0].set_ylabel("return of an episode")
    plots.save(figure, path)


def measure(args: argparse.Namespace) -> Json:
    """Returns the result of all cells; writes it, and the picture."""
    programs.keep()  # seeds share the compiled update
    cells = []
    for cell in itertools.product(args.lengths, args.agents, args.seeds):
        length, agent, seed = cell
        options = make_options(args, length, agent, seed)
        name = f"{agent}-length={length}-seed={seed}-updates={args.updates}"
        name = f"{args.environment}-{name}".replace(" ", "_")
        folder = args.workdir / name
        if args.finished and not (folder / RESULT).exists():
            continue
        names = {"agent": agent, "length": length, "seed": seed}
        cells.append(names | run_cell(folder, options))
    refuse(not cells, f"{args.workdir} holds no finished cell: omit --finished")
    plot(cells, args.workdir / "mazes.png")
    result = {
        "program": "mazes",
        "environment": args.environment,
        "updates": args.updates,
        "lengths": args.lengths,
        "agents": args.agents,
        "seeds": args.seeds,
        "cells": cells,
    }
    write_atomically(args.workdir / "mazes.json", to_json(result) + "\n")
    return result


def main(argv: list[str] | None = None) -> int:
    return program.run(make_parser(), measure, argv)


if __name__ == "__main__":
    sys.exit(main())
