"""A run that is killed and started again ends bit-identical to one never stopped.

Dropout, accumulation over segments and over chunks of the streams, several updates in
a call, a mean of the parameters, and more than one epoch are all on.
"""

import os
import signal
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest

from txl_jax.checkpoint.manager import open_checkpoints
from txl_jax.checkpoint.options import CheckpointConfig
from txl_jax.report.log import read_metrics

pytestmark = [pytest.mark.exact_bits, pytest.mark.promise("Resume is exact")]

NUM_STEPS = 120
EVERY_STEPS = 16

EXPERIMENT = f"""
from txl_jax import config

def get_config():
    c = config.default()
    c.data.update(corpus="text", path=TEXT, data_dir=DATA)
    c.model.update(n_layer=2, d_model=16, n_head=2, d_head=8, d_inner=32, mem_len=8)
    c.model.update(dropout=0.2, dropatt=0.2)
    c.train.update(num_steps={NUM_STEPS}, batch_size=4, tgt_len=8, log_every=1)
    c.train.update(segments_per_call=4, segments_per_update=2, batch_chunk=2)
    c.train.update(eval_every=48, order="roll", varlen=True, reset_memory_at=ord(","))
    c.optim.update(lr=1e-3, warmup_steps=10, asgd_from=20)
    c.eval.update(streams=2, tgt_len=8, mem_len=16)
    c.generate.update(num_tokens=4, prompt="a")
    c.checkpoint.update(every_steps={EVERY_STEPS}, keep=2)
    return c
"""


def start(folder: Path, workdir: Path) -> subprocess.Popen[str]:
    # One device, as on a laptop, and a thread pool of a stated size.
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "NPROC": "2"}
    arguments = [f"--config={folder / 'tiny.py'}", f"--workdir={workdir}"]
    return subprocess.Popen(
        [sys.executable, "-m", "txl_jax.main", *arguments],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process: subprocess.Popen[str]) -> str:
    _, stderr = process.communicate(timeout=300)
    assert process.returncode == 0, stderr
    return stderr


def kill_after(process: subprocess.Popen[str], path: Path, step: int) -> None:
    """Kills the process once metrics.jsonl has a line of `step`."""
    while process.poll() is None:
        if path.exists() and path.read_bytes().count(b"\n") >= step:
            process.send_signal(signal.SIGKILL)
            break
        time.sleep(0.002)
    process.communicate()
    assert process.returncode == -signal.SIGKILL, "it ended before it was killed"


def saved(workdir: Path) -> Any:
    """Returns everything in the last checkpoint, arrays as raw bytes."""
    manager = open_checkpoints(workdir, CheckpointConfig(), read_only=True)
    with closing(manager):
        items = manager.restore(
            NUM_STEPS,
            args=ocp.args.Composite(
                params=ocp.args.StandardRestore(),
                average=ocp.args.StandardRestore(),
                training=ocp.args.StandardRestore(),
                record=ocp.args.JsonRestore(),
            ),
        )

    def raw(x: Any) -> Any:
        if isinstance(x, jax.Array) and jax.dtypes.issubdtype(
            x.dtype, jax.dtypes.prng_key
        ):
            x = jax.random.key_data(x)
        return np.asarray(x).tobytes()

    return jax.tree.map(raw, dict(items.items()))


def exact(workdir: Path) -> list[Any]:
    lines = read_metrics(workdir / "metrics.jsonl")
    return [(line["step"], line["exact"]) for line in lines]


def test_kill_and_resume_is_bit_identical(tmp_path: Path) -> None:
    # 120 updates of 64 tokens: the end of the first epoch is passed.
    text = "".join(f"{n} is followed by {n + 1}, " for n in range(350))
    (tmp_path / "text.txt").write_text(text)
    experiment = EXPERIMENT.replace("TEXT", repr(str(tmp_path / "text.txt")))
    experiment = experiment.replace("DATA", repr(str(tmp_path / "data")))
    (tmp_path / "tiny.py").write_text(experiment)

    straight, killed = tmp_path / "straight", tmp_path / "killed"
    finish(start(tmp_path, straight))
    kill_after(start(tmp_path, killed), killed / "metrics.jsonl", EVERY_STEPS + 7)
    kill_after(start(tmp_path, killed), killed / "metrics.jsonl", 3 * EVERY_STEPS + 3)
    assert "resumed at update" in finish(start(tmp_path, killed))

    assert [step for step, _ in exact(killed)] == list(range(1, NUM_STEPS + 1))
    assert exact(killed) == exact(straight)
    expected, found = saved(straight), saved(killed)
    assert len(jax.tree.leaves(expected)) > 50
    assert expected == found
