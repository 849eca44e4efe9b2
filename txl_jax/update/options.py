"""Options of training: segments, updates and the optimizer."""

import dataclasses

from txl_jax.errors import UserError, nearest, refuse
from txl_jax.fields import at_least, between, check, field, one_of

ORDERS = ("stream", "roll", "sentences:ID")
OPTIMIZERS = ("adam", "lamb", "muon", "sgd")
SCHEDULES = ("cosine", "cosine_through_warmup", "inverse_sqrt", "constant")
OFF = "-1"  # of reset_memory_at


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """How to train; steps and intervals count updates."""

    seed: int = field(
        1111,
        between(0, 2**32 - 1),
        help="Seed of the initial parameters, dropout and the order of the data.",
    )
    num_steps: int = field(400_000, at_least(1), help="Updates of the whole run.")
    batch_size: int = field(24, at_least(1), help="Streams of text in a batch.")
    tgt_len: int = field(512, at_least(1), help="Tokens in a segment.")
    segments_per_call: int = field(
        1,
        at_least(1),
        help="Segments that a call to the device processes. Just before a validation "
        "or a checkpoint there may be fewer.",
    )
    segments_per_update: int = field(
        1, at_least(1), help="Consecutive segments whose gradient makes an update."
    )
    gradient_segments: int = field(
        1,
        at_least(1),
        help="Consecutive segments that gradients cross through the memory. 1 stops "
        "them at each segment, as the paper does.",
    )
    batch_chunk: int = field(
        1,
        at_least(1),
        help="Parts of the batch that are computed in turn, to save memory.",
    )
    log_every: int = field(
        100, at_least(1), help="Updates between two lines of metrics.jsonl."
    )
    eval_every: int = field(4_000, at_least(1), help="Updates between two validations.")
    order: str = field(
        "stream",
        help='Order of the training text: "stream" keeps it, "roll" starts each '
        'stream at a random place in each epoch, and "sentences:ID" shuffles the '
        "sentences in each epoch, where ID is the token that ends a sentence.",
    )
    varlen: bool = field(
        False, help="Draws the length of each segment at random around tgt_len."
    )
    ext_len: int = field(
        0,
        help="Tokens that are read again before each segment. It needs model.mem_len "
        "= 0.",
    )
    half_loss: bool = field(
        False, help="Scores only the more recent half of each segment (Table 6)."
    )
    score_from: int = field(
        0, help="Scores only targets with this id or a higher one. 0 scores all."
    )
    reset_memory_at: str = field(
        OFF,
        help="Token that starts a document: it and what follows see nothing before "
        "it. As text, such as `\\n`, `<eos>` `\\x30` (a 0), or as an id; -1 = none.",
    )
    init_from: str = field(
        "",
        help="Workdir from which a new run takes its initial parameters. As a flag, "
        "it also gives the model and the vocabulary, except for fields that "
        "other flags set. Empty draws the parameters at random.",
    )

    def __post_init__(self) -> None:
        """Raises UserError for an impossible value or combination."""
        check(self, "train")
        kind, _, token = self.order.partition(":")
        if self.order not in ORDERS[:2] and not (
            kind == "sentences" and token.isdecimal()
        ):
            raise UserError(
                f"train.order = {self.order!r} must be one of {', '.join(ORDERS)}"
                f"{nearest(self.order, ORDERS)}; ID is that of the token that ends a "
                "sentence"
            )
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

    @property
    def sentence_end(self) -> int:
        """The id of the token that ends a sentence; -1 = sentences keep their order."""
        kind, _, token = self.order.partition(":")
        return int(token) if kind == "sentences" else -1

    def updates_of_call(self, save_every: int, step: int = 0) -> int:
        """Returns U, the updates of the call to the device after update `step`.

        Validations, checkpoints (every `save_every` updates) and the end of the run
        fall between two calls. With fewer updates left until then than in a full call,
        each update is a call, so that no interval needs more than two programs. No call
        has more updates than the first.
        """
        full = self.segments_per_call // self.segments_per_update
        left = [every - step % every for every in (self.eval_every, save_every)]
        return full if min(*left, self.num_steps - step) >= full else 1

    def validates(self, step: int) -> bool:
        """Returns whether a validation follows update `step`."""
        return step % self.eval_every == 0 or step == self.num_steps


@dataclasses.dataclass(frozen=True)
class OptimConfig:
    """How to update parameters; the defaults follow the paper's released recipes."""

    optimizer: str = field(
        "adam",
        one_of(OPTIMIZERS),
        help='The optimizer. "adam" with a weight_decay is AdamW; "muon" is for the '
        'matrices of the layers, with "adam" for all other parameters.',
    )
    lr: float = field(2.5e-4, help="Peak learning rate.")
    schedule: str = field(
        "cosine", one_of(SCHEDULES), help="Schedule of the learning rate."
    )
    warmup_steps: int = field(
        0, help="Updates in which the learning rate rises linearly from 0 to lr."
    )
    min_lr_ratio: float = field(
        0.0, help="Final learning rate of a cosine schedule, divided by lr."
    )
    clip: float = field(
        0.25, help="Largest global norm of the gradient. 0 turns clipping off."
    )
    weight_decay: float = field(
        0.0, help="Weight decay, which applies to matrices only."
    )
    asgd_from: int = field(
        0,
        help="First update, counted from 1, of the mean of all later parameters, "
        "which is evaluated instead of the newest (ASGD). 0 keeps no mean.",
    )

    def __post_init__(self) -> None:
        """Raises UserError for an impossible value or combination."""
        check(self, "optim")
