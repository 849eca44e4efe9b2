"""Trains this project's model and Hugging Face's side by side; prints one JSON line.

    python -m experiments.benchmarks.training [--seeds=10] [--data_dir=DIR]

Both start from the same weights and read the same segments of WikiText-2, with memory,
Adam and clipping. Without dropout, the losses of the first updates are compared; later,
both sides amplify rounding. Then each side trains with dropout masks of its own for
every seed, this project scores both results on the validation split, and the seeds'
differences are averaged. Needs the extra `bench`.

Dims: B streams, L segment.
"""

import argparse
import dataclasses
import logging
import statistics
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from experiments.benchmarks import peer, record, subject
from experiments.benchmarks.quiet import Watch
from txl_jax.cli.prepare import prepare
from txl_jax.convert import huggingface
from txl_jax.data.options import DataConfig
from txl_jax.data.streams import Position, Segment, Streams
from txl_jax.data.tokens import Tokens
from txl_jax.evaluate.options import EvalConfig
from txl_jax.evaluate.perplexity import make_evaluate
from txl_jax.model.config import ModelConfig
from txl_jax.model.txl import TransformerXL
from txl_jax.sharding import place_segments
from txl_jax.update.init import init_state
from txl_jax.update.optim import make_optimizer, make_schedule
from txl_jax.update.options import OptimConfig, TrainConfig
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


class Trained(NamedTuple):
    """The losses of the updates in nats, and the parameters after them."""

    losses: list[float]
    params: Any


class Task(NamedTuple):
    """What both sides do: so many updates of a model on the tokens, from a seed."""

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

    def schedule(self) -> Callable[[Any], Any]:
        """Returns the learning rate as a function of the updates done."""
        return make_schedule(OPTIM, self.updates)


def train_ours(task: Task) -> tuple[Any, Trained]:
    """Returns the initial parameters, and the result of training."""
    mesh, optimizer = subject.one_device(), make_optimizer(OPTIM)
    init, _ = init_state(task.config, optimizer, TRAIN.batch_size, task.seed, mesh)
    state, losses = init(), []
    initial = jax.device_get(state.params)
    model = TransformerXL(task.config)
    step = jax.jit(
        make_train_step(model, optimizer, task.schedule(), TRAIN), donate_argnums=0
    )
    for segment in task.segments():
        state, metrics = step(state, place_segments(mesh, segment))
        losses.append(float(metrics["loss"].mean()))
    return initial, Trained(losses, jax.device_get(state.params))


def train_peer(task: Task, initial: Any) -> Trained:
    """Trains Hugging Face's model from the same parameters."""
    import torch
    from transformers import TransfoXLLMHeadModel

    torch.manual_seed(task.seed)
    with tempfile.TemporaryDirectory() as folder:
        huggingface.save_pretrained(
            task.config, initial, task.tokens.vocab, Path(folder)
        )
        model = TransfoXLLMHeadModel.from_pretrained(folder).train()
        optimizer = torch.optim.Adam(model.parameters(), betas=OPTIM.betas)
        memory, losses, rate = None, [], task.schedule()
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
        model.save_pretrained(folder)
        return Trained(losses, huggingface.from_pretrained(folder)[1])


def compare(values: dict[str, list[float]]) -> dict[str, Any]:
    """Returns the means of both sides, and that of the seeds' differences."""
    differences = [a - b for a, b in zip(values["ours"], values["peer"], strict=True)]
    result: dict[str, Any] = {"valid_nats": values}
    result |= {"mean_nats": {side: statistics.mean(x) for side, x in values.items()}}
    result |= {"mean_difference_nats": statistics.mean(differences)}
    if len(differences) > 1:
        error = statistics.stdev(differences) / len(differences) ** 0.5
        result |= {"standard_error_nats": error}
    return result


def measure(args: argparse.Namespace, watch: Watch) -> dict[str, Any]:
    """Compares losses without dropout, and validation losses with it."""
    watch.look()
    warnings.filterwarnings("ignore", module="transformers")
    logging.getLogger("transformers").setLevel(logging.ERROR)
    data = DataConfig("wikitext2", vocab="word", data_dir=args.data_dir)
    tokens = prepare(data)
    updates, first = (4, 2) if args.tiny else (args.updates, args.first)
    config = dataclasses.replace(MODEL, vocab_size=len(tokens.vocab))
    task = Task(dataclasses.replace(config, dropout=0.0), tokens, first, seed=0)
    initial, ours = train_ours(task)
    pairs = zip(ours.losses, train_peer(task, initial).losses, strict=True)
    result: dict[str, Any] = {
        "peer": peer.describe(),
        "parameters": sum(x.size for x in jax.tree.leaves(initial)),
        "first": first,
        "largest_difference_nats": max(abs(a - b) for a, b in pairs),
    }
    evaluate = make_evaluate(config, EVAL, subject.one_device())
    valid: dict[str, list[float]] = {"ours": [], "peer": []}
    for seed in range(args.seeds):
        task = Task(config, tokens, updates, seed)
        initial, ours = train_ours(task)
        for side, trained in (("ours", ours), ("peer", train_peer(task, initial))):
            scored = evaluate(trained.params, tokens.split("valid"), lambda *_: None)
            valid[side].append(round(scored["nll"], 5))
    return result | {"updates": updates, "dropout": config.dropout} | compare(valid)


def main() -> None:
    parser = record.make_parser(__doc__, repeats=1)
    parser.add_argument("--seeds", type=record.positive, default=10)
    parser.add_argument(
        "--first", type=record.positive, default=100, help="updates without dropout"
    )
    parser.add_argument(
        "--updates", type=record.positive, default=600, help="updates with dropout"
    )
    parser.add_argument("--data_dir", default="data", help="folder of prepared corpora")
    args = parser.parse_args()
    args.force = True  # nothing is timed
    record.run("training", args, measure)


if __name__ == "__main__":
    main()
