"""Runs of several processes on this machine, with two devices each."""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from txl_jax.report.metrics_log import read_metrics

ROOT = Path(__file__).parents[2]
LIMIT_SECONDS = 1800.0  # for any wait; a quiet machine needs a hundredth

EXPERIMENT = """
from txl_jax import config

def get_config():
    c = config.default()
    c.data.update(corpus="text", path={text!r}, data_dir={data!r})
    c.model.update(n_layer=2, d_model=16, n_head=2, d_head=8, d_inner=32, mem_len=8)
    c.model.update(dropout=0.2, dropatt=0.2)
    c.train.update(num_steps=1000, batch_size=8, tgt_len=8, log_every=1)
    c.train.update(segments_per_call=2, eval_every=1000)
    # Independent of num_steps, and insensitive to rounding.
    c.optim.update(schedule="constant", optimizer="sgd", lr=0.1)
    c.eval.update(streams=8, tgt_len=8, mem_len=16)
    c.generate.update(num_tokens=4, prompt="a")
    c.checkpoint.update(every_steps=200, keep=2)
    return c
"""


def write_experiment(folder: Path) -> Path:
    """Returns the path of an experiment; its text and data are in the folder too."""
    text, experiment = folder / "text.txt", folder / "tiny.py"
    text.write_text("".join(f"{n} is followed by {n + 1}, " for n in range(700)))
    places = {"text": str(text), "data": str(folder / "data")}
    experiment.write_text(EXPERIMENT.format(**places))
    return experiment


def free_port() -> int:
    """Returns a port that the system gives to no other program during these tests.

    A bound socket that does not listen keeps the system from giving the port to others.
    Servers set SO_REUSEADDR, so they can use it.
    """
    server = socket.socket()
    server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    server.bind(("127.0.0.1", 0))
    port = server.getsockname()[1]
    server.detach()  # open until this process exits
    return port


class Processes:
    """The processes of one run; their stderr is in files."""

    def __init__(
        self,
        folder: Path,
        *arguments: str,
        count: int = 2,
        python: Sequence[str] = ("-m", "txl_jax.main"),
        environments: Sequence[dict[str, str]] = ({}, {}),
    ):
        path = [str(ROOT), os.environ.get("PYTHONPATH", "")]
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join(path),
            "JAX_PLATFORMS": "cpu",
            "JAX_NUM_CPU_DEVICES": "2",
            "NPROC": "2",
        }
        if count > 1:
            environment["JAX_COORDINATOR_ADDRESS"] = f"127.0.0.1:{free_port()}"
            environment["JAX_NUM_PROCESSES"] = str(count)
        self.stderr = [folder / f"stderr.{index}" for index in range(count)]
        self.stdout = [""] * count  # read once all have ended
        self.all: list[subprocess.Popen[str]] = []
        for index, errors in enumerate(self.stderr):
            own = environments[index] | {"JAX_PROCESS_ID": str(index)}
            command = [sys.executable, *python, *arguments]
            options: Any = {"env": environment | own, "stdout": subprocess.PIPE}
            with errors.open("w") as stderr:
                process = subprocess.Popen(command, stderr=stderr, text=True, **options)
            self.all.append(process)

    def until(self, happened: Callable[[], bool]) -> None:
        """Waits for an event; raises AssertionError if a process ends first."""
        limit = time.monotonic() + LIMIT_SECONDS
        ended: list[int] = []
        while not happened():
            if ended or time.monotonic() > limit:
                self.kill()
                lines = "\n".join(path.read_text()[-3000:] for path in self.stderr)
                raise AssertionError(f"{ended} ended too early:\n{lines}")
            time.sleep(0.01)
            ended = [p.returncode for p in self.all if p.poll() is not None]

    def wait(self) -> list[int]:
        """Waits until all processes end, and returns their statuses."""
        try:
            return [process.wait(LIMIT_SECONDS) for process in self.all]
        finally:
            self.kill()

    def kill(self) -> None:
        """Kills the processes that still run, and reads all outputs."""
        for index, process in enumerate(self.all):
            if process.poll() is None:
                process.kill()
            if process.stdout and not process.stdout.closed:
                self.stdout[index] = process.communicate()[0]

    def said(self, index: int) -> list[str]:
        """Returns the lines on stderr that the program itself wrote."""
        lines = self.stderr[index].read_text().splitlines()
        return [line for line in lines if line.startswith("txl_jax")]


def has_step(workdir: Path, step: int) -> Callable[[], bool]:
    """Returns a function that tells whether the metrics of `step` are written."""
    path = workdir / "metrics.jsonl"
    return lambda: path.exists() and path.read_bytes().count(b"\n") >= step


def exact(workdir: Path) -> list[tuple[int, Any]]:
    """Returns the step and the `exact` group of every metrics line."""
    lines = read_metrics(workdir / "metrics.jsonl")
    return [(line["step"], line["exact"]) for line in lines]
