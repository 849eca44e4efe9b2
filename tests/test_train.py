"""The loop saves, validates and ends at the right steps, without device stalls.

Its steps compute next to nothing; `tests/update` and `tests/cli/test_main.py` train.
"""

import contextlib
import dataclasses
import itertools
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from txl_jax import train as loop
from txl_jax.checkpoint import save_restore
from txl_jax.checkpoint.options import CheckpointConfig
from txl_jax.config import Config
from txl_jax.errors import RETRY, Interrupted
from txl_jax.model.config import ModelConfig
from txl_jax.model.memory import Memory
from txl_jax.report.log import read_metrics
from txl_jax.runtime import preemption
from txl_jax.runtime.options import RunConfig
from txl_jax.runtime.preemption import Stop
from txl_jax.sharding.mesh import make_mesh
from txl_jax.sharding.rules import abstract, sharding
from txl_jax.train import TrainingParts, make_streams
from txl_jax.update.options import TrainConfig
from txl_jax.update.state import Average, TrainState, Updater

TEXT = np.frombuffer(b"segment after segment; " * 50, "u1")
CONFIG = Config(
    model=ModelConfig(vocab_size=256),
    train=TrainConfig(num_steps=6, batch_size=8, tgt_len=4, log_every=1, eval_every=3),
)


@jax.jit
def count(state: TrainState, segments: Any) -> Any:
    """Mixes the inputs into the parameters, and their negation into the mean."""
    x = (31 * state.params["x"] + segments.inputs_SBL.sum()) % 1009
    params, average = state.params | {"x": x}, state.params | {"x": -x}
    mean = Average(average, state.average.count)
    zeros = jnp.zeros(1, jnp.int32)
    metrics = {"loss": x[None] * 1.0, "tokens": zeros + 32}
    metrics |= {"skipped_in_row": zeros, "reason": zeros}
    state = dataclasses.replace(state, step=state.step + 1, params=params, average=mean)
    return state, metrics


def train(
    workdir: Path, config: Config = CONFIG, call: Any = lambda: None, valid: Any = None
) -> dict[str, Any]:
    """Trains with `count`, before which it runs `call`, instead of a program."""
    mesh = make_mesh(config.mesh)
    place = sharding(mesh, ())  # replicated
    # Incompressible bits, so that a checkpoint is larger than the tests' small disks.
    bits = np.random.default_rng(0).integers(2**31, size=16_000, dtype=np.int32)
    zero, bits = jax.device_put((np.int32(0), bits), place)
    memory = Memory(jax.device_put(np.zeros((1, 1, 1, 1)), place), zero)
    params: Any = {"x": zero, "bits": bits}
    average = Average(params, zero)
    key = jax.device_put(jax.random.key(0), place)
    state = TrainState(zero, params, (), memory, key, average, zero)

    def evaluate(params: Any, text: Any, progress: Any) -> dict[str, Any]:
        for done in (1, 2):
            progress(done, 2)
        return {"nll": valid or float(jax.device_get(params["x"]))}

    def step(state: TrainState, segments: Any) -> Any:
        call()
        return count(state, segments)

    like = abstract(state, jax.tree.map(lambda _: place, state))
    batch = make_streams(config, TEXT, slice(None)).batch
    updater = Updater(lambda: state, like, step)
    parts = TrainingParts(config, mesh, updater, batch, evaluate, TEXT)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "Program", lambda name, step, **_: step)
        return loop.train(parts, workdir)


def ask_to_end(monkeypatch: pytest.MonkeyPatch, boundary: int) -> None:
    """Simulates a signal before the boundary with that number, counted from 1."""
    stop = Stop()
    monkeypatch.setattr(preemption, "listening", lambda: contextlib.nullcontext(stop))
    at_boundary, count = stop.at_boundary, itertools.count(1)

    def counted() -> bool:
        stop.status = RETRY if next(count) == boundary else stop.status
        return at_boundary()

    monkeypatch.setattr(stop, "at_boundary", counted)


@pytest.mark.promise("SIGTERM loses nothing")
@pytest.mark.parametrize(
    ("boundary", "steps"),
    [(1, [1]), (3, [1, 2, 3]), (5, [1, 2, 3])],
    ids=["an update", "at a validation", "in a validation"],
)
def test_a_run_ended_by_a_signal_resumes_exactly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, boundary: int, steps: list[int]
) -> None:
    """A resumed run makes the validation that was due when the run ended."""
    ended, straight = tmp_path / "ended", tmp_path / "straight"
    with monkeypatch.context() as patch:
        ask_to_end(patch, boundary)
        with pytest.raises(Interrupted, match=f"at update {steps[-1]}, which is saved"):
            train(ended)
    lines = read_metrics(ended / "metrics.jsonl")
    assert [line["step"] for line in lines] == steps
    assert "valid_nll" not in lines[-1]["exact"]
    train(ended)
    train(straight)
    exact, expected = (
        [(line["step"], line["exact"]) for line in read_metrics(run / "metrics.jsonl")]
        for run in (ended, straight)
    )
    assert exact == expected
    for run in (ended, straight):
        saved, _ = save_restore.read_manifests(run / "checkpoints")
        assert saved[3].valid_nll == expected[3][1]["valid_nll"]


def test_validation_uses_the_average_of_the_parameters(tmp_path: Path) -> None:
    train(tmp_path)
    lines = [line["exact"] for line in read_metrics(tmp_path / "metrics.jsonl")]
    assert ["valid_nll" in line for line in lines] == [0, 0, 0, 1, 0, 0, 0, 1]
    assert lines[3]["valid_nll"] == -lines[2]["loss"] < 0


class Events:
    """Stands in for a run in progress, and records the loop's calls."""

    def __init__(self, config: Config, last: int) -> None:
        self.start = 0, 0, 0
        self.parts = SimpleNamespace(config=config)
        self.log = SimpleNamespace(timing=SimpleNamespace(totals={}))
        self.checkpoints = SimpleNamespace(finish=lambda step: None, failed=[])
        self.last, self.done, self.calls = last, list[str](), list[str]()

    def dispatch(self, step: int, state: int, segments: str) -> int:
        """Makes all updates of the batch."""
        self.done.append(f"dispatch {step}")
        made = int(segments[-1]) // self.parts.config.train.segments_per_update
        updates = [*range(state + 1, state + made + 1)]
        self.calls.append(f"record {step} {updates} {segments}")
        return state + made

    def record(self, in_flight: int) -> None:
        """Records the calls that are not in flight."""
        while len(self.calls) > in_flight:
            self.done.append(self.calls.pop(0))

    def poll_end(self) -> bool:
        """Returns True at the boundary `last`."""
        self.done.append("boundary")
        return self.done.count("boundary") == self.last

    def finish_step(self, *saved: int) -> None:
        """Records a save."""
        self.done.append(f"save {saved}")


def events_of(config: TrainConfig, save_every: int, last: int = 0) -> list[str]:
    """Returns the events of a run that is asked to end after `last` boundaries."""
    whole = Config(train=config, checkpoint=CheckpointConfig(every_steps=save_every))

    def batches() -> Iterator[Any]:
        read: Any = lambda n, S: (f"batch {n} of {S}", n + 1)  # noqa: E731
        parts: Any = SimpleNamespace(config=whole, read_batch=read)
        place: Any = 0, 0
        while True:
            segments, place = loop.read_call(parts, place)
            yield segments, place

    run: Any = Events(whole, last)
    loop.update_to_the_end(run, batches())
    done: list[str] = run.done
    return done


def test_metrics_are_fetched_after_the_next_dispatch_and_before_a_save() -> None:
    config = TrainConfig(num_steps=3, batch_size=1, tgt_len=1, eval_every=3)
    assert events_of(config, save_every=2) == [
        *("dispatch 0", "boundary"),
        *("dispatch 1", "record 0 [1] batch 0 of 1", "boundary"),
        *("record 1 [2] batch 1 of 1", "save (2, 2, 2)"),
        *("dispatch 2", "boundary", "record 2 [3] batch 2 of 1"),
        "save (3, 3, 3)",
    ]


def test_a_call_of_several_updates_ends_at_its_last() -> None:
    config = TrainConfig(
        num_steps=6, batch_size=1, tgt_len=1, segments_per_call=2, eval_every=6
    )
    done = events_of(config, save_every=100, last=2)
    assert [line for line in done if line.startswith(("record", "save"))] == [
        *("record 0 [1, 2] batch 0 of 2", "record 2 [3, 4] batch 1 of 2"),
        *("save (4, 4, 2)", "record 4 [5, 6] batch 2 of 2", "save (6, 6, 3)"),
    ]


def test_saves_at_any_interval_are_reached_by_calls_of_one_update() -> None:
    parts: Any = {"segments_per_call": 8, "segments_per_update": 2}
    config = TrainConfig(num_steps=11, batch_size=1, tgt_len=1, eval_every=6, **parts)
    done = events_of(config, save_every=5)
    calls = [line.split("] ")[1] for line in done if line.startswith("record")]
    sizes = enumerate((8, 2, 2, 8, 2))
    assert calls == [f"batch {n} of {size}" for n, size in sizes]
    saves = [line for line in done if line.startswith("save")]
    steps = ((5, 2), (6, 3), (10, 4), (11, 5))
    assert saves == [f"save ({step}, {step}, {n})" for step, n in steps]
    assert dataclasses.replace(config, num_steps=3).updates_of_call(5) == 1


def test_device_arrays_are_read_only_in_fetch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Any other conversion of a device array would stall the devices."""
    array: Any = type(jnp.zeros(1))
    value = array._value
    reads: list[int] = []

    def guarded(self: Any) -> Any:
        frame, callers = sys._getframe(1), set()
        while frame is not None:
            callers.add(frame.f_code)
            frame = frame.f_back  # type: ignore[assignment]
        reads.append(1)
        if loop.train.__code__ in callers:
            assert loop.fetch.__code__ in callers, "a device array read outside fetch"
        return value.fget(self)

    monkeypatch.setattr(array, "_value", property(guarded))
    assert float(jnp.zeros(())) == 0 and reads, "float() would be seen"
    monkeypatch.setattr(loop.Checkpoints, "save", lambda *_: None)
    train(tmp_path, valid=1.0)
    assert len(reads) > 6 * 4, "four metrics of six calls"


def test_implicit_transfers_are_disallowed(tmp_path: Path) -> None:
    jitted = jax.jit(lambda x: x)
    with pytest.raises(Exception, match="[Dd]isallowed host-to-device"):
        train(tmp_path, call=lambda: jitted(np.zeros(2)))


def test_a_profile_is_written_where_tensorboard_finds_it(tmp_path: Path) -> None:
    train(tmp_path, dataclasses.replace(CONFIG, run=RunConfig(profile_from=2)))
    (profile,) = (tmp_path / "profile").glob("plugins/profile/*/*.xplane.pb")
    assert profile.stat().st_size > 0
