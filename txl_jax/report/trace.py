"""A profile of ten updates, for trace viewers."""

from pathlib import Path
from typing import Self

import jax

from txl_jax.runtime import distributed

TRACED = 10  # updates


class Trace:
    """Traces, in the first process, the updates from `first`, counted from 1, on."""

    def __init__(self, first: int, step: int, folder: Path):
        """step: the updates that the run has made; a later `first` is traced."""
        self.begins_after = first - 1 if first > step and distributed.is_first() else -1
        self.ends_after = 0  # 0 = not running
        self.folder = folder

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.ends_after:
            jax.profiler.stop_trace()
            self.ends_after = 0

    def before(self, step: int, state: object) -> None:
        """Starts or ends the trace after `step` updates were dispatched."""
        if self.ends_after and step >= self.ends_after:
            jax.block_until_ready(state)
            self.__exit__()
        elif 0 <= self.begins_after <= step:
            jax.block_until_ready(state)
            jax.profiler.start_trace(self.folder)
            self.begins_after, self.ends_after = -1, step + TRACED
