"""Options of evaluation and of its variants: scores, attention, speed and RECL."""

import dataclasses
from typing import Any, NamedTuple

from txl_jax.checkpoint.options import check_which
from txl_jax.data.options import SPLITS
from txl_jax.errors import UserError, require_one_of
from txl_jax.model.config import ModelConfig
from txl_jax.runtime.constraint import at_least, check, one_of

STDIN = "-"
UNITS = ("document", "line", "token")
SWEPT = (
    *("mem_len", "ext_len", "sliding_window", "tgt_len"),
    *("clamp_len", "same_length"),
)


class Sweep(NamedTuple):
    """A field of EvalConfig and the values to evaluate it at, in rising order."""

    field: str
    values: tuple[int, ...]

    def including(self, trained: int) -> "Sweep":
        """Returns the sweep with the value that training used added to its values."""
        return Sweep(self.field, in_order(self.field, [*self.values, trained]))

    def at(self, config: Any, value: int) -> Any:
        """Returns the EvalConfig with the swept field at `value`.

        With mem_len = 0, same_length is turned off: it would leave no key visible.
        """
        changes: dict[str, Any] = {self.field: value}
        if self.field == "mem_len" and not value:
            changes["same_length"] = False
        return dataclasses.replace(config, **changes)


def parse_sweep(text: str) -> Sweep:
    """Parses FIELD=START:STOP:STEP or FIELD=a,b,c; raises UserError for other forms.

    STOP itself is included if a step reaches it.
    """
    field, _, values = text.partition("=")
    require_one_of(field.strip(), list(SWEPT), "the field of eval.sweep")
    try:
        return Sweep(field.strip(), _read_values(field.strip(), values))
    except (ValueError, KeyError):
        wanted = "mem_len=START:STOP:STEP or mem_len=a,b,c in whole numbers"
        if field.strip() == "same_length":
            wanted = "same_length=false,true"
        raise UserError(f"eval.sweep = {text!r} is not of the form {wanted}") from None


def _read_values(field: str, text: str) -> tuple[int, ...]:
    found: list[int]
    if field == "same_length":
        words = {"false": False, "true": True}
        found = [words[each.strip().lower()] for each in text.split(",")]
    elif ":" in text:
        start, stop, step = map(int, text.split(":"))
        found = list(range(start, stop + 1, step))
        if step < 1:
            raise ValueError
    else:
        found = [int(each) for each in text.split(",")]
    if not found or min(found) < 0:
        raise ValueError
    return in_order(field, found)


def in_order(field: str, values: list[int]) -> tuple[int, ...]:
    """Returns the distinct values, rising; clamp_len = 0, which is off, comes last."""
    return tuple(
        sorted(
            set(values), key=lambda value: (field == "clamp_len" and not value, value)
        )
    )


@dataclasses.dataclass(frozen=True)
class EvalConfig:
    """How to evaluate; no value is inherited from training."""

    split: str = one_of(SPLITS, "test")  # train, valid or test
    # best, latest, a step, average (the mean of all kept), or several steps with commas
    # (their mean)
    checkpoint: str = "best"
    # contiguous parts of the split, read side by side, each from a cold start
    streams: int = at_least(1, 8)
    tgt_len: int = at_least(1, 128)  # tokens per segment
    mem_len: int = at_least(0, 512)  # tokens in the memory
    # tokens read again before each segment; needs mem_len = 0
    ext_len: int = at_least(0, 0)
    # greater distances count as this one; 0 = no limit
    clamp_len: int = at_least(0, 0)
    same_length: bool = False  # every token sees only the newest mem_len keys
    # fill the memories, or windows, with the preceding tokens before scoring
    warm_start: bool = False
    # id of the token after which a document starts; -1 = off
    reset_memory_at: int = at_least(-1, -1)
    # after training on bytes, compare with n-gram models, gzip and xz
    baselines: bool = False
    max_tokens: int = at_least(0, 0)  # tokens to score, from the start; 0 = all
    # tokens read again for each prediction; 0 = read segments instead
    sliding_window: int = at_least(0, 0)
    # mode evaluate: values to compare, FIELD=START:STOP:STEP or FIELD=a,b,c
    sweep: str = ""
    # mode evaluate: report the loss by tokens read since a cold start, up to this many;
    # 0 = off
    cold_start: int = at_least(0, 0)

    def __post_init__(self) -> None:
        """Raises UserError for an impossible value or combination."""
        check(self, "eval")
        if self.ext_len and self.mem_len:
            raise UserError(
                f"eval.ext_len = {self.ext_len} with eval.mem_len = {self.mem_len} "
                "would show the same tokens twice: set one of them to 0"
            )
        check_which(self.checkpoint, "eval.checkpoint")
        self._check_kinds()

    def cut(self, tokens: Any) -> Any:
        """Returns the first max_tokens + 1 tokens: the first one is never a target."""
        return tokens[: self.max_tokens + 1] if self.max_tokens else tokens

    def _check_kinds(self) -> None:
        """Raises UserError for kinds of evaluation that exclude each other."""
        if self.sweep:
            parse_sweep(self.sweep)
        if self.cold_start and (self.sweep or self.sliding_window or self.ext_len):
            raise UserError(
                f"eval.cold_start = {self.cold_start} needs a memory that fills: leave "
                "out eval.sweep, eval.sliding_window and eval.ext_len"
            )
        cut = self.cold_start or self.sliding_window
        if cut and self.reset_memory_at >= 0:
            raise UserError(
                f"eval.reset_memory_at = {self.reset_memory_at} must be -1 with "
                "eval.sliding_window or eval.cold_start, which ignore documents"
            )


def evaluation_model(model_config: ModelConfig, config: EvalConfig) -> ModelConfig:
    """Returns the model with the memory of evaluation; the parameters are the same."""
    return dataclasses.replace(
        model_config,
        mem_len=config.mem_len,
        clamp_len=config.clamp_len,
        same_length=config.same_length,
    )


@dataclasses.dataclass(frozen=True)
class ScoreConfig:
    """Which texts to score, and what to write besides the totals."""

    path: str = STDIN  # a file, a folder or a glob; each file is a document; - = stdin
    prefix: str = ""  # text before each document that is not scored, such as "\n"
    output: str = ""  # file of JSON lines to write; "" = none
    # unit with one line in the output: document, line or token
    per: str = one_of(UNITS, "line")
    # file (.npz) to write each document's hidden states to; "" = none
    hidden: str = ""

    def __post_init__(self) -> None:
        """Raises UserError for an impossible value."""
        check(self, "score")
        if self.hidden and not self.hidden.endswith(".npz"):
            raise UserError(
                f"score.hidden = {self.hidden!r} must end in .npz, its format"
            )


@dataclasses.dataclass(frozen=True)
class AttentionConfig:
    """Which tokens to map the attention of, in segments of eval.tgt_len."""

    split: str = one_of(SPLITS, "valid")  # train, valid or test
    at: int = at_least(
        0, 0
    )  # index of the first target; 0 = the first with a full span
    segments: int = at_least(1, 4)  # segments of targets
    span: int = at_least(2, 640)  # tokens that each target sees, itself included
    # evenly spaced targets whose attention the page shows one by one
    shown: int = at_least(1, 12)

    def __post_init__(self) -> None:
        """Raises UserError for an impossible value or combination."""
        check(self, "attention")
        if self.at and self.at < self.span:
            raise UserError(
                f"attention.at = {self.at} must be at least attention.span = "
                f"{self.span}, or 0 for the first target with a full span"
            )


@dataclasses.dataclass(frozen=True)
class SpeedConfig:
    """What to time; clamp_len and same_length come from eval."""

    # attention lengths to time; the default is that of Table 9
    attention_lens: tuple[int, ...] = (800, 1800, 2800, 3800)
    tgt_len: int = at_least(1, 512)  # tokens per segment in evaluation with memory
    batch_size: int = at_least(1, 1)  # streams, or windows, read side by side
    # rounds that time each of the three once; medians are reported
    rounds: int = at_least(1, 3)

    def __post_init__(self) -> None:
        """Raises UserError for an impossible value."""
        check(self, "speed")
        if not self.attention_lens or min(self.attention_lens) < 2:
            raise UserError(
                f"speed.attention_lens = {self.attention_lens} must be lengths of at "
                "least 2, such as 800,3800"
            )


@dataclasses.dataclass(frozen=True)
class ReclConfig:
    """Which models to compare, and at which context lengths.

    The paper's results are multiples of 100 tokens, hence the default contexts.
    """

    workdirs: tuple[str, ...] = ()  # workdirs of the models, which are of equal size
    split: str = one_of(SPLITS, "test")  # train, valid or test
    positions: int = at_least(0, 1000)  # evenly spaced tokens to score; 0 = all
    # context lengths in tokens: the first, the last and the step
    contexts: tuple[int, ...] = (100, 1000, 100)
    batch_size: int = at_least(1, 32)  # windows read side by side

    def __post_init__(self) -> None:
        """Raises UserError for an impossible value."""
        check(self, "recl")
        if len(self.contexts) != 3 or min(self.contexts) < 1 or len(self.lengths) < 2:
            raise UserError(
                f"recl.contexts = {self.contexts} must be the first length, the last "
                "and the step, of at least two lengths, such as 100,1000,100"
            )

    @property
    def lengths(self) -> list[int]:
        """The context lengths to compare, in tokens."""
        first, last, step = self.contexts
        return list(range(first, last + 1, step))
