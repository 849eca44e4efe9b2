"""Trains this project's model and Hugging Face's side by side.

    python -m experiments.benchmarks.training [--seeds=40] [--data_dir=DIR]

Both start from the port's weights and read the same segments of WikiText-2, with
memory, Adam and clipping. Without dropout, the losses of the first updates are
compared; later, both sides amplify rounding. Then each side trains with dropout masks
of its own for every seed, and this project a second time in bfloat16, with the same
masks as in float32; this project evaluates all three models on the validation split. A
seed takes about two minutes of one core and adds a row to training.jsonl; seeds that
have one are not repeated. training.md has the means of all rows. Needs the extra
`bench`.

Dims: B streams, L segment.
"""

import argparse
import dataclasses
import functools
import itertools
import logging
import math
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from experiments.benchmarks import peer, record, subject
from experiments.figures import program
from txl_jax.convert import huggingface
from txl_jax.data.options import DataConfig
from txl_jax.data.streams import Position, Streams
from txl_jax.data.tokens import Tokens, prepare
from txl_jax.errors import refuse
from txl_jax.evaluate.options import EvalConfig
from txl_jax.evaluate.perplexity import make_evaluate
from txl_jax.model.config import ModelConfig
from txl_jax.model.segment import Segment
from txl_jax.model.txl import TransformerXL
from txl_jax.sharding.rules import place_segments
from txl_jax.update.optim import make_optimizer, make_schedule
from txl_jax.update.options import OptimConfig, TrainConfig
from txl_jax.update.state import init_state
from txl_jax.update.step import make_train_step

# Hugging Face's library has no empty memory.
MODEL = ModelConfig(
    cutoffs=(2000, 10_000),
    div_val=4,
    n_layer=3,
    d_model=128,
    n_head=4,
    d_head=32,
    d_inner=512,
    mem_len=32,
    initial_memory="zeros",
)
TRAIN = TrainConfig(batch_size=16, tgt_len=32)
OPTIM = OptimConfig(lr=1e-3, warmup_steps=100)
EVAL = EvalConfig(streams=8, tgt_len=64, mem_len=64)
LINES, PAGE = (Path(__file__).parent / f"training.{end}" for end in ("jsonl", "md"))
SIDES = {"float32": "float32", "bfloat16": "bfloat16", "peer": "Hugging Face's port"}
POINTS = 10  # in a training curve


class Trained(NamedTuple):
    """The losses of the updates in nats, and the parameters after them."""

    losses: list[float]
    params: Any


class Task(NamedTuple):
    """Training for both sides: a model, its tokens, the number of updates, a seed."""

    config: ModelConfig
    tokens: Tokens
    updates: int
    seed: int

    def segments(self) -> Iterator[Segment]:
        """Yields the segments that the updates read."""
        streams = Streams(self.tokens.split("train"), TRAIN.batch_size, TRAIN.tgt_len)
        position = Position()
        for _ in range(self.updates):
            segment, position = streams.batch(position)
            yield segment


@functools.lru_cache
def make_step(config: ModelConfig, updates: int) -> Callable[..., Any]:
    """Returns the compiled training step."""
    optimizer, schedule = make_optimizer(OPTIM), make_schedule(OPTIM, updates)
    step = make_train_step(TransformerXL(config), optimizer, schedule, TRAIN)
    return jax.jit(step, donate_argnums=0)


@functools.lru_cache
def make_evaluation(config: ModelConfig) -> Callable[..., Any]:
    """Returns the compiled evaluation."""
    return make_evaluate(config, EVAL, subject.one_device())


def make_peer(task: Task) -> Any:
    """Returns Hugging Face's model with random weights."""
    import torch

    torch.manual_seed(task.seed)
    return peer.Model(task.config).model


def read_peer(model: Any) -> Any:
    """Returns the parameters of Hugging Face's model."""
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        return huggingface.from_pretrained(folder)[1]


def train_ours(task: Task, initial: Any) -> Trained:
    """Trains this project's model from the parameters."""
    mesh, optimizer = subject.one_device(), make_optimizer(OPTIM)
    init, like = init_state(task.config, optimizer, TRAIN.batch_size, task.seed, mesh)
    places = jax.tree.map(lambda x: x.sharding, like.params)
    state, losses = init().start_from(jax.device_put(initial, places)), []
    step = make_step(task.config, task.updates)
    for segment in task.segments():
        state, metrics = step(state, place_segments(mesh, segment))
        losses.append(float(metrics["loss"].mean()))
    return Trained(losses, jax.device_get(state.params))


def train_peer(task: Task, model: Any) -> Trained:
    """Trains Hugging Face's model."""
    import torch

    model.train()
    optimizer = torch.optim.Adam(model.parameters())
    memory, losses, rate = None, [], make_schedule(OPTIM, task.updates)
    for number, segment in enumerate(task.segments()):
        inputs_BL, targets_BL = (
            torch.from_numpy(x_SBL[0].astype(np.int64))
            for x_SBL in (segment.inputs_SBL, segment.targets_SBL)
        )
        hidden_BLD, memory = model.transformer(inputs_BL, memory)[:2]
        # Its softmax drops the last hidden state and the first target.
        padded_BLD = torch.cat([hidden_BLD, hidden_BLD[:, -1:]], 1)
        padded_BL = torch.cat([targets_BL[:, :1], targets_BL], 1)
        loss = model.crit(padded_BLD, padded_BL).mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), OPTIM.clip)
        for group in optimizer.param_groups:
            group["lr"] = float(rate(number))
        optimizer.step()
        losses.append(loss.item())
    return Trained(losses, read_peer(model))


def compare_without_dropout(task: Task) -> dict[str, Any]:
    """Returns the row of the training without dropout: the differences in loss."""
    task = task._replace(config=dataclasses.replace(task.config, dropout=0.0))
    model = make_peer(task)
    initial = read_peer(model)
    ours = train_ours(task, initial)
    pairs = zip(ours.losses, train_peer(task, model).losses, strict=True)
    return {
        "seed": None,
        "updates": task.updates,
        "parameters": sum(x.size for x in jax.tree.leaves(initial)),
        "largest_difference_nats": max(abs(a - b) for a, b in pairs),
    }


def compare_with_dropout(task: Task) -> dict[str, Any]:
    """Returns the row of a seed: validation loss and training curve of each side.

    All three models are evaluated in float32.
    """
    config, valid = task.config, task.tokens.split("valid")
    bfloat16 = task._replace(config=dataclasses.replace(config, dtype="bfloat16"))
    model = make_peer(task)
    initial = read_peer(model)
    tasks = {"float32": task, "bfloat16": bfloat16}
    trained = {side: train_ours(each, initial) for side, each in tasks.items()}
    trained["peer"] = train_peer(task, model)
    row: dict[str, Any] = {"seed": task.seed, "updates": task.updates}
    row["dropout"] = config.dropout
    for side, (losses, params) in trained.items():
        scores = make_evaluation(config)(params, valid, lambda *_: None)
        points = np.array_split(losses, min(POINTS, len(losses)))
        curve = [round(float(point.mean()), 5) for point in points]
        row[side] = {"valid_nats": round(scores["nll"], 5), "curve_nats": curve}
    return row


def page(rows: list[dict[str, Any]]) -> str:
    """Returns the Markdown of all rows."""
    first = next(row for row in rows if row["seed"] is None)
    most = math.ceil(first["largest_difference_nats"] * 1e5) / 1e5
    text = (
        f"Without dropout, the losses of the first {first['updates']} updates differ "
        f"by at most {most:.5f} nats.\n"
    )
    seeds = [row for row in rows if row["seed"] is not None]
    if not seeds:
        return text
    text += (
        f"With dropout {seeds[0]['dropout']}: mean ± standard deviation over "
        f"{len(seeds)} seeds, in nats; paired differences: mean ± standard error.\n"
    )
    valid = {s: np.array([row[s]["valid_nats"] for row in seeds]) for s in SIDES}
    curves = {s: np.array([row[s]["curve_nats"] for row in seeds]) for s in SIDES}
    lines = [["validation", *map(format_spread, valid.values())]]
    differences = (
        "" if side == "float32" else format_difference(valid["float32"] - x)
        for side, x in valid.items()
    )
    lines.append(["paired difference, float32 − column", *differences])
    count = curves["float32"].shape[1]
    ends = np.linspace(0, seeds[0]["updates"], count + 1).astype(int)
    for point, (start, end) in enumerate(itertools.pairwise(ends)):
        means = (format_spread(curve[:, point]) for curve in curves.values())
        lines.append([f"training, updates {start + 1} to {end}", *means])
    return "\n".join([text, *record.table(["", *SIDES.values()], lines)]) + "\n"


def format_spread(values: np.ndarray) -> str:
    """Formats the mean and, of several values, the standard deviation."""
    several = f" ± {values.std(ddof=1):.4f}" if len(values) > 1 else ""
    return f"{values.mean():.4f}{several}"


def format_difference(values: np.ndarray) -> str:
    """Formats the mean and, of several values, its standard error."""
    error = values.std(ddof=1) / len(values) ** 0.5 if len(values) > 1 else 0.0
    return f"{values.mean():+.4f}" + (f" ± {error:.4f}" if error else "")


def compare(args: argparse.Namespace) -> None:
    """Measures the seeds that are missing."""
    library, is_alone = peer.describe(), args.tiny and not args.out
    refuse(library.startswith("not "), f"the peer is {library}")
    refuse(is_alone, "--tiny needs --out, so that its rows do not mix with others")
    folder = args.out or LINES.parent
    lines, table = folder / LINES.name, folder / PAGE.name
    warnings.filterwarnings("ignore", module="transformers")
    logging.getLogger("transformers").setLevel(logging.ERROR)
    tokens = prepare(DataConfig("wikitext2", vocab="word", data_dir=args.data_dir))
    config = dataclasses.replace(MODEL, vocab_size=len(tokens.vocab))
    first, updates = (2, 4) if args.tiny else (100, 600)
    origin = record.provenance() | {"library": library}

    def measure(row: dict[str, Any]) -> dict[str, Any]:
        if row["seed"] is None:
            return compare_without_dropout(Task(config, tokens, first, 0)) | origin
        return compare_with_dropout(Task(config, tokens, updates, row["seed"])) | origin

    seeds = (None, *range(args.first_seed, args.first_seed + args.seeds))
    record.fill(lines, table, page, [{"seed": seed} for seed in seeds], measure)


def main(argv: list[str] | None = None) -> int:
    parser = record.plain_parser(__doc__)
    parser.add_argument("--seeds", type=record.positive, default=40, help="how many")
    parser.add_argument("--first_seed", type=int, default=0, help="the first seed")
    parser.add_argument("--data_dir", default="data", help="folder of prepared corpora")
    text = "folder of training.jsonl and training.md"
    parser.add_argument("--out", type=program.path, help=text)
    parser.add_argument("--tiny", action="store_true", help="try it with 4 updates")
    return program.run(parser, compare, argv, prints=True)


if __name__ == "__main__":
    sys.exit(main())
