"""Options of training: segments, updates and the optimizer."""

import dataclasses

from txl_jax.errors import UserError, nearest
from txl_jax.runtime.constraint import at_least, between, check, one_of, positive

ORDERS = ("stream", "roll", "sentences:ID")
OPTIMIZERS = ("adam", "lamb", "sgd")
SCHEDULES = ("cosine", "cosine_through_warmup", "inverse_sqrt", "constant")


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """How to train; steps and intervals count updates."""

    # seed of the parameters, dropout and the order of the data
    seed: int = between(0, 2**32 - 1, 1111)
    num_steps: int = at_least(1, 400_000)  # updates of the whole run
    batch_size: int = at_least(1, 24)  # streams of text in a batch
    tgt_len: int = at_least(1, 512)  # tokens per segment
    # segments per call to the device, fewer just before a validation or a checkpoint
    segments_per_call: int = at_least(1, 1)
    segments_per_update: int = at_least(1, 1)  # segments per update
    batch_chunk: int = at_least(1, 1)  # parts of the batch, computed in turn
    log_every: int = at_least(1, 100)  # updates between lines of metrics.jsonl
    eval_every: int = at_least(1, 4_000)  # updates between validations
    max_bad_steps: int = at_least(1, 20)  # skipped updates in a row that stop the run
    # "stream" = the order of the text; "roll" = each stream starts at a random place in
    # each epoch; "sentences:ID" = sentences shuffled in each epoch, where ID is the id
    # of the token that ends a sentence
    order: str = "stream"
    varlen: bool = False  # draw the length of each segment at random around tgt_len
    # tokens read again before each segment; needs model.mem_len = 0
    ext_len: int = at_least(0, 0)
    half_loss: bool = False  # score only the more recent half of each segment (Table 6)
    # id of the token after which a document starts; -1 = off
    reset_memory_at: int = at_least(-1, -1)
    # skip updates whose loss is above this multiple of the mean loss; 0 = off
    max_loss_factor: float = 0.0
    # workdir to take a new run's initial parameters from; as a flag, also the model and
    # the vocabulary, except for fields that other flags set; "" = none
    init_from: str = ""
    # published validation curve to compare with: a name in experiments/curves, or the
    # path of such a .json file; "" = none
    expected_curve: str = ""

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
        if self.max_loss_factor and not self.max_loss_factor > 1:
            raise UserError(
                f"train.max_loss_factor = {self.max_loss_factor} must be above 1, "
                "since many losses exceed the mean, or 0 to turn it off"
            )
        if self.half_loss and self.ext_len:
            raise UserError(
                f"train.half_loss = True and train.ext_len = {self.ext_len} each score "
                "only the recent part of what is read: set only one of them"
            )
        parts = {
            "batch_size": "batch_chunk",
            "segments_per_call": "segments_per_update",
        }
        for name, part in parts.items():
            if getattr(self, name) % getattr(self, part):
                raise UserError(
                    f"train.{name} = {getattr(self, name)} must be a multiple of "
                    f"train.{part} = {getattr(self, part)}"
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
        return step == self.num_steps or step % self.eval_every == 0


@dataclasses.dataclass(frozen=True)
class OptimConfig:
    """How to update parameters; the defaults follow the paper's released recipes."""

    optimizer: str = one_of(OPTIMIZERS, "adam")  # one of OPTIMIZERS
    lr: float = at_least(0, 2.5e-4)  # peak learning rate
    schedule: str = one_of(SCHEDULES, "cosine")  # one of SCHEDULES
    warmup_steps: int = at_least(0, 0)  # updates of the linear warm-up from 0 to lr
    min_lr_ratio: float = at_least(0, 0.0)  # final rate of a cosine, divided by lr
    clip: float = at_least(0, 0.25)  # largest global norm of the gradient; 0 = off
    # decay rates of the two moments of adam and lamb
    betas: tuple[float, ...] = (0.9, 0.999)
    # term added to the denominator of adam and lamb; NVIDIA's recipes for lamb: 1e-6
    epsilon: float = positive(1e-8)
    weight_decay: float = at_least(0, 0.0)  # weight decay, of matrices only
    # first update, counted from 1, of the mean of all later parameters that is
    # evaluated in place of the newest parameters (ASGD); 0 = no mean
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
