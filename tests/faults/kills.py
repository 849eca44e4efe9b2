"""Kills a training run at random moments, over and over.

    python -m tests.faults.kills --kills=200 [--processes=2]

Each round trains in a new folder, beginning with the preparation of the data. It
repeats the same command, which SIGKILL ends a random time after one of MOMENTS; these
cover a run from its first import to its last file and take turns. With two processes,
one is killed. A round ends when the command has succeeded. Then the checksums of all
arrays (parameters, average, optimizer, memory, keys), the position, the `exact` group
of every metrics line, the sample and the scores must equal an undisturbed run's.

The run uses dropout, accumulation over segments and over chunks of the streams, calls
of two updates and of one, an average of the parameters, and more than one epoch.
"""

import argparse
import contextlib
import json
import math
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tests.support.processes import Processes, exact, write_experiment
from txl_jax.checkpoint import manifest
from txl_jax.checkpoint.listing import read_manifests

QUIET_SECONDS = 13.0  # duration of an undisturbed run, once it is compiled
FIELDS: dict[str, Any] = {
    "train.num_steps": 119,
    "train.segments_per_call": 4,
    "train.segments_per_update": 2,
    "train.batch_chunk": 2,
    "train.eval_every": 48,
    "train.order": "roll",
    "train.varlen": True,
    "train.reset_memory_at": ",",
    "optim.optimizer": "adam",
    "optim.schedule": "cosine",
    "optim.lr": 1e-3,
    "optim.warmup_steps": 10,
    "optim.asgd_from": 20,
    "checkpoint.every_steps": 25,
}
# All calls make two updates, so that only one training step is compiled.
UNIFORM = FIELDS | {"train.num_steps": 120, "checkpoint.every_steps": 24}


# For each moment: the function that begins it, the number of first calls from which
# one is drawn, and the moment's seconds on a quiet machine.
MOMENTS = {
    "import": ("", "", 1, 3.0),
    "compilation": ("txl_jax.train", "Run.train", 1, 4.0),
    "training": ("txl_jax.train", "fetch", 30, 0.3),
    "save": ("txl_jax.checkpoint.save_restore", "Checkpoints.save", 3, 0.2),
    "validation": ("txl_jax.train", "Run.validate", 2, 0.5),
    "evaluation": ("txl_jax.cli.evaluate_split", "evaluate_split", 1, 2.0),
    "sample": ("txl_jax.cli.draw_samples", "draw_samples", 1, 2.0),
    "end": ("txl_jax.report.plots", "plot_loss", 1, 1.0),
}
# Runs the program, and creates a file when a function is called for the nth time.
VICTIM = """
import functools, importlib, os, sys
module, name, count = os.environ["TXL_JAX_MOMENT"].split(",")
here = os.environ["TXL_JAX_MOMENT_FILE"]
if not module:
    open(here, "w").close()
else:
    *path, name = name.split(".")
    owner = functools.reduce(getattr, path, importlib.import_module(module))
    call, calls = getattr(owner, name), 0

    def report(*args, **named):
        global calls
        calls += 1
        if calls == int(count):
            open(here, "w").close()
        return call(*args, **named)

    setattr(owner, name, report)
from txl_jax.main import main
sys.exit(main())
"""
# Moments of a round's kills: from each tuple the one that was tried least.
EARLY = "import", "compilation", "training", "save", "validation"
LATE = "import", "compilation", "evaluation", "sample", "end"
ROUND = EARLY, EARLY[2:], EARLY[2:], LATE, LATE[2:], LATE[2:]
TIMES = ("seconds", "per_second", "workdir", "sample", "picture")


class Run(NamedTuple):
    """A folder with an experiment and its run, on one device for each process."""

    folder: Path
    processes: int = 1
    fields: dict[str, Any] = FIELDS

    @property
    def workdir(self) -> Path:
        """The run's folder."""
        return self.folder / "run"

    def start(self, *flags: str, moments: Sequence[str] = ()) -> Processes:
        """Starts the command."""
        config = self.folder / "tiny.py"
        if not config.exists():
            self.folder.mkdir()
            write_experiment(self.folder)
        fields = (f"--config.{name}={value}" for name, value in self.fields.items())
        places = f"--config={config}", f"--workdir={self.workdir}", *fields
        environments = [{"JAX_NUM_CPU_DEVICES": "1"} for _ in range(self.processes)]
        for index, moment in enumerate(moments):
            environments[index]["TXL_JAX_MOMENT"] = moment
            environments[index]["TXL_JAX_MOMENT_FILE"] = str(self.moment(index))
        return Processes(
            self.folder,
            *places,
            *flags,
            count=self.processes,
            python=("-c", VICTIM) if moments else ("-m", "txl_jax.main"),
            environments=environments,
        )

    def moment(self, index: int) -> Path:
        """Returns the file by which a process reports that its moment has come."""
        return self.folder / f"moment.{index}"

    def finish(self, *flags: str) -> str:
        """Runs the command to its end and returns its stderr."""
        run = self.start(*flags)
        statuses, stderr = run.wait(), run.stderr[0].read_text()
        assert not any(statuses), (
            statuses,
            [x.read_text()[-3000:] for x in run.stderr],
        )
        return stderr

    def kill_once(self, name: str, slower: float, rng: random.Random) -> bool:
        """Runs the command and kills a process in a moment; returns False if it ended.

        slower scales the moment's duration; 0 kills at its beginning.
        """
        module, function, most, seconds = MOMENTS[name]
        moment = f"{module},{function},{rng.randint(1, most)}"
        delay = rng.uniform(0, slower * seconds)
        index = rng.randrange(self.processes)
        for each in range(self.processes):
            self.moment(each).unlink(missing_ok=True)
        run = self.start(moments=[moment] * self.processes)
        while run.all[index].poll() is None and not self.moment(index).exists():
            time.sleep(0.001)
        with contextlib.suppress(subprocess.TimeoutExpired):
            run.all[index].wait(delay)
        run.all[index].kill()
        if name == "import":  # the other processes would wait for it
            run.kill()
        statuses = run.wait()
        # The others notice the death at once, succeed, or are aborted by jax.
        ends = {0, 75, -signal.SIGABRT} | (
            {-signal.SIGKILL} if name == "import" else set()
        )
        text = [path.read_text()[-3000:] for path in run.stderr]
        assert statuses[index] in (0, -signal.SIGKILL), text
        assert {*statuses[:index], *statuses[index + 1 :]} <= ends, (statuses, text)
        return statuses[index] != 0

    def result(self) -> dict[str, Any]:
        """Returns all that must be reproduced, such as checksums of all arrays."""
        checkpoints, last = self.workdir / "checkpoints", self.fields["train.num_steps"]
        saved = manifest.read_manifest(checkpoints / str(last), last)
        assert len(saved.arrays) > 50 and saved.position and saved.position.epoch > 0
        lines = exact(self.workdir)
        assert [k for k, x in lines if "loss" in x] == list(range(1, last + 1))
        found, damaged = read_manifests(checkpoints)
        assert not damaged
        result = json.loads((self.workdir / "result.json").read_text())
        assert (self.workdir / "loss.png").stat().st_size > 1000
        return {
            "manifest": saved.to_json(),
            "exact": lines,
            # A kill may leave an additional checkpoint.
            "checkpoints": [*sorted(found)[-2:], manifest.best(found.values())],
            "scores": {k: v for k, v in result.items() if not k.endswith(TIMES)},
            "sample": (self.workdir / "sample.txt").read_text(),
            "files": sorted(path.name for path in self.workdir.iterdir()),
        }


def torture(
    folder: Path, kills: int, seed: int, processes: int = 1, minutes: float = math.inf
) -> dict[str, Any]:
    """Kills the run `kills` times; returns the numbers of kills, rounds and moments.

    minutes: the time after which no further round begins. Raises AssertionError if a
    round's result differs from an undisturbed run's.
    """
    rng = random.Random(seed)
    results = []
    for name in ("compiles", "straight"):
        straight, started = Run(folder / name, processes), time.monotonic()
        straight.finish()
        seconds = time.monotonic() - started
        results.append(straight.result())
    expected = results[0]
    assert results[1] == expected
    tried: Counter[str] = Counter()
    killed: Counter[str] = Counter()
    rounds, end = 0, time.monotonic() + 60 * minutes
    while killed.total() < kills and time.monotonic() < end:
        run, here = Run(folder / f"round{rounds}", processes), 0
        for moments in ROUND[: kills - killed.total()]:
            moment = min(moments, key=lambda name: (tried[name], rng.random()))
            tried[moment] += 1
            # The first kill of each moment cannot come too late, on any machine.
            slower = seconds / QUIET_SECONDS if killed[moment] else 0.0
            if not run.kill_once(moment, slower, rng):
                break
            killed[moment] += 1
            here += 1
        else:
            run.finish()
        result = run.result()
        for name in expected:
            assert result[name] == expected[name], (rounds, name)
        rounds += 1
        shutil.rmtree(run.folder)
        done = f"{killed.total()} kills, {dict(killed)}: round of {here}"
        print(f"{done} is bit-identical", file=sys.stderr)
    assert killed.total() < 5 * len(MOMENTS) or set(killed) == set(MOMENTS), killed
    return {
        "processes": processes,
        "kills": killed.total(),
        "rounds": rounds,
        "seconds_undisturbed": seconds,
        "moments": {name: killed[name] for name in MOMENTS},
    }


def main() -> None:
    """Reads the flags, and prints one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=math.inf)
    parser.add_argument("--seed", type=int, default=0)
    flags = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        os.environ["JAX_COMPILATION_CACHE_DIR"] = f"{folder}/cache"
        os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
        os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "true"  # compiles faster
        given = flags.kills, flags.seed, flags.processes, flags.minutes
        print(json.dumps(torture(Path(folder), *given)))


if __name__ == "__main__":
    main()
