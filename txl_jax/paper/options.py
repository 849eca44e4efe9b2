"""Options of the paper's measurements, and the rows of the tables.

Tables 6, 7 and 10 are the paper's ablations. A row's config is the packaged experiment
of the same name. It differs from its parent's config only in the ablated part.

The table of memories has kinds of memory, and tasks that need one. A run has the recipe
of its task and the fields that its kind changes. All kinds read equally many tokens, in
segments of L = 32 with a memory of M = 64, and have as many parameters within 2 %.
"""

from dataclasses import dataclass
from typing import NamedTuple

from txl_jax.errors import UserError, nearest
from txl_jax.fields import Role, Section, Values, at_least, field, one_of


@dataclass(frozen=True)
class Row:
    """A row of a table in the paper; missing numbers are 0."""

    recurrence: str  # yes or no
    encoding: str
    loss: str
    init: float  # perplexity at the attention length of training
    best: float  # perplexity at the best attention length
    attention_len: int  # tokens; the shortest length that reaches `best`
    parent: str = ""  # the row for comparison


OURS, SHAW = "ours", "Shaw"
VASWANI, AL_RFOU = "Vaswani (absolute)", "Al-Rfou (absolute)"
_FIRST = Row("yes", OURS, "full", 27.02, 26.77, 500)
_HALF_LOSS = Row("yes", OURS, "half", 28.69, 28.33, 460, "wt103_128m")
_PLAIN = "wt103_no_recurrence"  # names of rows without recurrence
_PLAIN_HALF, _PLAIN_SHAW = f"{_PLAIN}_half_loss", f"{_PLAIN}_shaw"

TABLES: dict[str, dict[str, Row]] = {
    "6": {
        "wt103_128m": _FIRST,
        "wt103_shaw": Row("yes", SHAW, "full", 27.94, 27.94, 256, "wt103_128m"),
        "wt103_half_loss": _HALF_LOSS,
        _PLAIN: Row("no", OURS, "full", 29.59, 29.02, 260, "wt103_128m"),
        _PLAIN_HALF: Row("no", OURS, "half", 30.10, 30.10, 120, _PLAIN),
        _PLAIN_SHAW: Row("no", SHAW, "full", 29.75, 29.75, 120, _PLAIN),
        f"{_PLAIN_SHAW}_half_loss": Row(
            "no", SHAW, "half", 30.50, 30.50, 120, _PLAIN_SHAW
        ),
        "wt103_vaswani": Row("no", VASWANI, "half", 30.97, 30.97, 120, _PLAIN_HALF),
        "wt103_al_rfou": Row("no", AL_RFOU, "half", 31.16, 31.16, 120, _PLAIN_HALF),
        "wt103_151m": Row("yes", OURS, "full", 23.43, 23.09, 640, "wt103_128m"),
    },
    "7": {
        "lm1b_300m": Row("yes", OURS, "full", 0, 25.2, 0),
        "lm1b_shaw": Row("yes", SHAW, "full", 0, 25.7, 0, "lm1b_300m"),
        "lm1b_no_recurrence": Row("no", OURS, "full", 0, 27.1, 0, "lm1b_300m"),
    },
    "10": {
        "wt103_128m": _FIRST,
        "wt103_half_loss": _HALF_LOSS,
        f"{_PLAIN}_176": Row("no", OURS, "full", 28.43, 27.98, 400, "wt103_128m"),
        f"{_PLAIN_HALF}_172": Row(
            "no", OURS, "half", 28.83, 28.83, 120, "wt103_half_loss"
        ),
    },
}

ROWS = {name: row for rows in TABLES.values() for name, row in rows.items()}


MEMORIES = "memories"  # the name of the table
BASE, FEWER_STREAMS = "paper", "fewer_streams"  # other rows are compared with these
TGT_LEN, MEM_LEN, STREAMS = 32, 64, 32
GROUP = 4  # segments that a gradient crosses


class MemoryTask(NamedTuple):
    """A text to learn, and the packaged experiment on which its recipe is based."""

    recipe: str
    values: Values
    # A generated text (kind, delay, length, symbols), in which only answers are scored.
    text: tuple[str, int, int, int] | None = None
    distances: tuple[int, ...] = ()  # answers at these are also scored


MEM_LENS = ("model.mem_len", "eval.mem_len", "generate.mem_len")
# A reach of 79 tokens, for pre-norm models. Streams of the test would start inside an
# episode, except for the first.
SHORT_REACH: Values = {
    **dict.fromkeys(("train.tgt_len", "eval.tgt_len", *MEM_LENS), 16),
    **{"model.pre_lnorm": True, "eval.streams": 1},
}


def generated(
    text: tuple[str, int, int, int], n_layer: int, steps: int, beyond: bool = False
) -> MemoryTask:
    """Returns a generated task; with `beyond`, its answers are beyond the reach."""
    values: Values = {"train.num_steps": steps}
    values |= {"model.n_layer": n_layer, "model.unroll": n_layer}
    if beyond:
        distances = (48, 96, 192, 384, 768)
        return MemoryTask("copying", values | SHORT_REACH, text, distances)
    return MemoryTask("copying", values, text)


# Two layers reach 128 tokens before a segment. The first distance is in the memory, the
# second only in the reach, the third beyond.
TASKS: dict[str, MemoryTask] = {
    "copying_48": generated(("copying", 40, 8, 8), 2, 1500),
    "copying_96": generated(("copying", 88, 8, 8), 2, 1500),
    "copying_192": generated(("copying", 184, 8, 8), 2, 1500),
    "recall": generated(("recall", 40, 2, 8), 4, 2500),  # 48 tokens back at most
    "recall_96": generated(("recall", 88, 2, 8), 4, 1000, beyond=True),
    "multi_query_96": generated(("multi_query", 58, 8, 13), 4, 1000, beyond=True),
    "stdlib": MemoryTask("quickstart", {"train.num_steps": 2400}),
    "wikitext2": MemoryTask(
        "quickstart",
        {
            **{"data.corpus": "wikitext2", "data.vocab": "word"},
            **{"model.cutoffs": (2000, 10000), "model.div_val": 4},
            **{"model.dropout": 0.1, "optim.lr": 1e-3, "train.num_steps": 2000},
            **{"generate.prompt": "the"},
        },
    ),
}
COMMON: Values = {
    **{"train.tgt_len": TGT_LEN, "eval.tgt_len": TGT_LEN},
    **dict.fromkeys(MEM_LENS, MEM_LEN),
    **{"train.batch_size": STREAMS, "train.segments_per_call": GROUP},
    **{"eval.streams": 8, "train.log_every": 100, "checkpoint.keep": 1},
}
# The same tokens in an update, from fewer streams.
FEWER: Values = {
    "train.batch_size": STREAMS // GROUP,
    "train.segments_per_update": GROUP,
}
ACROSS: Values = {**FEWER, "train.gradient_segments": GROUP}
KINDS: dict[str, Values] = {
    "none": dict.fromkeys(MEM_LENS, 0),
    BASE: {},
    FEWER_STREAMS: FEWER,
    "gradients": ACROSS,
    "fast_weights": {"model.fast_weights": True},
    # As many bytes as with fast weights, if a head has 64 features.
    "longer": dict.fromkeys(MEM_LENS, MEM_LEN + 65),
}


def base(kind: str) -> str:
    """Returns the row with the paper's memory and as many streams."""
    fewer = "train.batch_size" in KINDS[kind] and kind != FEWER_STREAMS
    return FEWER_STREAMS if fewer else BASE


@dataclass(frozen=True)
class TableConfig(Section, name="table", modes="table"):
    """The table of the paper to reproduce with small models."""

    table: str = field(
        "6",
        one_of((*TABLES, MEMORIES)),
        help='Number of the table, or "memories" for kinds of memory.',
    )
    rows: tuple[str, ...] = field((), help="Rows to run. Empty runs all.")
    seeds: int = field(3, at_least(1), help="Runs per row.")

    def __post_init__(self) -> None:
        """Raises UserError for an impossible value."""
        super().__post_init__()
        of_memories = self.table == MEMORIES
        known = [*KINDS, *TASKS] if of_memories else [*TABLES[self.table]]
        for name in self.rows:
            if name not in known:
                raise UserError(
                    f"table.rows: Table {self.table} has no row {name!r}"
                    f"{nearest(name, known)}; it has {', '.join(known)}"
                )


@dataclass(frozen=True)
class ReclConfig(Section, name="recl", modes="recl", roles=Role.LOCAL):
    """The models to compare on eval.split, and the context lengths.

    The paper's results are multiples of 100 tokens, hence the default contexts.
    """

    workdirs: tuple[str, ...] = field((), help="Workdirs of the models, of equal size.")
    contexts: tuple[int, ...] = field(
        (100, 1000, 100), help="First and last context length in tokens, and the step."
    )

    def __post_init__(self) -> None:
        """Raises UserError for an impossible value."""
        super().__post_init__()
        first, last, step = contexts = (*self.contexts, 0, 0, 0)[:3]
        valid = len(self.contexts) == 3 and min(contexts) > 0
        if not valid or not step <= last - first < 10_000 * step:
            raise UserError(
                f"recl.contexts = {self.contexts} must be the first length, the last "
                "and the step, of 2 to 10,000 lengths, such as 100,1000,100"
            )

    @property
    def lengths(self) -> list[int]:
        """The context lengths to compare, in tokens."""
        first, last, step = self.contexts
        return list(range(first, last + 1, step))
