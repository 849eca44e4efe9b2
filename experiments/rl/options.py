"""The flags of a run, each a field."""

import dataclasses
import math

from txl_jax.errors import UserError
from txl_jax.fields import Section, at_least, field, fraction, one_of, positive
from txl_jax.model.config import GATES

from .environments import ENVIRONMENTS

CORES = ("transformer_xl", "gru")


@dataclasses.dataclass(frozen=True)
class Options(Section, name="ppo"):
    """The flags of a run."""

    environment: str = field("t_maze", one_of(ENVIRONMENTS), help="The task.")
    length: int = field(
        10, at_least(1), help="Steps to the junction or the end; k of repeat_previous."
    )
    gymnax: str = field("", help="An environment of gymnax instead.")
    core: str = field("transformer_xl", one_of(CORES), help="The agent's memory.")
    gate: str = field("none", one_of(GATES), help="As model.gate.")
    fast_weights: bool = field(False, help="As model.fast_weights.")
    n_layer: int = field(
        2, at_least(1), help="Layers; the GRU has one, with as many parameters."
    )
    d_model: int = field(32, at_least(2), help="Features of a step.")
    n_head: int = field(2, at_least(1), help="Heads of attention.")
    mem_len: int = field(64, help="Steps that the memory holds.")
    streams: int = field(64, at_least(1), help="Environments side by side.")
    steps: int = field(64, at_least(1), help="Steps of each between two updates.")
    segment_len: int = field(32, at_least(1), help="Steps that are read in one call.")
    gradient_segments: int = field(
        1, at_least(1), help="Segments that a gradient crosses."
    )
    updates: int = field(100, at_least(1), help="Updates of the run.")
    epochs: int = field(4, at_least(1), help="Passes over the steps of an update.")
    minibatches: int = field(
        4, at_least(1), help="Parts of an epoch; each has some of the streams."
    )
    lr: float = field(1e-3, positive, help="Learning rate; it decays to 0 linearly.")
    discount: float = field(0.99, fraction, help="Of later rewards.")
    trace_decay: float = field(0.95, fraction, help="Lambda of the advantages.")
    clip: float = field(0.2, positive, help="Largest change of the probability ratio.")
    entropy: float = field(0.01, help="Weight of the entropy bonus.")
    seed: int = field(1, help="Seed of parameters, environments and actions.")
    solved: float = field(
        0.9,
        at_least(-math.inf),
        help="The return from which the task counts as solved.",
    )
    stop: bool = field(False, help="Stops once the task is solved.")
    save_every: int = field(50, at_least(1), help="Updates between checkpoints.")

    def __post_init__(self) -> None:
        """Raises UserError for values that do not fit together."""
        super().__post_init__()
        if self.steps % self.call_len:
            raise UserError(
                f"steps = {self.steps} is not divisible by segment_len x "
                f"gradient_segments = {self.call_len}: change one of them"
            )
        if self.streams % self.minibatches:
            raise UserError(
                f"streams = {self.streams} is not divisible by minibatches = "
                f"{self.minibatches}: change one of them"
            )
        task = self.environment, self.length
        if self.gymnax and task != (Options.environment, Options.length):
            raise UserError(
                f"gymnax = {self.gymnax!r} has a length of its own and replaces the "
                "environment: leave out environment and length"
            )
        if self.core == "gru" and (self.gate != "none" or self.fast_weights):
            raise UserError(
                "gate and fast_weights are for the Transformer-XL: leave them out, or "
                'set core = "transformer_xl"'
            )

    @property
    def call_len(self) -> int:
        """L, the number of steps that a gradient crosses."""
        return self.segment_len * self.gradient_segments
