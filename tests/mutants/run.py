"""Breaks the package in many small ways, and checks that the quick suite notices each.

    python -m tests.mutants.run [--only=TEXT] [--processes=2]

Each mutant replaces one piece of code in a copy of the checkout. The tests of its own
folder run first, then the promises, then all others, until one fails. The exit status
is 1 if a mutant survives, and 2 if a mutant no longer applies to the code.
"""

import argparse
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.mutants.mutants import MUTANTS, Mutant

ROOT = Path(__file__).parents[2]
SKIPPED = shutil.ignore_patterns(".git", ".venv", "__pycache__", "_build", "build")
SECONDS = 7200  # limit of a test run; a longer one counts as failed


def run_tests(folder: Path, processes: int, *paths: str) -> str:
    """Runs tests in a copy; returns the first failure, or "" if all tests pass."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", f"-n{processes}", *paths]
    try:
        result = subprocess.run(
            command, cwd=folder, capture_output=True, text=True, timeout=SECONDS
        )
    except subprocess.TimeoutExpired:
        return f"no end after {SECONDS} s"
    lines = result.stdout.splitlines()
    starts = ("FAILED tests/", "ERROR tests/")  # not a line that a test logged
    failures = [line for line in lines if line.startswith(starts)]
    if result.returncode and not failures:
        failures = lines[-1:] or ["pytest failed"]
    return failures[0][:160] if failures else ""


def find(mutant: Mutant, folder: Path, processes: int) -> str:
    """Returns the first failure that the mutant causes, or "" if it survives."""
    path = folder / mutant.path
    text = path.read_text("utf-8")
    path.write_text(text.replace(mutant.old, mutant.new), "utf-8")
    try:
        for paths in (mutant.tests, ["tests/promises"], ["tests"]):
            if failure := run_tests(folder, processes, *paths):
                return failure
        return ""
    finally:
        path.write_text(text, "utf-8")


def check_applicable(mutants: list[Mutant]) -> None:
    """Exits with 2 unless each mutant's code is found exactly once."""
    for mutant in mutants:
        count = (ROOT / mutant.path).read_text("utf-8").count(mutant.old)
        if count != 1:
            print(f"{mutant.path}: {count} places have {mutant.old!r}", file=sys.stderr)
            sys.exit(2)


def main() -> int:
    """Tries the mutants that the flags select."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="text in a mutant's name or path")
    parser.add_argument("--processes", type=int, default=2)
    args = parser.parse_args()
    mutants = [m for m in MUTANTS if args.only in f"{m.name} {m.path}"]
    check_applicable(mutants)
    survivors = 0
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "checkout"
        shutil.copytree(ROOT, folder, ignore=SKIPPED)
        for mutant in mutants:
            started = time.perf_counter()
            failure = find(mutant, folder, args.processes)
            survivors += not failure
            seconds = time.perf_counter() - started
            print(f"{mutant.name} ({seconds:.0f} s): {failure or 'SURVIVED'}")
            sys.stdout.flush()
    print(f"{len(mutants) - survivors} of {len(mutants)} mutants found")
    return int(survivors > 0)


if __name__ == "__main__":
    sys.exit(main())
