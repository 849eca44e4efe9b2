"""Options of training: segments, updates and the optimizer."""

import dataclasses

from txl_jax.errors import UserError, nearest
from txl_jax.fields import TRAINING, at_least, between, check, field, one_of, positive

ORDERS = ("stream", "roll", "sentences:ID")
OPTIMIZERS = ("adam", "lamb", "muon", "sgd")
SCHEDULES = ("cosine", "cosine_through_warmup", "inverse_sqrt", "constant")
OFF = "-1"  # of reset_memory_at


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """How to train; steps and intervals count updates."""

    # The seed of the initial parameters, of dropout and of the order of the data.
    seed: int = between(0, 2**32 - 1, 1111)
    # The number of updates of the whole run.
    num_steps: int = field(at_least(1, 400_000), "changeable")
    batch_size: int = at_least(1, 24)  # The number of streams of text in a batch.
    tgt_len: int = at_least(1, 512)  # The number of tokens in a segment.
    # The number of segments that a call to the device processes. Just before a
    # validation or a checkpoint there may be fewer.
    segments_per_call: int = at_least(1, 1)
    # The number of consecutive segments whose gradient makes an update.
    segments_per_update: int = at_least(1, 1)
    # The number of consecutive segments that are computed together, so that gradients
    # pass through the memory between them. 1 stops them at each segment, as the paper
    # does.
    gradient_segments: int = at_least(1, 1)
    # The number of parts of the batch that are computed in turn, to save memory.
    batch_chunk: int = at_least(1, 1)
    # The number of updates between two lines of metrics.jsonl.
    log_every: int = field(at_least(1, 100), "changeable")
    # The number of updates between two validations.
    eval_every: int = field(at_least(1, 4_000), "changeable")
    # The run stops after this many skipped updates in a row. An update is skipped if
    # its loss or the norm of its gradient is not finite.
    max_bad_steps: int = field(at_least(1, 20), "changeable")
    # The order of the training text: "stream" keeps it, "roll" starts each stream at a
    # random place in each epoch, and "sentences:ID" shuffles the sentences in each
    # epoch, where ID is the id of the token that ends a sentence.
    order: str = "stream"
    varlen: bool = False  # Draws the length of each segment at random around tgt_len.
    # The number of tokens that are read again before each segment. It needs
    # model.mem_len = 0.
    ext_len: int = at_least(0, 0)
    # Scores only the more recent half of each segment (Table 6).
    half_loss: bool = False
    # Scores only targets with this id or a higher one. 0 scores all.
    score_from: int = at_least(0, 0)
    # A document starts after this token, given as text such as `\n` or `<eos>`, or as
    # an id. -1 turns documents off.
    reset_memory_at: str = OFF
    # A pattern of the names of the parameters that are trained, such as retrieval_gate
    # or layers/attention/*. All others keep their initial values. Empty trains all.
    trainable: str = ""
    # The workdir from which a new run takes its initial parameters. As a flag, it also
    # gives the model and the vocabulary, except for fields that other flags set. Empty
    # draws the parameters at random.
    init_from: str = field("", "local", modes=f"{TRAINING} prepare")

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
        if self.half_loss and self.ext_len:
            raise UserError(
                f"train.half_loss = True and train.ext_len = {self.ext_len} each score "
                "only the recent part of what is read: set only one of them"
            )
        parts = (
            ("batch_size", "batch_chunk"),
            ("segments_per_call", "segments_per_update"),
            ("segments_per_update", "gradient_segments"),
        )
        for name, part in parts:
            if getattr(self, name) % getattr(self, part):
                raise UserError(
                    f"train.{name} = {getattr(self, name)} must be a multiple of "
                    f"train.{part} = {getattr(self, part)}"
                )

        if self.gradient_segments > 1 and (self.varlen or self.ext_len):
            raise UserError(
                f"train.gradient_segments = {self.gradient_segments} needs segments of "
                "tgt_len new tokens: leave out train.varlen and train.ext_len"
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

    # The optimizer, one of OPTIMIZERS. "adam" with a weight_decay is AdamW; "muon" is
    # for the matrices of the layers, with "adam" for all other parameters.
    optimizer: str = one_of(OPTIMIZERS, "adam")
    lr: float = at_least(0, 2.5e-4)  # The peak learning rate.
    # The schedule of the learning rate, one of SCHEDULES.
    schedule: str = one_of(SCHEDULES, "cosine")
    # The number of updates in which the learning rate rises linearly from 0 to lr.
    warmup_steps: int = at_least(0, 0)
    # The final learning rate of a cosine schedule, divided by lr.
    min_lr_ratio: float = at_least(0, 0.0)
    # The largest global norm of the gradient. 0 turns clipping off.
    clip: float = at_least(0, 0.25)
    # The decay rates of the two moments of adam and lamb, and of muon's adam.
    betas: tuple[float, ...] = (0.9, 0.999)
    # The term that is added to the denominator of adam and lamb. NVIDIA's recipes for
    # lamb have 1e-6.
    epsilon: float = positive(1e-8)
    # The weight decay, which applies to matrices only.
    weight_decay: float = at_least(0, 0.0)
    # The first update, counted from 1, of the mean of all later parameters, which is
    # evaluated in place of the newest parameters (ASGD). 0 keeps no mean.
    asgd_from: int = at_least(0, 0)

    def __post_init__(self) -> None:
        """Raises UserError for an impossible value or combination."""
        check(self, "optim")
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise UserError(
                f"optim.betas = {self.betas} must be two numbers, each at least 0 and "
                "below 1"
            )
        if self.min_lr_ratio and not self.schedule.startswith("cosine"):
            raise UserError(
                f"optim.min_lr_ratio = {self.min_lr_ratio} has no effect with "
                f'optim.schedule = "{self.schedule}": leave it at 0'
            )
