"""The finished parts, one JSON line each."""

import datetime
import hashlib
from pathlib import Path

from experiments.benchmarks import record
from experiments.benchmarks.chip.process import ROOT
from experiments.benchmarks.record import Row
from txl_jax.report.provenance import git_revision

# What a row must share with this run to count.
IDENTITY = ("device_kind", "count", "versions")


def code_digest() -> str:
    """Returns a hash of the sources, by which a dirty checkout is known too."""
    paths = sorted([*ROOT.glob("txl_jax/**/*.py"), *ROOT.glob("experiments/**/*.py")])
    parts = (f"{path.relative_to(ROOT)} {path.read_text('utf-8')}" for path in paths)
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:12]


class File:
    """The rows of this code, on these devices; older ones stay in the file.

    retry: rows with an error do not count.
    """

    def __init__(self, path: Path, machine: Row, retry: bool):
        self.path = path
        origin = {name: machine[name] for name in IDENTITY}
        self.origin = {"git_revision": git_revision(), "code": code_digest(), **origin}
        self.rows = [
            row
            for row in record.read(path)
            if self.origin.items() <= row.items() and not (retry and row["error"])
        ]

    def find(self, part: Row) -> Row | None:
        """Returns the newest row of a part."""
        return next(
            (row for row in self.rows[::-1] if part.items() <= row.items()), None
        )

    def add(self, row: Row) -> None:
        """Appends a finished part."""
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        row = row | self.origin | {"date": now}
        self.rows.append(row)
        record.append(self.path, row)


def is_fault(row: Row) -> bool:
    """Returns whether a check found a kernel wrong."""
    return row["part"] == "check" and bool(row["result"].get("fault"))
