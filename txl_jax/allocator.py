"""The C library's memory: what is freed is kept, since the next step needs it again.

XLA takes a step's temporaries from malloc and gives them back after the step. glibc
returns blocks as large as those to the system, and the next step waits while all their
pages are made anew: an eighth of a step's time on a CPU, more where a hypervisor takes
free pages back.
"""

import ctypes
import os
import sys

# Of glibc's malloc.h, with the values that keep all memory in one heap that never
# shrinks: blocks of other arenas, or too large for one, are mapped one by one.
OPTIONS = {"M_ARENA_MAX": (-8, 1), "M_MMAP_MAX": (-4, 0), "M_TRIM_THRESHOLD": (-1, -1)}


def keep_freed() -> bool:
    """Keeps freed memory from now on; returns whether this C library can.

    Call it before JAX starts its threads. Who set a MALLOC_* variable chose otherwise.
    """
    chosen = any(name.startswith("MALLOC_") for name in os.environ)
    if chosen or sys.platform != "linux":
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # musl has none
    return mallopt is not None and all(mallopt(*each) for each in OPTIONS.values())
