"""Options of evaluation and of the scores of a user's texts."""

import dataclasses
import math
from typing import TYPE_CHECKING, Any

from txl_jax.checkpoint.options import check_which
from txl_jax.data.options import SPLITS, STDIN
from txl_jax.errors import UserError, require_one_of
from txl_jax.fields import (
    Role,
    Section,
    field,
    fraction,
    one_of,
    read_bool,
    size,
    size_or_off,
)
from txl_jax.model.config import ModelConfig

if TYPE_CHECKING:
    import numpy as np

UNITS = ("document", "line", "token")
COLD_START = "cold_start"
RATES = ("dynamic_lr", "dynamic_decay")
MIXTURE = ("cache_weight", "cache_theta")
SWEPT = (
    *("mem_len", "ext_len", "tgt_len", "clamp_len", "same_length", COLD_START),
    *(*RATES, *MIXTURE),
)


def parse_sweep(sweep: str) -> tuple[str, tuple[float, ...]]:
    """Returns the field of FIELD=a,b,c and its values, rising; raises UserError."""
    field, _, text = sweep.partition("=")
    require_one_of(field, SWEPT, "the field of eval.sweep")
    number = int if field == COLD_START else type(getattr(EvalConfig, field))
    parse = read_bool if number is bool else number
    try:
        values = [parse(each) for each in text.split(",")]
    except (ValueError, KeyError):
        values = []
    one = field == COLD_START and (len(values) > 1 or 0 in values)
    if one or not all(0 <= value < math.inf for value in values or [-1]):
        raise UserError(
            f"eval.sweep = {sweep!r} is not of the form FIELD=a,b,c in numbers, "
            "same_length=false,true or cold_start=TOKENS"
        )
    return field, in_order(field, values)


def in_order(field: str, values: list[float]) -> tuple[float, ...]:
    """Returns the distinct values, rising; clamp_len = 0, which is off, comes last."""
    values = sorted(set(values))
    off_last = field == "clamp_len" and not values[0]
    return (*values[1:], 0) if off_last else tuple(values)


@dataclasses.dataclass(frozen=True)
class EvalConfig(Section, name="eval", modes="train evaluate import"):
    """How to evaluate; no value is inherited from training."""

    split: str = field(
        "test",
        one_of(SPLITS),
        modes="train evaluate generate attention import table recl",
        help="Split to read.",
    )
    checkpoint: str = field(
        "best",
        check_which,
        modes="train evaluate generate score attention import export table speed recl",
        roles=Role.LOCAL,
        help="Checkpoint to read: best, latest or a step.",
    )
    streams: int = field(
        8,
        size,
        modes="train evaluate import compile table speed recl",
        help="Parts of the split, or texts, to read side by side from cold starts.",
    )
    tgt_len: int = field(
        128,
        size,
        modes="train evaluate generate score attention import export compile speed "
        "recl",
        help="Tokens in a segment.",
    )
    segments_per_step: int = field(
        0,
        size_or_off,
        modes="train evaluate generate score import compile table recl",
        help="Segments computed together, for speed. 0 chooses.",
    )
    mem_len: int = field(
        512,
        size_or_off,
        modes="train evaluate score attention import compile recl",
        help="Tokens in the memory.",
    )
    ext_len: int = field(
        0,
        size_or_off,
        modes="train evaluate generate score attention import compile",
        help="Tokens read again before each segment, with mem_len = 0. With tgt_len "
        "= 1 and warm_start, a sliding window of ext_len + 1 tokens.",
    )
    clamp_len: int = field(
        0,
        modes="train evaluate score attention import compile table speed recl",
        help="Distances above this are treated as equal to it. 0 sets no limit.",
    )
    same_length: bool = field(
        False,
        modes="train evaluate score import compile speed recl",
        help="Every token sees mem_len keys.",
    )
    warm_start: bool = field(
        False,
        modes="train evaluate import table",
        help="Fills memories, or windows, with the preceding tokens.",
    )
    reset_memory_at: str = field(
        "",
        modes="train evaluate score import table",
        help="First token of a document, as text, such as `\\n` or `<eos>`. Empty "
        "joins all documents.",
    )
    baselines: bool = field(
        False,
        modes="train import",
        help="After training on bytes, compares with n-grams, gzip and xz.",
    )
    max_tokens: int = field(
        0,
        modes="train evaluate attention import table",
        help="Tokens to score, from the start. 0 scores all.",
    )
    dynamic: str = field(
        "",
        one_of(("", "rms", "sgd")),
        help='Rule of dynamic evaluation in the mode evaluate: "rms" divides '
        "gradients by their usual size. Empty adapts nothing.",
    )
    dynamic_lr: float = field(0.0, help="Learning rate of dynamic evaluation.")
    dynamic_decay: float = field(
        0.0,
        help="Fraction of the difference from the trained parameters that is removed "
        "after each segment.",
    )
    dynamic_segments: int = field(
        0,
        help='Training segments from which "rms" estimates the sizes of gradients. 0 '
        "takes all.",
    )
    cache_len: int = field(
        0, help="Recent tokens in a continuous cache in the mode evaluate. 0 has none."
    )
    cache_weight: float = field(
        0.0, fraction, help="Share of the cache in the mixture."
    )
    cache_theta: float = field(
        0.0, help="Inverse temperature of the cache, such as 0.2."
    )
    sweep: str = field(
        "",
        modes="train evaluate import speed",
        help="Values to compare: FIELD=a,b,c; cold_start=TOKENS, the loss by tokens "
        "since a cold start; in the mode speed mem_len=a,b,c (empty: Table 9's).",
    )

    def __post_init__(self) -> None:
        """Raises UserError for an impossible value or combination."""
        super().__post_init__()
        if self.ext_len and self.mem_len:
            raise UserError(
                f"eval.ext_len = {self.ext_len} with eval.mem_len = {self.mem_len} "
                "would show the same tokens twice: set one of them to 0"
            )
        one_text = self.ext_len or self.reset_memory_at
        if self.cold_start and one_text:
            raise UserError(
                f"eval.sweep = {self.sweep!r} needs a memory that fills and ignores "
                "documents: leave out eval.ext_len and eval.reset_memory_at"
            )
        swept = self.sweep.partition("=")[0]
        for on, names in (("dynamic", RATES), ("cache_len", MIXTURE)):
            used = [name for name in names if getattr(self, name) or name == swept]
            if names[0] not in used if getattr(self, on) else used:
                parts = [f"eval.{x}" for x in dict.fromkeys((on, names[0], *used))]
                sweep = f", or find the second with --sweep={names[0]}=0.01,0.03,0.1"
                raise UserError(
                    f"{', '.join(parts)} belong together: set the first two"
                    f"{sweep * bool(getattr(self, on))}"
                )
        if self.cache_len and (self.dynamic or self.cold_start or one_text):
            raise UserError(
                f"eval.cache_len = {self.cache_len} is for one text with a memory: "
                "leave out eval.dynamic, eval.ext_len, eval.reset_memory_at and a "
                "sweep over cold_start"
            )
        others = self.ext_len or self.segments_per_step or self.cold_start
        if self.dynamic and (self.streams > 1 or others):
            raise UserError(
                f'eval.dynamic = "{self.dynamic}" adapts after each segment of one '
                "stream with a memory: set eval.streams to 1, and leave out "
                "eval.ext_len, eval.segments_per_step and a sweep over cold_start"
            )

    @property
    def cold_start(self) -> int:
        """The length in tokens of the curve since a cold start; 0 = no curve."""
        field, values = parse_sweep(self.sweep) if self.sweep else ("", (0,))
        return int(values[0]) if field == COLD_START else 0

    def swept(self, field: str, value: float) -> "EvalConfig":
        """Returns the config with a field of SWEPT at a value.

        With mem_len = 0, same_length is turned off: it would leave no key visible.
        """
        changes: dict[str, Any] = {field: value}
        if field == "mem_len" and not value:
            changes["same_length"] = False
        return dataclasses.replace(self, **changes)

    def cut(self, tokens: "np.ndarray") -> "np.ndarray":
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
class ScoreConfig(Section, name="score", modes="train score import", roles=Role.LOCAL):
    """Which texts to score, and what to write besides the totals."""

    path: str = field(
        STDIN, help="Texts: a file, a folder or a glob of documents. - is stdin."
    )
    prefix: str = field("", help="Text read, not scored, before each document.")
    output: str = field(
        "", help="File of JSON lines, or of hidden states (.npz). Empty writes none."
    )
    per: str = field("line", one_of(UNITS), help="Unit of a line of JSON.")
    lines: bool = field(False, help="Every line is a document.")

    @property
    def hidden(self) -> bool:
        """Whether the hidden states are written."""
        return self.output.endswith(".npz")
