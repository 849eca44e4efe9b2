"""Kills a training run at random moments until it is done, over and over.

    python -m tests.faults.kills --kills=200

Each round trains in a new folder, from the preparation of the data on: the same
command again and again, ended by SIGKILL after a random time, or when a checkpoint
begins to be written after it. A round ends when the command does. Then the digests of
all arrays (parameters, optimizer, memory, keys), the position and the `exact` group of
every metrics line must be those of a run that nothing ended. Compiled programs are kept
between the processes.
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

from txl_jax.checkpoint import manifest
from txl_jax.report.log import read_metrics

NUM_STEPS = 60
ROOT = Path(__file__).parents[2]

EXPERIMENT = f"""
from txl_jax import config

def get_config():
    c = config.default()
    c.data.update(corpus="text", path=TEXT, data_dir=DATA)
    c.model.update(n_layer=1, d_model=16, n_head=2, d_head=8, d_inner=32, mem_len=8)
    c.model.update(dropout=0.2)
    c.train.update(num_steps={NUM_STEPS}, batch_size=4, tgt_len=8, log_every=1)
    c.train.update(segments_per_call=2, eval_every=20)
    c.optim.update(lr=1e-3, warmup_steps=10)
    c.eval.update(streams=2, tgt_len=8, mem_len=8)
    c.generate.update(num_tokens=2, prompt="a")
    c.checkpoint.update(every_steps=4, keep=2)
    return c
"""


class Run(NamedTuple):
    """A folder with an experiment, and the run that it makes."""

    folder: Path
    cache: Path  # of compiled programs

    @property
    def workdir(self) -> Path:
        """Where the run is."""
        return self.folder / "run"

    def prepare(self) -> None:
        """Writes the text and the experiment."""
        self.folder.mkdir(parents=True)
        text = "".join(f"{n} is followed by {n + 1}, " for n in range(350))
        (self.folder / "text.txt").write_text(text)
        source = EXPERIMENT.replace("TEXT", repr(str(self.folder / "text.txt")))
        source = source.replace("DATA", repr(str(self.folder / "data")))
        (self.folder / "tiny.py").write_text(source)

    def start(self) -> subprocess.Popen[str]:
        """Starts the command."""
        command = [sys.executable, "-m", "txl_jax.main"]
        command += [f"--config={self.folder / 'tiny.py'}", f"--workdir={self.workdir}"]
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(
                [str(ROOT), os.environ.get("PYTHONPATH", "")]
            ),
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": "",
            "JAX_COMPILATION_CACHE_DIR": str(self.cache),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        }
        with (self.folder / "err").open("a") as err:
            return subprocess.Popen(
                command,
                env=environment,
                stdout=subprocess.DEVNULL,
                stderr=err,
                text=True,
            )

    def finish(self) -> float:
        """Runs the command to its end and returns the seconds that it took."""
        started = time.monotonic()
        status = self.start().wait(timeout=600)
        assert status == 0, f"status {status}: {self.errors()}"
        return time.monotonic() - started

    def kill_once(self, seconds: float, rng: random.Random) -> bool:
        """Runs the command and kills it; returns whether it was done before."""
        process, started = self.start(), time.monotonic()
        at_write = rng.random() < 0.5
        delay = rng.uniform(0, seconds)
        while process.poll() is None:
            if time.monotonic() - started >= delay:
                unfinished = self.workdir.glob("checkpoints/*.orbax-checkpoint-tmp*")
                if not at_write or any(unfinished):
                    time.sleep(rng.uniform(0, 0.02) if at_write else 0)
                    process.send_signal(signal.SIGKILL)
                    break
            time.sleep(0.001)
        status = process.wait()
        assert status in (0, -signal.SIGKILL), f"status {status}: {self.errors()}"
        return status == 0

    def errors(self) -> str:
        """Returns the end of what the commands said."""
        return (self.folder / "err").read_text()[-3000:]

    def result(self) -> dict[str, Any]:
        """Returns everything that must repeat: among it the checksums of all arrays."""
        folder = self.workdir / "checkpoints" / str(NUM_STEPS)
        saved = manifest.read(folder, NUM_STEPS)
        lines = read_metrics(self.workdir / "metrics.jsonl")
        assert [line["step"] for line in lines] == list(range(1, NUM_STEPS + 1))
        checkpoints = sorted(p.name for p in (self.workdir / "checkpoints").iterdir())
        return {
            "manifest": saved.to_json(),
            "exact": [line["exact"] for line in lines],
            "checkpoints": checkpoints,
        }


def torture(
    folder: Path, kills: int, seed: int, compiled: str | None = None
) -> dict[str, Any]:
    """Kills until there were `kills`; returns how many, in how many rounds.

    A folder of compiled programs saves a second undisturbed run, which measures its
    time without compilation. Raises AssertionError when a round ends otherwise than
    an undisturbed run.
    """
    rng = random.Random(seed)
    cache = Path(compiled or folder / "cache")
    results = []
    for name in ("straight",) if compiled else ("cold", "straight"):
        straight = Run(folder / name, cache)
        straight.prepare()
        seconds = straight.finish()
        results.append(straight.result())
    expected = results[0]
    assert results[-1] == expected
    killed = rounds = 0
    while killed < kills:
        run = Run(folder / f"round{rounds}", cache)
        run.prepare()
        here = 0
        while killed < kills and not run.kill_once(1.1 * seconds, rng):
            killed, here = killed + 1, here + 1
        run.finish()
        found = run.result()
        for name in expected:
            assert found[name] == expected[name], (
                f"round {rounds}: {name}: {found[name]} instead of {expected[name]}"
            )
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
        print(json.dumps(torture(Path(folder), flags.kills, flags.seed)))


if __name__ == "__main__":
    main()
