"""Graceful termination: SIGTERM and SIGINT end a training without losing an update.

A preempted machine or Slurm sends SIGTERM, Ctrl-C sends SIGINT. The training loop ends
at the next boundary, after a call of the step or a segment of a validation, and saves.
Outside the loop, signals have their default actions, which a line may announce.

Any process of a run may receive the signal. JAX's preemption service, which handles
SIGTERM from the connection on, makes all of them end at the same boundary: the next one
that no process has reached, chosen in the background without a collective.
"""

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from typing import Any

from jax.experimental import multihost_utils

from txl_jax.errors import INTERRUPTED, RETRY, Interrupted
from txl_jax.runtime import distributed


class Stop:
    """Whether a training has to end.

    status: exit status, nonzero once this process has received a signal. reached:
    whether `at_boundary` has returned True. last_words: if set, a signal prints this
    line, and then has the effect that it had before.
    """

    def __init__(self, last_words: str = "") -> None:
        self.status, self.last_words = 0, last_words
        self.before: dict[int, Any] = {}  # the handlers that `listening` replaces
        self.reached = False
        self._boundaries = 0

    def receive(self, number: int, _: object = None) -> None:
        """Handles a signal."""
        if self.last_words:
            distributed.warn(self.last_words)
            signal.signal(number, self.before.get(number, signal.SIG_DFL))
            signal.raise_signal(number)
        self.status = self.status or (INTERRUPTED if number == signal.SIGINT else RETRY)
        if number == signal.SIGINT:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            distributed.warn(
                "SIGINT: ending after this call; a second one ends at once"
            )
            if distributed.several():
                os.kill(os.getpid(), signal.SIGTERM)  # the only signal jax handles

    def at_boundary(self) -> bool:
        """Returns whether to end; all processes must call this equally often."""
        self._boundaries += 1
        if not distributed.several():
            self.reached = self.reached or bool(self.status)
        elif multihost_utils.reached_preemption_sync_point(self._boundaries):
            self.reached = True
        return self.reached

    def end(self, where: str) -> Interrupted:
        """Returns the exception to raise once everything is saved."""
        return Interrupted(
            f"ended {where}; the same command resumes", self.status or RETRY
        )


@contextlib.contextmanager
def listening(last_words: str = "") -> Iterator[Stop]:
    """Receives SIGTERM and SIGINT inside the context, in the main thread."""
    stop = Stop(last_words)
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    several = distributed.several()
    numbers = [signal.SIGINT] if several else [signal.SIGINT, signal.SIGTERM]
    stop.before = {number: signal.signal(number, stop.receive) for number in numbers}
    try:
        yield stop
    finally:
        for number, handler in stop.before.items():
            signal.signal(number, handler)
        if several:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
