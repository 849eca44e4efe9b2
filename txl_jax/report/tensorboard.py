"""A run's numbers and samples as TensorBoard reads them, without TensorFlow.

Only tensorboardX's record format and messages are used, not its writer: that one has a
thread, which a full disk would kill, and training would wait for it for ever.

Dims: none.
"""

import contextlib
import os
import socket
import time
from pathlib import Path
from typing import Any, Self

from tensorboardX import summary
from tensorboardX.proto.event_pb2 import Event, SessionLog
from tensorboardX.proto.summary_pb2 import Summary
from tensorboardX.record_writer import RecordWriter

from txl_jax import distributed
from txl_jax.report.writer import say

FOLDER = "tensorboard"  # in the workdir
SAMPLE = ".sample"  # how the name of the sample's file ends
FLUSH_SECONDS = 10.0


class Events:
    """The events of one start of a run, in a file of their own.

    After `last_step`, it tells TensorBoard to forget what earlier files say of later
    steps, so no step is shown twice after a resume. A disk that takes no more ends the
    file and not the run. Of several processes the first writes.
    """

    def __init__(
        self, workdir: Path, last_step: int, on: bool = True, ending: str = ""
    ):
        """Makes the file, in the workdir's folder for TensorBoard."""
        self._file: RecordWriter | None = None
        self._flushed = time.monotonic()
        if not on or not distributed.is_first():
            return
        host, pid = socket.gethostname(), os.getpid()
        name = f"events.out.tfevents.{time.time_ns() // 10**6}.{host}.{pid}{ending}"
        try:
            (workdir / FOLDER).mkdir(parents=True, exist_ok=True)
            self._file = RecordWriter(str(workdir / FOLDER / name))
        except OSError as error:
            self._end(error)
        self._write(file_version="brain.Event:2")
        if last_step:
            start = SessionLog(status=SessionLog.START)
            self._write(step=last_step + 1, session_log=start)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        file, self._file = self._file, None
        with contextlib.suppress(OSError):
            if file is not None:
                file.close()

    def line(self, line: dict[str, Any]) -> None:
        """Writes the numbers of a line of metrics.jsonl, as exact/loss and so on."""
        if self._file is None:
            return
        parts = [
            Summary.Value(tag=f"{group}/{name}", simple_value=float(value))
            for group in ("exact", "timing")
            for name, value in line.get(group, {}).items()
            if isinstance(value, (bool, int, float))
        ]
        self._write(step=line["step"], summary=Summary(value=parts))
        if time.monotonic() - self._flushed > FLUSH_SECONDS:
            self.flush()

    def text(self, step: int, name: str, text: str) -> None:
        """Writes a text, to be shown as it stands."""
        block = "\n".join(f"    {line}" for line in text.splitlines())  # Markdown
        self._write(step=step, summary=summary.text(name, block))

    def flush(self) -> None:
        """Puts what was written on the disk."""
        self._flushed = time.monotonic()
        try:
            if self._file is not None:
                self._file.flush()
        except OSError as error:
            self._end(error)

    def _write(self, **content: Any) -> None:
        try:
            if self._file is not None:
                event = Event(wall_time=time.time(), **content)
                self._file.write(event.SerializeToString())
        except OSError as error:
            self._end(error)

    def _end(self, error: OSError) -> None:
        self.__exit__()
        say(f"nothing more for TensorBoard from this start ({error.strerror})")


def write_sample(workdir: Path, step: int, text: str) -> None:
    """Writes the sample that a run ended with, in place of that of an earlier end."""
    for path in (workdir / FOLDER).glob(f"*{SAMPLE}"):
        path.unlink()
    with Events(workdir, 0, ending=SAMPLE) as events:
        events.text(step, "sample", text)
