"""Kills a training run at random moments until it is done, over and over.

    python -m tests.faults.kills --kills=200

Each round trains in a new folder, from the preparation of the data on: the same
command again and again, ended by SIGKILL after a random time, or when a checkpoint
begins to be written after it. A round ends when the command does. Then the checksums
of all arrays (parameters, average, optimizer, memory, keys), the position and the
`exact` group of every metrics line must be those of a run that nothing ended.

Dropout, accumulation over segments and over chunks of the streams, calls of two updates
and of one, a mean of the parameters, and more than one epoch are all on.
"""

import argparse
import json
import os
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

from tests.support.processes import Processes, exact, write_experiment
from txl_jax.checkpoint import manifest

NUM_STEPS = 119
EVERY_STEPS = 15
FLAGS = {
    "train.num_steps": NUM_STEPS,
    "train.segments_per_call": 4,
    "train.segments_per_update": 2,
    "train.batch_chunk": 2,
    "train.eval_every": 48,
    "train.order": "roll",
    "train.varlen": True,
    "train.reset_memory_at": ord(","),
    "optim.optimizer": "adam",
    "optim.schedule": "cosine",
    "optim.lr": 1e-3,
    "optim.warmup_steps": 10,
    "optim.asgd_from": 20,
    "checkpoint.every_steps": EVERY_STEPS,
}


class Run(NamedTuple):
    """A folder with an experiment, and the run that it makes on one device."""

    folder: Path

    @property
    def workdir(self) -> Path:
        """The run's folder."""
        return self.folder / "run"

    def start(self, *flags: str) -> Processes:
        """Starts the command."""
        config = self.folder / "tiny.py"
        if not config.exists():
            self.folder.mkdir()
            write_experiment(self.folder)
        fields = tuple(f"--config.{name}={value}" for name, value in FLAGS.items())
        places = f"--config={config}", f"--workdir={self.workdir}", *fields
        one_device = {"JAX_NUM_CPU_DEVICES": "1"}
        return Processes(
            self.folder, *places, *flags, count=1, environments=[one_device]
        )

    def finish(self, *flags: str) -> str:
        """Runs the command to its end and returns its stderr."""
        run = self.start(*flags)
        statuses, stderr = run.wait(), run.stderr[0].read_text()
        assert statuses == [0], stderr[-3000:]
        return stderr

    def kill_once(self, seconds: float, rng: random.Random) -> bool:
        """Runs the command and kills it; returns whether it was done before."""
        run, started = self.start(), time.monotonic()
        at_write = rng.random() < 0.5
        delay = rng.uniform(0, seconds)
        while run.all[0].poll() is None:
            if time.monotonic() - started >= delay:
                unfinished = self.workdir.glob("checkpoints/*.orbax-checkpoint-tmp*")
                if not at_write or any(unfinished):
                    time.sleep(rng.uniform(0, 0.02) if at_write else 0)
                    break
            time.sleep(0.001)
        run.kill()
        (status,) = run.wait()
        assert status in (0, -9), run.stderr[0].read_text()[-3000:]
        return status == 0

    def result(self) -> dict[str, Any]:
        """Returns everything that must repeat: among it the checksums of all arrays."""
        checkpoints = self.workdir / "checkpoints"
        saved = manifest.read(checkpoints / str(NUM_STEPS), NUM_STEPS)
        assert len(saved.arrays) > 50 and saved.position and saved.position.epoch > 0
        lines = exact(self.workdir)
        assert [step for step, _ in lines] == list(range(1, NUM_STEPS + 1))
        names = sorted(path.name for path in checkpoints.iterdir())
        return {"manifest": saved.to_json(), "exact": lines, "checkpoints": names}


def torture(folder: Path, kills: int, seed: int) -> dict[str, Any]:
    """Kills until there were `kills`; returns how many, in how many rounds.

    Raises AssertionError when a round ends otherwise than an undisturbed run.
    """
    rng = random.Random(seed)
    results = []
    for name in ("compiles", "straight"):
        straight, started = Run(folder / name), time.monotonic()
        straight.finish()
        seconds = time.monotonic() - started
        results.append(straight.result())
    expected = results[0]
    assert results[1] == expected
    killed = rounds = 0
    while killed < kills:
        run, here = Run(folder / f"round{rounds}"), 0
        while killed < kills and not run.kill_once(1.1 * seconds, rng):
            killed, here = killed + 1, here + 1
        run.finish()
        result = run.result()
        for name in expected:
            assert result[name] == expected[name], (rounds, name)
        rounds += 1
        print(f"{killed} kills: round of {here} is bit-identical", file=sys.stderr)
    return {"kills": killed, "rounds": rounds, "seconds_undisturbed": seconds}


def main() -> None:
    """Reads the flags, and prints one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    flags = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        os.environ["JAX_COMPILATION_CACHE_DIR"] = f"{folder}/cache"
        os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
        print(json.dumps(torture(Path(folder), flags.kills, flags.seed)))


if __name__ == "__main__":
    main()
