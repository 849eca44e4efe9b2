"""The flags of a run, each a field."""

import dataclasses

from txl_jax.errors import UserError
from txl_jax.fields import at_least, check, fraction, one_of, positive
from txl_jax.model.config import GATES

from .environments import ENVIRONMENTS


@dataclasses.dataclass(frozen=True)
class Options:
    """The flags of a run."""

    environment: str = one_of(ENVIRONMENTS, "t_maze")
    length: int = at_least(1, 10)  # steps until the junction or the end
    gymnax: str = ""  # an environment of gymnax instead
    core: str = one_of(("transformer_xl", "gru"), "transformer_xl")
    gate: str = one_of(GATES, "none")  # as model.gate
    n_layer: int = at_least(1, 2)  # the GRU has one layer of as many parameters
    d_model: int = at_least(2, 32)
    n_head: int = at_least(1, 2)
    mem_len: int = at_least(0, 64)
    streams: int = at_least(1, 64)  # environments
    steps: int = at_least(1, 64)  # of an environment between two updates
    segment_len: int = at_least(1, 32)  # of the steps read in one call
    gradient_segments: int = at_least(1, 1)  # that a gradient crosses
    updates: int = at_least(1, 100)
    epochs: int = at_least(1, 4)  # of an update
    minibatches: int = at_least(1, 4)  # of an epoch; each has some of the streams
    lr: float = positive(1e-3)
    discount: float = fraction(0.99)
    trace_decay: float = fraction(0.95)  # lambda of the advantages
    clip: float = positive(0.2)  # of the probability ratio
    entropy: float = at_least(0.0, 0.01)  # weight of its bonus
    seed: int = at_least(0, 1)
    solved: float = 0.9  # the return from which the task counts as solved
    save_every: int = at_least(1, 50)  # updates

    def __post_init__(self) -> None:
        """Raises UserError for values that do not fit together."""
        check(self, "ppo")
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
        if self.core == "gru" and self.gate != "none":
            raise UserError(
                f'gate = "{self.gate}" is for the Transformer-XL: leave it out, or set '
                'core = "transformer_xl"'
            )

    @property
    def call_len(self) -> int:
        """L, the number of steps that a gradient crosses."""
        return self.segment_len * self.gradient_segments
