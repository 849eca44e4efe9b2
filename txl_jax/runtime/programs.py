"""Compiled programs: compiled once in a process, and kept for the next one."""

import contextlib
import dataclasses
import hashlib
import logging
import os
import platform
import sys
import threading
import warnings
from collections.abc import Callable, Collection, Hashable
from dataclasses import field
from pathlib import Path
from typing import Any, Protocol

import jax
import numpy as np
from jax.experimental.compilation_cache import compilation_cache

from txl_jax.runtime import distributed, storage

log = logging.getLogger(__name__)

QUIET_SECONDS = 2.0  # longer compilations are announced
MOST_BYTES = 2**30  # the least recently used programs are deleted


class Lowerable(Protocol):
    """A jitted function, or a Program."""

    def lower(self, *args: Any) -> jax.stages.Lowered:
        """Lowers the function for arrays, or for their shapes and shardings."""


def compile_program(
    name: str,
    program: Lowerable,
    *args: Any,
    options: dict[str, str | bool] | None = None,
) -> jax.stages.Compiled:
    """Compiles a function for these arguments; a long compilation is announced.

    All processes have compiled when it returns: see `distributed.wait_for_all`.
    """
    notice = threading.Timer(QUIET_SECONDS, log.info, [f"compiling {name}"])
    notice.start()
    try:
        compiled = program.lower(*args).compile(options)
        distributed.wait_for_all()
    finally:
        notice.cancel()
    return compiled


@dataclasses.dataclass(eq=False)
class Program:
    """A function that is compiled once for each shape of its last argument.

    `carries`: the first result replaces the first argument and keeps its shardings.
    `donates`: the first argument's memory is used for the results.
    """

    name: str
    function: Callable[..., Any]
    carries: bool = False
    donates: bool = False
    compiled: dict[Hashable, jax.stages.Compiled] = field(default_factory=dict)

    def lower(self, *args: Any) -> jax.stages.Lowered:
        """Lowers the function for arrays, or for their shapes and shardings."""
        places = jax.tree.map(lambda x: x.sharding, args[0]) if self.carries else None
        jitted = jax.jit(
            self.function,
            donate_argnums=(0,) if self.donates else (),
            out_shardings=(places, None) if self.carries else None,
            keep_unused=True,  # the result is on the devices of all arguments
        )
        return jitted.lower(*args)

    def compile(self, *args: Any) -> jax.stages.Compiled:
        """Returns the compiled function for these arguments."""
        shapes = tuple(map(np.shape, jax.tree.leaves(args[-1])))
        if shapes not in self.compiled:
            self.compiled[shapes] = compile_program(self.name, self, *args)
        return self.compiled[shapes]

    def __call__(self, *args: Any) -> Any:
        """Calls the compiled function."""
        return self.compile(*args)(*args)


def user_cache() -> Path:
    """Returns the folder of this package in the user's cache folder."""
    default = "~/Library/Caches" if sys.platform == "darwin" else "~/.cache"
    cache = os.environ.get("XDG_CACHE_HOME") or default
    return Path(cache).expanduser().absolute() / "txl_jax"


def keep() -> None:
    """Keeps compiled programs in the user's cache folder, if it can be used.

    JAX_COMPILATION_CACHE_DIR, also on gs://, takes precedence.
    """
    compilation_cache.reset_cache()  # a program compiled before has chosen its folder
    if folder := jax.config.values["jax_compilation_cache_dir"]:
        if storage.is_remote(folder):
            # XLA:GPU's cache of tuned kernels: only on local disks, fails elsewhere.
            jax.config.update("jax_persistent_cache_enable_xla_caches", "none")
        return
    with contextlib.suppress(OSError, RuntimeError):  # there may be no home
        folder = user_cache() / "programs" / processor()
        folder.mkdir(parents=True, exist_ok=True)
        warnings.filterwarnings("ignore", "Error .* compilation cache entry")
        jax.config.update("jax_compilation_cache_dir", str(folder))
        jax.config.update("jax_compilation_cache_max_size", MOST_BYTES)


def processor() -> str:
    """Returns a key of the processor and its usable cores, which results depend on."""
    parts = {platform.machine(), platform.processor(), os.environ.get("NPROC", "")}
    parts.add(f"{usable_cores()} cores")
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = ("model name", "flags", "Features", "CPU part")
        parts |= {x for x in cpuinfo.read_text().splitlines() if x.startswith(names)}
    return hashlib.sha256("\n".join(sorted(parts)).encode()).hexdigest()[:12]


def usable_cores() -> int:
    """Returns the number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


# The commands that jaxlib 0.10 to 0.12 record into CUDA graphs by default. A compiler
# option replaces this list; unlike XLA_FLAGS, it does not accept "+WHILE".
COMMANDS = "FUSION CUBLAS CUBLASLT CUSTOM_CALL CUDNN DYNAMIC_SLICE_FUSION CONDITIONAL"
RECORDED = "xla_gpu_enable_command_buffer"


def record_loops(devices: Collection[jax.Device]) -> dict[str, str | bool] | None:
    """Returns the compiler options of a step whose loops become CUDA graphs.

    The host then starts a loop once instead of each of its kernels. This was measured
    on one NVIDIA GPU; for other or several devices, and where XLA_FLAGS state the
    commands, the compiler keeps its defaults.
    """
    names = {device.device_kind for device in devices}
    one_gpu = len(devices) == 1 and all(name.startswith("NVIDIA") for name in names)
    if not one_gpu or RECORDED in os.environ.get("XLA_FLAGS", ""):
        return None
    return {RECORDED: ",".join([*COMMANDS.split(), "WHILE"])}
