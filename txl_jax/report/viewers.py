"""Metrics and samples of a run in TensorBoard, and on Weights & Biases.

TensorBoard's `RecordWriter` imports neither TensorFlow nor torch. Its writers with a
thread cannot be used: a full disk ends the thread, and training would then wait for it
forever.
"""

import contextlib
import hashlib
import json
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from textwrap import indent
from typing import Any, Self

from txl_jax.errors import UserError
from txl_jax.report.log import say
from txl_jax.report.metrics_log import SendLine
from txl_jax.runtime import distributed, storage
from txl_jax.runtime.storage import Json

FOLDER = "tensorboard"  # in the workdir
RESULT = ".sample"  # suffix of the file with a finished run's scores and sample
START = 1  # SessionLog.START


class Events:
    """The events of one start of a run, in a separate file.

    The first event makes TensorBoard discard the steps after last_step. A full disk
    ends the file, not the run. Only process 0 writes.
    """

    def __init__(self, workdir: Path, last_step: int, ending: str = ""):
        """Creates the file in the workdir's folder for TensorBoard."""
        self._writer: Any = None
        if not distributed.is_first():
            return
        from tensorboard.summary.writer.record_writer import RecordWriter

        host, pid = socket.gethostname(), os.getpid()
        name = f"events.out.tfevents.{time.time_ns() // 10**6}.{host}.{pid}{ending}"
        with self._ending_on_failure():
            (workdir / FOLDER).mkdir(parents=True, exist_ok=True)
            self._writer = RecordWriter((workdir / FOLDER / name).open("wb"))
        self._write(file_version="brain.Event:2")
        if last_step:
            self._write(step=last_step + 1, session_log={"status": START})

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        writer, self._writer = self._writer, None
        with contextlib.suppress(OSError):
            if writer is not None:
                writer.close()

    def scalars(self, step: int, values: dict[str, float]) -> None:
        """Writes numbers by tag."""
        each = [{"tag": tag, "simple_value": x} for tag, x in values.items()]
        self._write(step=step, summary={"value": each})

    def sample(self, step: int, text: str) -> None:
        """Writes a sample, which TensorBoard shows verbatim."""
        from tensorboard.plugins.text.summary_v2 import text_pb

        # Markdown shows indented lines verbatim.
        self._write(step=step, summary=text_pb("sample", indent(text, "    ")))

    def _write(self, **content: Any) -> None:
        if self._writer is None:
            return
        from tensorboard.compat.proto.event_pb2 import Event

        with self._ending_on_failure():
            event = Event(wall_time=time.time(), **content)
            self._writer.write(event.SerializeToString())
            self._writer.flush()

    @contextlib.contextmanager
    def _ending_on_failure(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self.__exit__()
            say(f"no more TensorBoard events until the next start ({error.strerror})")


def write_result(
    workdir: Path, local: Path, step: int, scores: dict[str, float], sample: str
) -> None:
    """Writes scores by tag and the sample of a run, replacing earlier ones."""
    for path in (workdir / FOLDER).glob(f"*{RESULT}"):
        path.unlink()
    with Events(local, 0, ending=RESULT) as events:
        events.scalars(step, scores)
        events.sample(step, sample)


def check_wandb(project: str) -> None:
    """Raises UserError if run.wandb names a project but the package is missing."""
    try:
        if project:
            import wandb  # noqa: F401
    except ImportError as error:
        raise UserError(
            f"run.wandb = {project!r} needs wandb: pip install 'txl_jax[wandb]'"
        ) from error


def open_wandb(project: str, workdir: Path, start: Json, config: Json) -> SendLine:
    """Returns a function that logs to the run of the first start; "" logs nothing."""
    if not project or not distributed.is_first():
        return lambda step, values: None
    import wandb

    text = json.dumps(start, sort_keys=True)
    try:
        run = wandb.init(
            project=project,
            id=hashlib.sha256(text.encode()).hexdigest()[:12],
            name=workdir.name,
            dir=None if storage.is_remote(workdir) else workdir,
            config=config,
            resume="allow",
            settings=wandb.Settings(console="off", quiet=True),
        )
    except Exception as error:  # without a key or the network
        raise UserError(
            f"run.wandb = {project!r} cannot be opened ({error}): WANDB_MODE=offline "
            "needs no account"
        ) from error
    run.define_metric("*", step_metric="update")
    return lambda step, values: run.log({"update": step, **values})
