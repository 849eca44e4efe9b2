"""The origin of a run's numbers: config, code, libraries, devices, data, seed."""

import datetime
import importlib.metadata
import os
import platform
import socket
import subprocess
import sys
from pathlib import Path

import jax

from txl_jax.runtime.programs import usable_cores
from txl_jax.runtime.storage import Json

LIBRARIES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")


def describe_result() -> Json:
    """Returns the time, and the code, libraries and devices of this process."""
    return {
        "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "git_revision": git_revision(),
        "versions": versions(),
        "device_kind": jax.devices()[0].device_kind,
        "device_count": jax.device_count(),
        "process_count": jax.process_count(),
        "usable_cores": usable_cores(),
    }


# If these are equal, a resumed run matches an uninterrupted one bit for bit.
EXACT = "versions", "device_kind", "device_count", "process_count", "usable_cores"


def start(config: Json) -> Json:
    """Returns the entry of run.json for one start: command, place, code and config."""
    place = {"host": socket.gethostname(), "pid": os.getpid(), "argv": sys.argv}
    return {**describe_result(), **place, "config": config}


def describe_changes(before: Json, now: Json) -> list[str]:
    """Returns a sentence for each entry of EXACT that differs between two starts."""
    return [
        f"{name} was {before[name]}, is now {now[name]}"
        for name in EXACT
        if before[name] != now[name]
    ]


def git_revision(file: Path = Path(__file__)) -> str:
    """Returns the commit of a file's checkout, or "none".

    "+dirty" is appended if Python files have changed; changed results do not count.
    """

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(file.parent), *arguments]
        return subprocess.check_output(
            command, text=True, stderr=subprocess.DEVNULL
        ).strip()

    try:
        # The package may be installed inside an unrelated repository.
        if not git("ls-files", file.name):
            return "none"
        dirty = "+dirty" if git("status", "--porcelain", "-uno", ":/*.py") else ""
        return git("rev-parse", "HEAD") + dirty
    except (OSError, subprocess.CalledProcessError):
        return "none"


def versions() -> dict[str, str]:
    """Returns the versions of Python and of libraries that results depend on."""
    libraries = {name: importlib.metadata.version(name) for name in LIBRARIES}
    return {"python": platform.python_version(), **libraries}


CPUINFO = Path("/proc/cpuinfo")  # on Linux


def describe_processor() -> str:
    """Returns the CPU's name and, on Linux, what multiplies bfloat16 fast."""
    words = CPUINFO.read_text("utf-8").split() if CPUINFO.exists() else []
    text = " ".join(words).partition("model name : ")[2].partition(" stepping")[0]
    if not text:
        return platform.machine()
    fast = sorted({"amx_bf16", "avx512_bf16"} & {*words}) or ["no fast bfloat16"]
    return ", ".join([text, *fast])
