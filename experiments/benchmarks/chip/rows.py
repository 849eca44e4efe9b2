"""The finished parts, one JSON line each, and the table of kernels made from them."""

import datetime
import hashlib
import json
import os
from pathlib import Path
from typing import Any

from experiments.benchmarks.chip.process import ROOT
from txl_jax.kernels import measured
from txl_jax.kernels.measured import Table
from txl_jax.report.provenance import git_revision

Row = dict[str, Any]
# What a row must share with this run to count.
IDENTITY = ("device_kind", "count", "versions")
GAIN = 1.03  # blocks that gain less are not kept: repetitions differ by as much


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
        self.rows: list[Row] = []
        lines = path.read_text("utf-8").splitlines() if path.exists() else []
        for line in lines:
            try:
                row = json.loads(line)
            except ValueError:  # half a line, after a kill
                continue
            if self.origin.items() <= row.items() and not (retry and row["error"]):
                self.rows.append(row)

    def find(self, part: Row) -> Row | None:
        """Returns the newest row of a part."""
        return next(
            (row for row in self.rows[::-1] if part.items() <= row.items()), None
        )

    def found(self) -> list[Row]:
        """Returns the newest row of each part."""
        return [row for row in self.rows if self.find(identity(row)) is row]

    def add(self, row: Row) -> None:
        """Appends a finished part."""
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        row = row | self.origin | {"date": now}
        self.rows.append(row)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")


NAMES = (
    *("part", "experiment", "kernel", "shape", "terms", "task", "mode", "dtype"),
    *("tiny", *IDENTITY),
)


def identity(row: Row) -> Row:
    """Returns the fields of a row that name its part."""
    return {name: row[name] for name in NAMES if name in row}


def is_fault(row: Row) -> bool:
    """Returns whether a check found a kernel wrong."""
    return row["part"] == "check" and bool(row["result"].get("fault"))


def make_table(found: list[Row], kernels: dict[str, int]) -> Table:
    """Returns the fastest blocks, and the kernels that were checked.

    kernels: how many checks each kernel has. One that is not finished, ran out of time
    or memory counts as not checked, other errors and wrong numbers as faults.
    """
    sizes, checked = {}, {}
    for kernel, count in kernels.items():
        checks = [row for row in found if row["part"] == "check"]
        checks = [row for row in checks if row["kernel"] == kernel]
        faults = [row["result"]["fault"] for row in checks if is_fault(row)]
        failed = [row for row in checks if row["error"]]
        faults += [
            f"{row['shape']}: {row['error']}"
            for row in failed
            if not (row["timed_out"] or "RESOURCE_EXHAUSTED" in row["error"])
        ]
        if faults or (len(checks) == count and not failed):
            checked[kernel] = faults[0] if faults else ""
    for row in found:
        best = row["result"].get("best") if row["part"] == "tiles" else None
        if best and gain(row) >= GAIN:
            sizes[row["result"]["key"]] = best["sizes"]
    return Table(sizes, checked)


def gain(row: Row) -> float:
    """Returns how many times as fast the best blocks are as the default; 0 unknown."""
    default, best = row["result"]["tried"][0], row["result"]["best"]
    return default["seconds"] / best["seconds"] if "seconds" in default else 0.0


def save_table(
    found: list[Row], out: Path, machine: Row, kernels: dict[str, int], tiny: bool
) -> None:
    """Writes the table of kernels to `out` and, unless tiny, to the user's cache."""
    origin = {name: found[0][name] for name in ("git_revision", "versions", "date")}
    kind, table = machine["device_kind"], make_table(found, kernels)
    text = json.dumps(measured.to_json(kind, table, **origin), indent=1) + "\n"
    for folder in (out, *([] if tiny else [measured.user_folder()])):
        folder.mkdir(parents=True, exist_ok=True)
        fresh = folder / f"{machine['table']}.{os.getpid()}"
        fresh.write_text(text, "utf-8")
        fresh.replace(folder / machine["table"])
