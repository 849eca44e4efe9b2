"""The rows that `tpu_step` measures: their identifying fields."""

import itertools
from collections.abc import Iterator
from typing import Any

from experiments.benchmarks.tpu_operations import OPERATIONS

CHIPS = ("v5e", "v5p")
KERNELS = ("xla", "chunked", "tpu")
# Streams of one chip: of the published 64 on 16 chips, and of 128 on 32.
STREAMS = {"enwik8_24l": 4, "wt103_large": 4}
# Streams of one chip, and layers in a step of the scan over layers.
BATCH = {
    ("enwik8_24l", "v5e"): (16, 1),
    ("wt103_large", "v5e"): (32, 1, 18),
    ("enwik8_24l", "v5p"): (64, 1),
    ("wt103_large", "v5p"): (128, 1, 18),
}
Row = dict[str, Any]


def wanted() -> Iterator[Row]:
    """Yields the identifying fields of every row."""
    for part in ("step", "largest"):
        for chip, experiment, kernel in itertools.product(CHIPS, STREAMS, KERNELS):
            row = {"part": part, "experiment": experiment, "chip": chip}
            yield row | {"kernel": kernel}
    for (experiment, chip), (streams, *unrolls) in BATCH.items():
        row = {"part": "batch", "experiment": experiment, "chip": chip}
        for unroll in unrolls:
            yield row | {"kernel": "tpu", "streams": streams, "unroll": unroll}
    for operation in OPERATIONS:
        yield {"part": "operation", "chip": "v5e", "operation": operation}


def find(rows: list[Row], **name: Any) -> Row | None:
    """Returns the first row with these fields, if any."""
    return next((row for row in rows if name.items() <= row.items()), None)
