"""The rows of the table of memories: kinds of memory, and tasks that need one.

A run has the recipe of its task and the fields that its kind changes. All kinds read
equally many tokens, in segments of L = 32 with a memory of M = 64, and have as many
parameters within 2 %.
"""

from typing import Any, NamedTuple

Fields = dict[str, Any]  # by "section.field"

MEMORIES = "memories"  # the name of the table
BASE, FEWER_STREAMS = "paper", "fewer_streams"  # what the other rows are compared with
TGT_LEN, MEM_LEN, STREAMS = 32, 64, 32
GROUP = 4  # segments that a gradient crosses


class MemoryTask(NamedTuple):
    """A text to learn, and the packaged experiment that its recipe starts from."""

    recipe: str
    fields: Fields
    # A generated text, of which only answers are scored: kind, delay, length, symbols.
    text: tuple[str, int, int, int] | None = None


def answered(
    kind: str, delay: int, length: int, n_layer: int, steps: int
) -> MemoryTask:
    """Returns a generated task of 8 letters with a model of n_layer layers."""
    fields: Fields = {"train.num_steps": steps}
    layers = {"model.n_layer": n_layer, "model.unroll": n_layer}
    return MemoryTask("copying", fields | layers, (kind, delay, length, 8))


# Two layers reach 128 tokens before a segment. The first distance is in the memory, the
# second only in the reach, the third beyond.
TASKS: dict[str, MemoryTask] = {
    "copying_48": answered("copying", 40, 8, 2, 1500),
    "copying_96": answered("copying", 88, 8, 2, 1500),
    "copying_192": answered("copying", 184, 8, 2, 1500),
    "recall": answered("recall", 40, 2, 4, 2500),  # 48 tokens back at most
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
COMMON: Fields = {
    **{"train.tgt_len": TGT_LEN, "eval.tgt_len": TGT_LEN},
    **{"model.mem_len": MEM_LEN, "eval.mem_len": MEM_LEN, "generate.mem_len": MEM_LEN},
    **{"train.batch_size": STREAMS, "train.segments_per_call": GROUP},
    **{"eval.streams": 8, "train.log_every": 100, "checkpoint.keep": 1},
}
# The same tokens in an update, from fewer streams.
FEWER: Fields = {
    "train.batch_size": STREAMS // GROUP,
    "train.segments_per_update": GROUP,
}
ACROSS: Fields = {**FEWER, "train.gradient_segments": GROUP}
# Two kinds that differ only in the evaluation share a training.
KINDS: dict[str, Fields] = {
    "none": {"model.mem_len": 0, "eval.mem_len": 0, "generate.mem_len": 0},
    BASE: {},
    FEWER_STREAMS: FEWER,
    "gradients": ACROSS,
    "same_layer": {"model.recurrence": "same"},
    "tokens": {**ACROSS, "model.memory_tokens": 8},
    # With the memory, 320 tokens back.
    "compressive": {"model.compressed_len": 64, "model.compression_rate": 4},
    "retrieval": {"model.retrieval_len": 1024},
    # Its weight and its factor are chosen on the validation split.
    "cache": {"eval.cache_len": 2000, "eval.cache_weight": 0.1},
}
# The options of the cache to choose from.
CACHE_THETAS, CACHE_WEIGHTS = (0.03, 0.1, 0.3), (0.05, 0.2, 0.5)
TUNED_ON = 20_000  # tokens of the validation split


def base(kind: str) -> str:
    """Returns the row with the paper's memory and as many streams."""
    fewer = "train.batch_size" in KINDS[kind] and kind != FEWER_STREAMS
    return FEWER_STREAMS if fewer else BASE
