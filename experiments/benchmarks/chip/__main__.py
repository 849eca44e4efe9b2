"""Checks and times this project on one GPU, TPU or CPU, and prints a table.

    python -m experiments.benchmarks.chip [--minutes=10] [--only=WORD] [--trace]
        [--original=transformer-xl/pytorch]

Each part, such as the training of `enwik8` with one kernel, is a process of its own, so
an error, a crash or a hang is a row of the table. On a GPU, as many parts as its memory
holds are compiled at once, which takes longest, and then timed one after the other.
Text is random words by Zipf's law, so no corpus is needed.

--trace profiles one call of each part and prints its kernels by time. --original also
times the code of github.com/kimiyoung/transformer-xl, from its folder `pytorch`.

--out (runs/chip) gets rows.jsonl, table.md and the compiled programs, which the next
run reads.
"""

import argparse
import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from experiments.benchmarks import record
from experiments.benchmarks.record import Row
from experiments.figures import program
from txl_jax.errors import refuse
from txl_jax.report.log import say
from txl_jax.report.output import to_json
from txl_jax.report.provenance import git_revision

Part = dict[str, Any]
ROOT = Path(__file__).parents[3]
COMMAND = [sys.executable, "-m", "experiments.benchmarks.chip"]
# Training by the sizes of docs/howto/gpus.md: B streams and L = M tokens. Without
# dropatt, every kernel applies.
TRAINING: tuple[Part, ...] = (
    {"experiment": "enwik8", "B": 22, "L": 512},
    {"experiment": "wt103_nvidia", "B": 104, "L": 192},
    {"experiment": "enwik8_24l", "B": 64, "L": 768, "without": ["dropatt"]},
    {"experiment": "ptb", "B": 20, "L": 70},
    {"experiment": "wt103_nvidia_large", "B": 48, "L": 256, "without": ["dropatt"]},
)
HAVE_DROPATT = ("ptb",)
ON_CPU = ("ptb",)  # an update of the others takes minutes
EVALUATION: Part = {"experiment": "enwik8", "B": 10, "M": 2100}
GENERATION: Part = {"experiment": "enwik8", "B": 1, "M": 2100}
COMPILING = 0.7  # share of the minutes for compiling; what has not compiled is ended
MOST_SECONDS = 120  # for timing one part
# A part that waits for its turn keeps about 2 GiB of a GPU's memory. JAX may use three
# quarters of the memory, of which 8 GiB are for the part that is timed.
WAITING, TIMED = 2 << 30, 8 << 30
LONGEST = 200  # characters in an error


def kernels(machine: Row, dropatt: bool = False) -> list[str]:
    """Returns the kernels for a machine's device, the most specialized first."""
    kind, special = machine["device_kind"], []
    if machine["platform"] == "tpu":
        special = ["tpu"]
    elif kind.startswith("NVIDIA") and not dropatt:
        special = ["cudnn"]
    return [*special, "xla", "chunked"]


def plan(machine: Row, args: argparse.Namespace) -> list[Part]:
    """Returns the parts, the most important ones first."""
    cpu = machine["platform"] == "cpu"
    common = {"dtype": "float32" if cpu else "bfloat16", "tiny": args.tiny}
    trainings: list[list[Part]] = [
        [
            {"task": "train", **each, "kernel": kernel, "unroll": unroll}
            for kernel in kernels(machine, each["experiment"] in HAVE_DROPATT)
            for unroll in ("all", 1)
        ]
        for each in TRAINING
        if not cpu or each["experiment"] in ON_CPU
    ]
    parts = [{"task": "check", "kernel": kernel} for kernel in kernels(machine)]
    parts += [
        {"task": "choose", **each, "kernel": "auto"}
        for each in TRAINING
        if not cpu or each["experiment"] in ON_CPU
    ]
    parts += trainings[0]
    if not cpu:
        every = kernels(machine)
        parts += [{"task": "evaluate", **EVALUATION, "kernel": name} for name in every]
    parts.append({"task": "generate", **GENERATION, "kernel": "auto"})
    if args.original:
        sizes = {"train": TRAINING[0], "evaluate": EVALUATION}
        parts += [
            {"task": task, **sizes[task], "kernel": kernel, "original": args.original}
            for kernel in ("eager", "torch.compile")
            for task in sizes
        ]
    parts += itertools.chain(*trainings[1:])
    parts = [part | common | {"trace": args.trace} for part in parts]
    return [part for part in parts if args.only in title(part)]


def title(part: Part) -> str:
    """Returns the name of a part."""
    without = [f"without {name}" for name in part.get("without", ())]
    names = [part["task"], part.get("experiment", ""), *without, part.get("kernel", "")]
    names += [f"unroll={part['unroll']}"] if "unroll" in part else []
    names += ["of the original code"] if "original" in part else []
    return " ".join(filter(None, names))


class Child:
    """A part in its own process, which compiles, reports it, and waits for its turn."""

    def __init__(self, part: Part, folder: Path, environment: dict[str, str]):
        self.part, self.error = part, ""
        stem = str(len([*folder.iterdir()]))
        self.out, self.err = folder / f"{stem}.out", folder / f"{stem}.err"
        self.started = time.monotonic()
        with self.out.open("w") as out, self.err.open("w") as err:
            self.process = subprocess.Popen(
                [*COMMAND, f"--part={json.dumps(part)}"],
                cwd=ROOT,
                env=os.environ | environment,
                stdin=subprocess.PIPE,
                stdout=out,
                stderr=err,
                start_new_session=True,
            )

    def output(self, key: str) -> Any:
        """Returns what the process printed under a key, or None."""
        last = None
        for line in self.out.read_text("utf-8", "replace").splitlines():
            with contextlib.suppress(ValueError):  # half a line, or a library's own
                printed = json.loads(line)
                if isinstance(printed, dict) and key in printed:
                    last = printed[key]
        return last

    def is_compiling(self) -> bool:
        """Returns whether the process neither waits for its turn nor has ended."""
        return self.process.poll() is None and self.output("compile_seconds") is None

    def measure(self, limit: float) -> Row:
        """Gives the process its turn; returns the part with its figures or error."""
        assert self.process.stdin
        self.process.stdin.close()
        try:
            self.process.wait(limit)
        except subprocess.TimeoutExpired:
            self.end(f"no end within {limit:.0f} s")
        result = self.output("result")
        error = self.error or self.output("error")
        if result is None and not error:
            *_, last = ["", *self.err.read_text("utf-8", "replace").splitlines()]
            error = f"ended with status {self.process.returncode}: {last}"
        seconds = self.output("compile_seconds")
        row = {**self.part, **(result or {}), "compile_seconds": seconds}
        return row | {"error": (error or "")[:LONGEST]}

    def end(self, error: str = "") -> None:
        """Ends the process and its own children."""
        assert self.process.stdin
        self.process.stdin.close()
        if self.process.poll() is None:
            self.error = error
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


def run(
    parts: Sequence[Part], args: argparse.Namespace, seconds: float, jobs: int
) -> Iterator[Row]:
    """Compiles the parts, `jobs` at a time, then times each; yields their rows."""
    began = time.monotonic()
    environment = {"JAX_COMPILATION_CACHE_DIR": str(args.out.absolute() / "programs")}
    environment["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        children: list[Child] = []
        while time.monotonic() - began < COMPILING * seconds:
            busy = sum(child.is_compiling() for child in children)
            if busy == 0 and len(children) == len(parts):
                break
            if busy < jobs and len(children) < len(parts):
                child = Child(parts[len(children)], Path(folder), environment)
                stack.callback(child.end)
                children.append(child)
            time.sleep(0.1)
        for child in children:
            if child.is_compiling():
                child.end("not compiled in time")
        for child in children:
            left = seconds - (time.monotonic() - began)
            if child.process.poll() is None and left < 5:
                child.end("no time left")
            row = child.measure(min(MOST_SECONDS, max(left, 5)))
            say(f"{title(child.part)}: {row['error'] or 'measured'}")
            yield row
        for part in parts[len(children) :]:
            yield part | {"error": "no time left"}


HEAD = (
    *("task", "streams x L + M", "kernel", "layers in a step", "ms", "tokens/s"),
    *("TFLOP/s", "of the peak", "GiB", "compiled, s", ""),
)


def cells(row: Row) -> list[str]:
    """Returns the cells of a row; a check has only its largest errors."""

    def number(name: str, form: str, factor: float = 1) -> str:
        return format(factor * row[name], form) if row.get(name) else ""

    size = ""
    if "B" in row:
        L = row.get("L", 1)
        size = f"{row['B']} x {L} + {row.get('M', L)}"
    errors = ", ".join(f"{k} {x:.0e}" for k, x in row.get("errors", {}).items())
    name = f"{row['task']} {row.get('experiment', '')}".strip()
    name += "".join(f", no {each}" for each in row.get("without", ()))
    return [
        f"{name}, original code" if "original" in row else name,
        *(size, row.get("kernel", ""), str(row.get("unroll", ""))),
        *(number("seconds", ",.2f", 1e3), number("tokens_per_second", ",.0f")),
        *(number("flops", ".1f", 1e-12), number("mfu", ".1%")),
        *(number("peak_bytes", ".1f", 2**-30), number("compile_seconds", ".0f")),
        row.get("error") or row.get("choice") or errors,
    ]


def page(rows: Sequence[Row], machine: Row) -> str:
    """Returns the table of all parts, and of the kernels that --trace found."""
    versions = ", ".join(f"{k} {x}" for k, x in machine["versions"].items())
    lines = [f"# {machine['device_kind']}", "", f"{machine['date']}, {versions}", ""]
    peak, product = (machine[f"{each}_flops"] / 1e12 for each in ("peak", "product"))
    lines += [f"The peak is {peak:.1f} TFLOP/s; a product reaches {product:.1f}.", ""]
    lines += [*record.table(HEAD, map(cells, rows)), ""]
    for row in rows:
        if found := row.get("kernels"):
            lines += [f"## {title(row)}", "", "ms per update or call, and runs:", ""]
            lines += [f"    {ms:9.4f} {runs:7.1f}  {name}" for name, ms, runs in found]
            lines += [""]
    return "\n".join(lines)


def check(args: argparse.Namespace) -> None:
    """Checks and times the parts, and prints their table; or runs one part."""
    if args.part:
        from experiments.benchmarks.chip import measure

        return measure.run(args.part)
    args.out.mkdir(parents=True, exist_ok=True)
    is_wrong = args.original and not Path(args.original, "mem_transformer.py").is_file()
    refuse(is_wrong, f"--original={args.original} has no mem_transformer.py")
    began = time.monotonic()
    (machine,) = run([{"task": "machine", "tiny": args.tiny}], args, 300, 1)
    refuse(machine["error"], f"no device can be used: {machine['error']}")
    origin = {name: machine[name] for name in ("date", "device_kind", "versions")}
    origin["git_revision"] = git_revision()
    parts, rows = plan(machine, args), []
    # Only a GPU may be used by several processes.
    is_gpu = machine["platform"] == "gpu"
    size = max((machine["memory_bytes"] - TIMED) // WAITING, 1) if is_gpu else 1
    for first in range(0, len(parts), size):
        left = 60 * args.minutes - (time.monotonic() - began)
        jobs = args.jobs or os.cpu_count() or 1
        for row in run(parts[first : first + size], args, left, jobs):
            rows.append(row)
            record.append(args.out / "rows.jsonl", row | origin)
    text = page(rows, machine)
    (args.out / "table.md").write_text(text, "utf-8")
    print(text)
    failed = [title(row) for row in rows if row["error"]]
    print(to_json({"benchmark": "chip", **origin, "failed": failed}))


def main(argv: list[str] | None = None) -> int:
    parser = record.plain_parser(__doc__)
    parser.add_argument("--minutes", type=float, default=10, help="of the whole run")
    parser.add_argument("--out", type=program.path, default=Path("runs/chip"))
    parser.add_argument("--only", default="", help="parts whose name has this word")
    parser.add_argument("--original", default="", help="the original code's pytorch/")
    parser.add_argument("--trace", action="store_true", help="profile a call of each")
    parser.add_argument("--jobs", type=int, default=0, help="compilations at a time")
    parser.add_argument("--tiny", action="store_true", help="to try the program")
    parser.add_argument("--part", type=json.loads, help=argparse.SUPPRESS)
    return program.run(parser, check, argv, prints=True)


if __name__ == "__main__":
    sys.exit(main())
