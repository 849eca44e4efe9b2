"""Profiles of updates, written by the run or fetched from it, for trace viewers."""

import socket
from pathlib import Path
from typing import Self

import jax

from txl_jax.errors import UserError
from txl_jax.runtime import distributed
from txl_jax.runtime.options import RunConfig


class Trace:
    """Writes a profile of run.profile_steps into `folder`, and serves the profiler."""

    def __init__(self, config: RunConfig, folder: Path):
        """Raises UserError if the port is not free."""
        steps = config.profiled() if distributed.is_first() else (-1, -1)
        self.first, self.last = steps
        port = config.profiler_port
        self.folder, self.port = folder, port and port + jax.process_index()
        self.running = False
        if self.port:
            try:  # jax's server would only log that the port is in use
                socket.create_server(("", self.port)).close()
            except (OSError, OverflowError) as error:
                raise UserError(
                    f"run.profiler_port = {self.port} cannot be used ({error}): give a "
                    "free port"
                ) from error
            jax.profiler.start_server(self.port)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()
        if self.port:
            jax.profiler.stop_server()

    def before(self, step: int, state: object) -> None:
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
