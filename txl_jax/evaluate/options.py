"""Options of evaluation and of its variants: scores, attention and RECL."""

import dataclasses
from typing import Any, NamedTuple

from txl_jax.checkpoint.options import check_which
from txl_jax.data.options import SPLITS
from txl_jax.errors import UserError, require_one_of
from txl_jax.model.config import ModelConfig
from txl_jax.runtime.constraint import at_least, check, one_of

STDIN = "-"
UNITS = ("document", "line", "token")
COLD_START = "cold_start"
MOST_VALUES = 10_000  # of a sweep, or lengths of contexts
LENGTHS = ("mem_len", "ext_len", "tgt_len", "clamp_len")
RATES = ("dynamic_lr", "dynamic_decay")
FORMS = {
    "same_length": "same_length=false,true",
    COLD_START: f"{COLD_START}=TOKENS",
    **{rate: f"{rate}=a,b,c in numbers" for rate in RATES},
}
BOOLS = {"false": False, "true": True}


class Sweep(NamedTuple):
    """A field of EvalConfig and the values to evaluate it at, in rising order."""

    field: str
    values: tuple[float, ...]

    def at(self, config: Any, value: float) -> Any:
        """Returns the EvalConfig with the swept field at `value`.

        With mem_len = 0, same_length is turned off: it would leave no key visible.
        """
        changes: dict[str, Any] = {self.field: value}
        if self.field == "mem_len" and not value:
            changes["same_length"] = False
        return dataclasses.replace(config, **changes)


def parse_sweep(sweep: str) -> Sweep:
    """Parses FIELD=START:STOP:STEP or FIELD=a,b,c; raises UserError for other forms.

    STOP itself is included if a step reaches it.
    """
    field, _, text = (part.strip() for part in sweep.partition("="))
    require_one_of(field, (*LENGTHS, *FORMS), "the field of eval.sweep")
    try:
        values = _read_values(field, text)
    except (ValueError, KeyError):
        values = []
    if field == COLD_START and (len(values) > 1 or 0 in values):
        values = []
    if not values or min(values) < 0:
        form = FORMS.get(field, "mem_len=START:STOP:STEP or mem_len=a,b,c in numbers")
        raise UserError(
            f"eval.sweep = {sweep!r} is not of the form {form}, of at most "
            f"{MOST_VALUES:,} values"
        )
    return Sweep(field, in_order(field, values))


def _read_values(field: str, text: str) -> list[float]:
    if field in RATES:
        return [float(each) for each in text.split(",")]
    if ":" in text:
        start, stop, step = map(int, text.split(":"))
        values = range(start, stop + 1, max(step, 1))
        return list(values) if step > 0 and len(values) <= MOST_VALUES else []
    read = BOOLS.__getitem__ if field == "same_length" else int
    return [read(each.strip().lower()) for each in text.split(",")]


def in_order(field: str, values: list[float]) -> tuple[float, ...]:
    """Returns the distinct values, rising; clamp_len = 0, which is off, comes last."""
    values = sorted(set(values))
    off_last = field == "clamp_len" and not values[0]
    return (*values[1:], 0) if off_last else tuple(values)


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
    # tokens read again before each segment; needs mem_len = 0. With tgt_len = 1 and
    # warm_start, each token is predicted from a sliding window of ext_len + 1
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
    # mode evaluate: adapt the parameters to the text, with the gradient of each scored
    # segment divided by its usual size ("rms") or not ("sgd"); "" = off. Validations
    # during training do not
    dynamic: str = one_of(("", "rms", "sgd"), "")
    dynamic_lr: float = at_least(0, 0.0)  # learning rate of dynamic evaluation
    # how far each segment moves the parameters back to the trained ones, from 0 to 1
    dynamic_decay: float = at_least(0, 0.0)
    # training segments from which "rms" takes the usual size of gradients; 0 = all
    dynamic_segments: int = at_least(0, 0)
    # mode evaluate: values to compare, FIELD=START:STOP:STEP or FIELD=a,b,c; or
    # cold_start=TOKENS: the loss by tokens read since a cold start, up to this many.
    # mode speed: mem_len=a,b,c, the attention lengths to time; "" = those of Table 9
    sweep: str = ""

    def __post_init__(self) -> None:
        """Raises UserError for an impossible value or combination."""
        check(self, "eval")
        if self.ext_len and self.mem_len:
            raise UserError(
                f"eval.ext_len = {self.ext_len} with eval.mem_len = {self.mem_len} "
                "would show the same tokens twice: set one of them to 0"
            )
        check_which(self.checkpoint, "eval.checkpoint")
        if self.cold_start and (self.ext_len or self.reset_memory_at >= 0):
            raise UserError(
                f"eval.sweep = {self.sweep!r} needs a memory that fills and ignores "
                "documents: leave out eval.ext_len and eval.reset_memory_at"
            )

        self._check_dynamic()

    def _check_dynamic(self) -> None:
        swept = self.sweep.partition("=")[0].strip()
        rates = {name: getattr(self, name) for name in (*RATES, "dynamic_segments")}
        used = [name for name, value in rates.items() if value or name == swept]
        if used and not self.dynamic:
            raise UserError(f'eval.{used[0]} needs eval.dynamic = "rms" or "sgd"')
        if self.dynamic and (self.streams > 1 or self.ext_len or self.cold_start):
            raise UserError(
                f'eval.dynamic = "{self.dynamic}" adapts to one stream with a memory: '
                "set eval.streams to 1, and leave out eval.ext_len and a sweep over "
                "cold_start"
            )

    @property
    def cold_start(self) -> int:
        """The length in tokens of the curve since a cold start; 0 = no curve."""
        swept = parse_sweep(self.sweep) if self.sweep else None
        return int(swept.values[0]) if swept and swept.field == COLD_START else 0

    def cut(self, tokens: Any) -> Any:
        """Returns the first max_tokens + 1 tokens: the first one is never a target."""
        return tokens[: self.max_tokens + 1] if self.max_tokens else tokens


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
    # file to write: JSON lines, or hidden states by document if it ends in .npz
    output: str = ""
    per: str = one_of(UNITS, "line")  # unit of a JSON line: document, line or token

    def __post_init__(self) -> None:
        """Raises UserError for an impossible value."""
        check(self, "score")

    @property
    def hidden(self) -> bool:
        """Whether the hidden states are written."""
        return self.output.endswith(".npz")


@dataclasses.dataclass(frozen=True)
class AttentionConfig:
    """Which tokens of eval.split to map the attention of.

    Each target sees eval.mem_len tokens, its own included.
    """

    # index of the first target; the first one with a full memory if that is later
    at: int = at_least(0, 0)
    segments: int = at_least(1, 4)  # segments of eval.tgt_len targets

    def __post_init__(self) -> None:
        """Raises UserError for an impossible value."""
        check(self, "attention")


@dataclasses.dataclass(frozen=True)
class ReclConfig:
    """Which models to compare on eval.split, and at which context lengths.

    The paper's results are multiples of 100 tokens, hence the default contexts.
    """

    workdirs: tuple[str, ...] = ()  # workdirs of the models, which are of equal size
    positions: int = at_least(0, 1000)  # evenly spaced tokens to score; 0 = all
    # context lengths in tokens: the first, the last and the step
    contexts: tuple[int, ...] = (100, 1000, 100)

    def __post_init__(self) -> None:
        """Raises UserError for an impossible value."""
        check(self, "recl")
        first, last, step = contexts = (*self.contexts, 0, 0, 0)[:3]
        valid = len(self.contexts) == 3 and min(contexts) > 0
        if not valid or not step <= last - first < MOST_VALUES * step:
            raise UserError(
                f"recl.contexts = {self.contexts} must be the first length, the last "
                f"and the step, of 2 to {MOST_VALUES:,} lengths, such as 100,1000,100"
            )

    @property
    def lengths(self) -> list[int]:
        """The context lengths to compare, in tokens."""
        first, last, step = self.contexts
        return list(range(first, last + 1, step))
