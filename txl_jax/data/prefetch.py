"""Prepares the next batches in a thread while the devices work on the current one."""

import queue
import threading
from collections.abc import Callable, Generator
from typing import TypeVar

Batch = TypeVar("Batch")
Position = TypeVar("Position")

JOIN_SECONDS = 10.0  # so that a hanging read cannot keep a failed run alive


def prefetch(
    make: Callable[[Position], tuple[Batch, Position]],
    position: Position,
    depth: int = 2,
) -> Generator[tuple[Batch, Position], None, None]:
    """Yields (batch, next position) of a pure function, `depth` calls ahead.

    Save a batch's position only after the batch has been used: a resumed run computes
    the prefetched batches again. An exception of the function is raised after the
    batches that precede it. Close the generator to end its thread.
    """
    ready: queue.SimpleQueue[tuple[Batch, Position] | BaseException]
    ready = queue.SimpleQueue()
    room = threading.Semaphore(depth)
    closed = threading.Event()

    def work(position: Position) -> None:
        try:
            while room.acquire() and not closed.is_set():
                batch, position = make(position)
                ready.put((batch, position))
        except BaseException as error:
            ready.put(error)

    # A daemon thread cannot keep the process alive.
    thread = threading.Thread(target=work, args=(position,), daemon=True)
    thread.start()
    try:
        while not isinstance(made := ready.get(), BaseException):
            room.release()
            yield made
        raise made
    finally:
        closed.set()
        room.release()
        thread.join(JOIN_SECONDS)
