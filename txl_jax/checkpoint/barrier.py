"""Barriers of a save at which no process waits for one that has failed.

While a save is written in the background, the processes of a run meet at two barriers:
when all have written their parts, and when process 0 has committed the checkpoint. A
process whose write fails never reaches the first, and orbax would keep the others
waiting there for minutes.
"""

import itertools
import sys
import threading

import jax
from jax._src.distributed import global_state
from orbax.checkpoint import multihost

from txl_jax.runtime import distributed, storage

MEETINGS = 2
NUMBERS = itertools.count()  # of the saves, the same in all processes


class Barriers:
    """Orbax's barriers in the background of a save: its `AsyncOptions.barrier_sync_fn`.

    After a failure orbax goes to a third barrier while it handles the exception. There
    the process first leaves its reason in JAX's key-value store, and goes to the
    barrier where the others are. All of them find the reason, and fail as well.
    """

    def begin(self) -> None:
        """Must precede each save."""
        self.key = f"txl_jax/saves/{next(NUMBERS)}/"
        self.met = 0
        self.known = False  # to the others

    def __call__(self, *, key: str, timeout_ms: int) -> None:
        """Waits for all processes; raises OSError if another one has failed."""
        if (error := sys.exception()) is not None:
            for thread in threading.enumerate():
                if thread.name == "async_save":  # it may still succeed, or fail as well
                    thread.join()
        if not distributed.several():
            return
        if "_complete." in key:  # one of the two
            self._meet(timeout_ms)
            for name, reason in global_state.client.key_value_dir_get(self.key):
                self.known = True
                raise OSError(f"process {name.removeprefix(self.key)}: {reason}")
            return
        if error is not None and self.met < MEETINGS and not self.known:
            self.known = True
            name = f"{self.key}{jax.process_index()}"
            global_state.client.key_value_set(name, storage.one_line(error))
            self._meet(timeout_ms)
        multihost.get_barrier_sync_fn()(key=key, timeout_ms=timeout_ms)

    def _meet(self, timeout_ms: int) -> None:
        self.met += 1
        key = f"{self.key}{self.met}"
        multihost.get_barrier_sync_fn()(key=key, timeout_ms=timeout_ms)
