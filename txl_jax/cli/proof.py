"""Proves the kernels that `model.kernel = auto` may select, once for each machine."""

import contextlib
import functools
import hashlib
import threading
from pathlib import Path

import jax

from txl_jax import kernels
from txl_jax.kernels import check, dispatch
from txl_jax.report.log import say
from txl_jax.report.progress import waiting
from txl_jax.runtime import distributed, programs
from txl_jax.runtime.storage import write_atomically

MOST_SECONDS = 240  # of a check, most of which compiles


def prove_kernels(kernel: str) -> None:
    """Checks the kernels that `auto` may select; all processes call this and agree.

    A kernel that is wrong, does not compile or takes too long is not selected.
    """
    device = jax.local_devices()[0]
    for name in dispatch.candidates(device) if kernel == "auto" else ():
        path = programs.user_cache() / "kernels" / f"{name}-{_key(device)}.txt"
        fault = None
        with contextlib.suppress(OSError, ValueError):
            fault = path.read_text("utf-8")
        if distributed.anywhere(fault is None):
            with waiting(f"checking the kernel {name} on {device.device_kind}"):
                fault = _check(name)
            if not fault or " is off by " in fault:  # others may be transient
                with contextlib.suppress(OSError, RuntimeError):  # there may be no home
                    path.parent.mkdir(parents=True, exist_ok=True)
                    write = functools.partial(
                        Path.write_text, data=fault, encoding="utf-8"
                    )
                    write_atomically(path, write)
        if distributed.anywhere(bool(fault)):
            fault = fault or "found by another process"
            where = f"on {device.device_kind}"
            say(f'kernel = "auto" will not select {name} {where}: {fault}')
        dispatch.FAULTS[name] = fault or ""


def _check(name: str) -> str:
    """Returns the fault of a kernel; a check that does not end is left in a thread."""
    found: list[str] = []
    kernel = dispatch.KERNELS[name]
    thread = threading.Thread(
        target=lambda: found.append(check.fault(kernel)), name="check", daemon=True
    )
    thread.start()
    thread.join(MOST_SECONDS)
    late = f"its check takes over {MOST_SECONDS} s"
    fault = late if thread.is_alive() else "its check raised an exception"
    return found[0] if found else fault


def _key(device: jax.Device) -> str:
    """Returns a key of all that a verdict depends on: device, driver, jax and code."""
    digest = hashlib.sha256(repr((device.device_kind, jax.__version__)).encode())
    digest.update(device.client.platform_version.encode())
    for file in sorted(Path(*kernels.__path__).rglob("*.py")):
        digest.update(file.read_bytes())
    return digest.hexdigest()[:16]
