"""Keeps freed memory in the process instead of returning it to the system.

XLA allocates a step's temporary buffers with malloc and frees them after the step.
glibc returns blocks of their size to the system, and the next step waits for the kernel
to map their pages again: an eighth of a step's time on a CPU, more on a hypervisor that
reclaims free pages.
"""

import ctypes
import os
import sys

# Parameters of glibc's malloc.h: one heap that never shrinks. Blocks in other arenas,
# or too large for an arena, would be mapped one by one.
OPTIONS = {"M_ARENA_MAX": (-8, 1), "M_MMAP_MAX": (-4, 0), "M_TRIM_THRESHOLD": (-1, -1)}


def keep_freed() -> bool:
    """Keeps freed memory, and returns whether libc can; call before jax's threads."""
    configured = any(name.startswith("MALLOC_") for name in os.environ)
    if configured or sys.platform != "linux":
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # musl has none
    return mallopt is not None and all(mallopt(*option) for option in OPTIONS.values())
