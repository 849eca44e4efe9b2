"""Profiles some updates, for TensorBoard's trace viewer."""

from pathlib import Path
from typing import Any, Self

import jax

from txl_jax.runtime import distributed


class Trace:
    """Writes a profile of the updates first + 1 to last into `folder`.

    Only the first of several processes is profiled. steps = (-1, -1) profiles nothing.
    """

    def __init__(self, steps: tuple[int, int], folder: Path):
        self.first, self.last = steps if distributed.is_first() else (-1, -1)
        self.folder = folder
        self.running = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()

    def before(self, step: int, state: Any) -> None:
        """Starts or ends the profile after `step` updates were dispatched."""
        if self.running and step >= self.last:
            jax.block_until_ready(state)
            self._stop()
        elif not self.running and self.first <= step < self.last:
            jax.block_until_ready(state)
            jax.profiler.start_trace(self.folder)
            self.running = True

    def _stop(self) -> None:
        if self.running:
            jax.profiler.stop_trace()
            self.running = False
