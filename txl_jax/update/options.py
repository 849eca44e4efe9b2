"""Options of training: segments, updates and the optimizer."""

import dataclasses

from txl_jax.errors import refuse
from txl_jax.fields import (
    TRAINING,
    Role,
    Section,
    at_least,
    between,
    field,
    one_of,
    size,
    size_or_off,
)


@dataclasses.dataclass(frozen=True)
class TrainConfig(Section, name="train", modes=TRAINING, roles=Role.IDENTITY):
    """How to train; steps and intervals count updates."""

    seed: int = field(
        1111,
        between(0, 2**32 - 1),
        help="Seed of parameters, dropout and order of data.",
    )
    num_steps: int = field(
        400_000, at_least(1), roles=Role.NONE, help="Updates of the whole run."
    )
    batch_size: int = field(24, size, help="Streams of text in a batch.")
    tgt_len: int = field(512, size, help="Tokens in a segment.")
    segments_per_call: int = field(
        1,
        at_least(1),
        help="Segments in a call; fewer just before a save or validation.",
    )
    segments_per_update: int = field(
        1, size, help="Segments whose gradient makes an update."
    )
    gradient_segments: int = field(
        1,
        at_least(1),
        help="Segments that gradients cross. 1 stops them at each, as in the paper.",
    )
    batch_chunk: int = field(
        1, at_least(1), help="Parts of the batch computed in turn, to save memory."
    )
    log_every: int = field(
        100,
        at_least(1),
        roles=Role.NONE,
        help="Updates between lines of metrics.jsonl.",
    )
    eval_every: int = field(
        4_000, at_least(1), roles=Role.NONE, help="Updates between validations."
    )
    order: str = field(
        "stream",
        one_of(("stream", "roll", "sentences")),
        help='Order of the text; "roll" starts streams at random places, and '
        '"sentences" shuffles sentences, one per line.',
    )
    varlen: bool = field(False, help="Draws each segment's length around tgt_len.")
    ext_len: int = field(
        0,
        size_or_off,
        help="Tokens read again before each segment, with model.mem_len = 0.",
    )
    half_loss: bool = field(
        False, help="Scores only the recent half of each segment (Table 6)."
    )
    score_from: int = field(
        0, help="Scores only targets from this id on. 0 scores all."
    )
    reset_memory_at: str = field(
        "",
        help="First token of a document, as text, such as `\\n` or `<eos>`. Empty "
        "joins all documents.",
    )
    init_from: str = field(
        "",
        modes="train prepare import compile table",
        roles=Role.IDENTITY | Role.LOCAL,
        help="Workdir that a new run starts from; as a flag it also gives the model "
        "and the vocabulary that other flags leave open. Empty starts at random.",
    )

    def __post_init__(self) -> None:
        """Raises UserError for an impossible value or combination."""
        super().__post_init__()
        refuse(
            self.half_loss and self.ext_len,
            f"train.half_loss = True and train.ext_len = {self.ext_len} each score "
            "only the recent part of what is read: set only one of them",
        )
        parts = (
            ("batch_size", "batch_chunk"),
            ("segments_per_call", "segments_per_update"),
            ("segments_per_update", "gradient_segments"),
        )
        for name, part in parts:
            refuse(
                getattr(self, name) % getattr(self, part),
                f"train.{name} = {getattr(self, name)} must be a multiple of "
                f"train.{part} = {getattr(self, part)}",
            )
        refuse(
            self.gradient_segments > 1 and (self.varlen or self.ext_len),
            f"train.gradient_segments = {self.gradient_segments} needs segments of "
            "tgt_len new tokens: leave out train.varlen and train.ext_len",
        )

    def updates_of_call(self, save_every: int, step: int = 0) -> int:
        """Returns U, the number of updates in the call after update `step`.

        Validations, checkpoints (every `save_every` updates) and the end of the run
        fall between two calls. If fewer updates remain until then than a full call has,
        each update is a call, so that no interval needs more than two programs. No call
        has more updates than the first.
        """
        full = self.segments_per_call // self.segments_per_update
        left = [every - step % every for every in (self.eval_every, save_every)]
        return full if min(*left, self.num_steps - step) >= full else 1

    def is_validation_due(self, step: int) -> bool:
        """Returns whether a validation follows update `step`."""
        return step % self.eval_every == 0 or step == self.num_steps


@dataclasses.dataclass(frozen=True)
class OptimConfig(Section, name="optim", modes=TRAINING, roles=Role.IDENTITY):
    """How to update parameters; the defaults follow the paper's released recipes."""

    optimizer: str = field(
        "adam",
        one_of(("adam", "lamb", "muon", "sgd")),
        help='Optimizer. "muon" is for matrices of layers, with "adam" for the rest.',
    )
    lr: float = field(2.5e-4, help="Peak learning rate.")
    schedule: str = field(
        "cosine",
        one_of(("cosine", "cosine_through_warmup", "inverse_sqrt", "constant")),
        help="Schedule of the learning rate.",
    )
    warmup_steps: int = field(0, help="Updates in which the rate rises linearly to lr.")
    min_lr_ratio: float = field(
        0.0, help="Final rate of a cosine schedule, divided by lr."
    )
    clip: float = field(0.25, help="Largest global norm of the gradient. 0 is off.")
    weight_decay: float = field(0.0, help="Weight decay, of matrices only.")
    asgd_from: int = field(
        0,
        help="Averages parameters from this update on, and evaluates the average "
        "(ASGD). 0 is off.",
    )
