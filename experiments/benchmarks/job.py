"""A training step as `txl_jax.train` compiles it, on made-up text.

Dims: B streams, L segment.
"""

import dataclasses
from typing import Any

import jax
import numpy as np

from experiments.benchmarks import subject
from txl_jax import checkpoint
from txl_jax.data.streams import Position, Streams
from txl_jax.model.config import ModelConfig
from txl_jax.model.txl import TransformerXL
from txl_jax.optim import OptimConfig, make_optimizer, make_schedule
from txl_jax.sharding import place_segments
from txl_jax.state import init_state
from txl_jax.step import TrainConfig, make_train_step

OPTIM = OptimConfig(schedule="constant")


@dataclasses.dataclass(frozen=True)
class Job:
    """A model, and the segment that it learns from again and again."""

    config: ModelConfig
    batch_size: int
    tgt_len: int

    @property
    def tokens(self) -> int:
        """Tokens of an update."""
        return self.batch_size * self.tgt_len

    def text(self) -> np.ndarray:
        """Returns as many tokens as a segment of every stream has, and one to end."""
        return subject.zipf_text(self.config.vocab_size, self.tokens + 1)


class Step:
    """The update of a job: `compile` it, and then `update` goes on from the last one.

    The state is made with the first update; until then nothing is as large as it.
    """

    def __init__(self, job: Job):
        how = TrainConfig(batch_size=job.batch_size, tgt_len=job.tgt_len)
        mesh = subject.one_device()
        optimizer = make_optimizer(OPTIM)
        self.init, self.places = init_state(
            job.config, optimizer, job.batch_size, how.seed, mesh
        )
        schedule = make_schedule(OPTIM, how.num_steps)
        model = TransformerXL(job.config)
        self.function = make_train_step(model, optimizer, schedule, how)
        streams = Streams(job.text(), job.batch_size, job.tgt_len)
        self.segment = place_segments(mesh, streams.batch(Position())[0])
        self.state: Any = None

    def compile(self) -> subject.Compiled:
        """Traces and compiles the step, each time anew."""
        step = jax.jit(
            lambda *arguments: self.function(*arguments),
            donate_argnums=0,
            out_shardings=(self.places, None),
        )
        like = checkpoint.abstract(jax.eval_shape(self.init), self.places)
        self.compiled = subject.Compiled(step, like, self.segment)
        return self.compiled

    def update(self) -> None:
        """Makes one update."""
        if self.state is None:
            self.state = self.init()
        self.state, metrics = self.compiled.call(self.state, self.segment)
        jax.block_until_ready(metrics)
