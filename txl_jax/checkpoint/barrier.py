"""Barriers of a save at which no process waits for one that has failed.

While a save is written in the background, the processes of a run meet at two barriers:
when all have written their parts, and when process 0 has committed the checkpoint. A
process whose write fails never reaches the first, and orbax would keep the others
waiting there for minutes. This relies on private names of orbax: with a version that
lacks them, the others wait.
"""

import contextlib
import functools
import itertools
from typing import Any

import jax
from jax._src.distributed import global_state  # orbax uses it, too
from orbax.checkpoint import multihost, type_handlers

from txl_jax.runtime import distributed, storage

MEETINGS = 2
LIMIT_MS = 600_000
SLICE_BYTES = 2**20  # a copy of an array is written in parts, each compiled, of no less
MOVED = ImportError, AttributeError, TypeError  # if a private name of orbax has changed
NUMBERS = itertools.count()  # of the saves, the same in all processes


class Barriers:
    """Orbax's barriers in the background of a save.

    A process that fails leaves its reason in JAX's key-value store, and goes to the
    barrier where the others are. There all of them find the reason, and fail as well.
    """

    def begin(self) -> None:
        """Must precede each save."""
        self.key = f"txl_jax/saves/{next(NUMBERS)}/"
        self.met = 0
        self.known = False  # to the others, or they cannot be told

    def __call__(self, *, key: str, timeout_ms: int) -> None:
        """Waits for all processes; raises OSError if another one has failed."""
        if "_complete." not in key:  # before and after the background's work
            multihost.get_barrier_sync_fn()(key=key, timeout_ms=timeout_ms)
            return
        self.known = True
        self._meet(timeout_ms)
        client: Any = global_state.client
        for name, reason in client.key_value_dir_get(self.key):
            raise OSError(f"process {name.removeprefix(self.key)}: {reason}")
        self.known = False

    def _meet(self, timeout_ms: int) -> None:
        self.met += 1
        key = f"{self.key}{self.met}"
        multihost.get_barrier_sync_fn()(key=key, timeout_ms=timeout_ms)

    def fail(self, error: BaseException) -> None:
        """Tells all processes, and the threads of this one, that its part failed."""
        with contextlib.suppress(*MOVED):
            from orbax.checkpoint._src.futures import future, synchronization

            # Orbax's threads of this save that wait for process 0's folders.
            kinds = synchronization.HandlerAwaitableSignal
            current = synchronization.OperationIdGenerator.get_current_operation_id()
            signals = [kinds.STEP_DIRECTORY_CREATION, kinds.ITEM_DIRECTORY_CREATION]
            future.set_signals(signals, operation_id=current)
        if not distributed.several() or self.known or self.met == MEETINGS:
            return
        client: Any = global_state.client
        name = f"{self.key}{jax.process_index()}"
        with contextlib.suppress(jax.errors.JaxRuntimeError):  # the others hang
            client.key_value_set(name, storage.one_line(error))
            self._meet(LIMIT_MS)


@functools.cache
def create_own_folders() -> None:
    """Makes each process create the folders of a save that it needs."""
    with contextlib.suppress(*MOVED):
        from orbax.checkpoint._src.metadata.array_metadata_store import Store

        class OwnFolders(Store):
            def set_primary_host(self, primary_host: int | None) -> None:
                """Keeps None: every process is its own primary host."""

        store = OwnFolders(primary_host=None)
        handler = type_handlers.ArrayHandler(
            array_metadata_store=store, min_slice_bytes_for_replica_parallel=SLICE_BYTES
        )
        type_handlers.register_type_handler(jax.Array, handler, override=True)
