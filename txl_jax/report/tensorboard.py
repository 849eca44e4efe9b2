"""Metrics and samples of a run as TensorBoard events, without TensorFlow.

Events are written by tensorboardX's `RecordWriter`. Its `SummaryWriter` writes in a
thread: a full disk ends the thread, and training would then wait for it forever. Its
`EventsWriter` leaves the file open when the last flush fails. tensorboardX imports
torch where torch is installed, which takes two seconds, so it is imported only where
events are written.
"""

import contextlib
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from textwrap import indent
from typing import Any, Self

from txl_jax.report.log import say
from txl_jax.runtime import distributed

FOLDER = "tensorboard"  # in the workdir
SAMPLE = ".sample"  # suffix of the sample's file
START = 1  # SessionLog.START


class Events:
    """The events of one start of a run, in a separate file.

    The first event makes TensorBoard discard the steps after last_step, so each step is
    shown once after a resume. A full disk ends the file, not the run. Only the first of
    several processes writes.
    """

    def __init__(self, workdir: Path, last_step: int, ending: str = ""):
        """Creates the file in the workdir's folder for TensorBoard."""
        self._writer: Any = None
        if not distributed.is_first():
            return
        from tensorboardX.record_writer import RecordWriter

        host, pid = socket.gethostname(), os.getpid()
        name = f"events.out.tfevents.{time.time_ns() // 10**6}.{host}.{pid}{ending}"
        with self._ending_on_failure():
            (workdir / FOLDER).mkdir(parents=True, exist_ok=True)
            self._writer = RecordWriter(str(workdir / FOLDER / name))
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

    def line(self, line: dict[str, Any]) -> None:
        """Writes the numbers of a line of metrics.jsonl, as exact/loss and so on."""
        values = [
            {"tag": f"{group}/{name}", "simple_value": float(value)}
            for group in ("exact", "timing")
            for name, value in line.get(group, {}).items()
            if isinstance(value, (bool, int, float))
        ]
        self._write(step=line["step"], summary={"value": values})

    def sample(self, step: int, text: str) -> None:
        """Writes a sample, which TensorBoard shows verbatim."""
        from tensorboardX.summary import text as summarize

        # Markdown shows indented lines verbatim.
        self._write(step=step, summary=summarize("sample", indent(text, "    ")))

    def _write(self, **content: Any) -> None:
        if self._writer is None:
            return
        from tensorboardX.proto.event_pb2 import Event

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


def write_sample(workdir: Path, local: Path, step: int, text: str) -> None:
    """Writes the sample of a finished run, and deletes an earlier one in the workdir.

    local: the folder to write to, whose files are uploaded to a workdir on gs://.
    """
    for path in (workdir / FOLDER).glob(f"*{SAMPLE}"):
        path.unlink()
    with Events(local, 0, ending=SAMPLE) as events:
        events.sample(step, text)
