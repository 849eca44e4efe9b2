"""Freed memory stays with the process."""

import os
import subprocess
import sys

import pytest

PROGRAM = """
import resource, threading
from txl_jax.runtime import allocator

def fill():
    b"x" * 200_000_000

def pages_made():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for call in (fill, lambda: thread.join()):
        thread = threading.Thread(target=fill)
        thread.start()
        call()
        thread.join()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

print(allocator.keep_freed(), end=" ")
pages_made()
print(pages_made())
"""


def run(**environment: str) -> tuple[bool, int]:
    """Returns whether memory is kept, and how many pages were made a second time."""
    own = {name: value for name, value in os.environ.items() if "MALLOC" not in name}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env=own | environment,
        capture_output=True,
        text=True,
        check=True,
    )
    kept, pages = done.stdout.split()
    return kept == "True", int(pages)


@pytest.mark.skipif(sys.platform != "linux", reason="glibc is Linux's")
def test_freed_memory_is_reused_by_any_thread() -> None:
    """200 MB are 48,000 pages, and a variable of malloc takes precedence."""
    kept, pages = run()
    assert kept and pages < 2_000
    kept, pages = run(MALLOC_ARENA_MAX="4")
    assert not kept and pages > 40_000
