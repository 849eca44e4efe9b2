"""A part in a process of its own, with a time limit.

Only one process may use a TPU, and on a GPU jax reserves most of the memory, so the
program that starts the parts does not use a device itself.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from experiments.benchmarks.chip import timing
from txl_jax.report.log import to_json
from txl_jax.runtime import allocator, programs

ROOT = Path(__file__).parents[3]
COMMAND = [sys.executable, "-m", "experiments.benchmarks.chip"]
LONGEST = 300  # characters of an error


def measure(part: dict[str, Any]) -> None:
    """Prints a JSON line for each stage of a part, and the error that ends it."""
    allocator.keep_freed()  # as `txl_jax.main` does
    timing.patience = 0.1 if part.get("tiny") else 1.0
    try:
        for result in find(part["part"])(part):
            print(to_json(result), flush=True)
    except Exception as error:
        line = f"{type(error).__name__}: {error}".partition("\n")[0]
        print(json.dumps({"error": line[:LONGEST]}), flush=True)


def find(name: str) -> Any:
    """Returns the generator that measures a kind of part."""
    if name == "torch":
        from experiments.benchmarks.chip import port

        return port.measure
    programs.keep("")
    from experiments.benchmarks.chip import attention, machine, steps

    kinds = {"machine": machine.measure, "check": attention.measure}
    return (kinds | steps.MEASURES)[name]


def run(part: dict[str, Any], limit: float) -> dict[str, Any]:
    """Returns the part with its last result, its error or "", and its seconds."""
    began = time.monotonic()
    command = [*COMMAND, f"--part={json.dumps(part)}"]
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        process = subprocess.Popen(
            command, cwd=ROOT, stdout=out, stderr=err, start_new_session=True
        )
        try:
            status: int | None = process.wait(limit)
        except subprocess.TimeoutExpired:
            status = None
        finally:  # also after Ctrl-C, and with the process's own children
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        result, error = read(out)
        if status is None:
            error = f"no end within {limit:.0f} s"
        elif status:
            err.seek(0)
            lines = err.read().decode(errors="replace").split("\n")
            last = next((line for line in reversed(lines) if line.strip()), "")
            error = f"ended with status {status}: {last.strip()[:LONGEST]}"
    seconds = round(time.monotonic() - began, 1)
    timed = {"seconds_taken": seconds, "timed_out": status is None}
    return {**part, "result": result, "error": error, **timed}


def read(out: Any) -> tuple[dict[str, Any], str]:
    """Returns the last result that a process printed, and its error or ""."""
    out.seek(0)
    result: dict[str, Any] = {}
    for line in out.read().decode(errors="replace").splitlines():
        try:
            found = json.loads(line)
        except ValueError:  # a library's own words, or half a line
            continue
        if isinstance(found, dict) and "error" in found:
            return result, found["error"]
        result = found if isinstance(found, dict) else result
    return result, ""
