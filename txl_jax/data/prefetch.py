"""Prepares the next batches in a thread while the devices work on the current one."""

import queue
import threading
from collections.abc import Callable
from typing import Generic, Self, TypeVar

Batch = TypeVar("Batch")
Position = TypeVar("Position")

JOIN_SECONDS = 10.0  # so that a hanging read cannot keep a failed run alive


class Prefetch(Generic[Batch, Position]):
    """Iterates over (batch, next position) of a pure function, `depth` calls ahead.

    Save the position that comes with a batch once the batch is used: a resumed run
    computes the prefetched batches again. An exception of the function is raised after
    the batches before it. Close the iterator to end its thread.
    """

    def __init__(
        self,
        make: Callable[[Position], tuple[Batch, Position]],
        position: Position,
        depth: int = 2,
    ):
        self.make = make
        self.ready: queue.SimpleQueue[tuple[Batch, Position] | BaseException]
        self.ready = queue.SimpleQueue()
        self.room = threading.Semaphore(depth)
        self.closed = False
        # A daemon thread cannot keep the process alive.
        self.thread = threading.Thread(
            target=self._work, args=(position,), name="prefetch", daemon=True
        )
        self.thread.start()

    def _work(self, position: Position) -> None:
        try:
            while self.room.acquire() and not self.closed:
                batch, position = self.make(position)
                self.ready.put((batch, position))
        except BaseException as error:
            self.ready.put(error)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> tuple[Batch, Position]:
        """Waits for the next batch; raises an exception of `make`."""
        if self.closed:
            raise StopIteration
        made = self.ready.get()
        if isinstance(made, BaseException):
            self.ready.put(made)  # for the next call
            raise made
        self.room.release()
        return made

    def close(self) -> None:
        """Ends the thread after its current batch."""
        self.closed = True
        self.room.release()
        self.thread.join(JOIN_SECONDS)
