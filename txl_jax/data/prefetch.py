"""Reading ahead: the next batches are made while the device works on this one.

Dims: none; a batch is whatever the function makes.
"""

import queue
import threading
from collections.abc import Callable
from typing import Generic, Self, TypeVar

Batch = TypeVar("Batch")
Where = TypeVar("Where")

JOIN_SECONDS = 10.0  # a read that hangs must not keep a failed run alive


class Prefetch(Generic[Batch, Where]):
    """Iterates (batch, next position) of a pure function, `depth` calls ahead.

    The position that comes with a batch is the one to save once the batch is used:
    what was made ahead of it is made again on resume. An exception of the function
    comes out of `next`, after the batches before it. Close it to end its thread.
    """

    def __init__(
        self,
        make: Callable[[Where], tuple[Batch, Where]],
        position: Where,
        depth: int = 2,
    ):
        self.make = make
        self.ready: queue.SimpleQueue[tuple[Batch, Where] | BaseException]
        self.ready = queue.SimpleQueue()
        self.room = threading.Semaphore(depth)
        self.closed = False
        # As a daemon it cannot keep the process from ending.
        self.thread = threading.Thread(
            target=self._work, args=(position,), name="prefetch", daemon=True
        )
        self.thread.start()

    def _work(self, position: Where) -> None:
        try:
            while self.room.acquire() and not self.closed:
                batch, position = self.make(position)
                self.ready.put((batch, position))
        except BaseException as error:
            self.ready.put(error)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> tuple[Batch, Where]:
        """Returns the next batch, waiting for it, or raises what making it raised."""
        if self.closed:
            raise StopIteration
        made = self.ready.get()
        if isinstance(made, BaseException):
            self.ready.put(made)  # and the same to whoever asks again
            raise made
        self.room.release()
        return made

    def close(self) -> None:
        """Ends the thread after the batch that it is making."""
        self.closed = True
        self.room.release()
        self.thread.join(JOIN_SECONDS)
