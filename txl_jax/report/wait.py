"""What a run says while it waits for work that has no steps to count.

Dims: none.
"""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax

from txl_jax.report.writer import say

QUIET_SECONDS = 2.0  # work that is done before is not told
EVERY_SECONDS = 10.0

# Of a training step: on two CPU cores 4 to 9 s, by the TPU compiler there 9 to 98 s,
# half of them below 35 (experiments/benchmarks/results.jsonl and pods.jsonl).
COMPILE_SECONDS = {"cpu": 10}
OTHERS_COMPILE_SECONDS = 35


@contextlib.contextmanager
def waiting(what: str) -> Iterator[None]:
    """Says `what` after two seconds inside, then every ten, and how long it took."""
    done = threading.Event()
    began = time.monotonic()

    def tell() -> None:
        if done.wait(QUIET_SECONDS):
            return
        say(what)
        while not done.wait(EVERY_SECONDS):
            say(f"{what}: {time.monotonic() - began:.0f} s so far")

    teller = threading.Thread(target=tell, daemon=True)
    teller.start()
    try:
        yield
    finally:
        done.set()
        teller.join()
    if (seconds := time.monotonic() - began) > QUIET_SECONDS:
        say(f"{what.partition(',')[0]}: took {seconds:.1f} s")


def telling_compilation(what: str, call: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the jitted `call` whose first time, when it compiles, is told."""
    is_first = True

    def told(*args: Any) -> Any:
        nonlocal is_first
        if not is_first:
            return call(*args)
        is_first = False
        about = COMPILE_SECONDS.get(jax.default_backend(), OTHERS_COMPILE_SECONDS)
        with waiting(f"compiling {what}, about {about} s"):
            return call(*args)

    return told
