"""A training step as `txl_jax.train` compiles it, on synthetic text.

Dims: B streams, L segment.
"""

import dataclasses
from typing import Any

import jax
import numpy as np

from experiments.benchmarks import subject
from txl_jax.data.streams import Position, Streams
from txl_jax.model.config import ModelConfig
from txl_jax.model.txl import TransformerXL
from txl_jax.sharding.rules import place_segments
from txl_jax.update.optim import make_optimizer, make_schedule
from txl_jax.update.options import OptimConfig, TrainConfig
from txl_jax.update.state import init_state
from txl_jax.update.step import TrainStep

OPTIM = OptimConfig(schedule="constant")


@dataclasses.dataclass(frozen=True)
class Job:
    """A model, and the size of the segments that every update trains on.

    segments: number in an update; gradients cross `gradient_segments` of them.
    """

    config: ModelConfig
    batch_size: int
    tgt_len: int
    segments: int = 1
    gradient_segments: int = 1

    @property
    def tokens(self) -> int:
        """The number of tokens in an update."""
        return self.batch_size * self.tgt_len * self.segments

    def text(self) -> np.ndarray:
        """Returns the tokens of one update, and the last target."""
        return subject.zipf_text(self.config.vocab_size, self.tokens + 1)


class Step:
    """The training step of a job: call `compile`, then `update` repeatedly.

    The first update allocates the state, so compilation alone needs little memory.
    """

    def __init__(self, job: Job):
        train = TrainConfig(
            batch_size=job.batch_size,
            tgt_len=job.tgt_len,
            segments_per_call=job.segments,
            segments_per_update=job.segments,
            gradient_segments=job.gradient_segments,
        )
        mesh = subject.one_device()
        optimizer = make_optimizer(OPTIM)
        self.init, self.like = init_state(
            job.config, optimizer, job.batch_size, train.seed, mesh
        )
        schedule = make_schedule(OPTIM, train.num_steps)
        model = TransformerXL(job.config)
        self.function = TrainStep(model, optimizer, schedule, train)
        streams = Streams(job.text(), job.batch_size, job.tgt_len)
        segments, _ = streams.batch(Position(), job.segments)
        self.segments = place_segments(mesh, segments)
        self.state: Any = None

    def compile(self) -> subject.Compiled:
        """Traces and compiles the step, in every call."""
        step = jax.jit(
            lambda *arguments: self.function(*arguments),
            donate_argnums=0,
            out_shardings=(jax.tree.map(lambda x: x.sharding, self.like), None),
        )
        self.compiled = subject.Compiled(step, self.like, self.segments)
        return self.compiled

    def update(self) -> None:
        """Runs one update."""
        if self.state is None:
            self.state = self.init()
        self.state, metrics = self.compiled.call(self.state, self.segments)
        jax.block_until_ready(metrics)
