"""The loop saves, validates and ends at the right steps, without device stalls.

Its steps compute next to nothing; `tests/update` and `tests/cli/test_main.py` train.
"""

import contextlib
import dataclasses
import itertools
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from txl_jax import train as loop
from txl_jax.checkpoint.listing import read_manifests
from txl_jax.checkpoint.options import CheckpointConfig
from txl_jax.config import Config
from txl_jax.data.streams import Position
from txl_jax.errors import RETRY, Interrupted
from txl_jax.model.config import ModelConfig
from txl_jax.model.memory import Memory
from txl_jax.report.metrics_log import read_metrics
from txl_jax.runtime import preemption
from txl_jax.runtime.options import RunConfig
from txl_jax.runtime.preemption import Stop
from txl_jax.sharding.rules import abstract, sharding
from txl_jax.train import Run
from txl_jax.update.options import TrainConfig
from txl_jax.update.state import Average, TrainState, Updater, jit_step

TEXT = np.frombuffer(b"segment after segment; " * 50, "u1")
CONFIG = Config(
    model=ModelConfig(vocab_size=256),
    train=TrainConfig(num_steps=6, batch_size=8, tgt_len=4, log_every=1, eval_every=3),
)


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


def make_run(workdir: Path, config: Config = CONFIG) -> Run:
    """Returns a run whose updates are made by `count`."""
    run = Run(config, workdir, TEXT, TEXT)
    # Incompressible bits, so that a checkpoint is larger than the tests' small disks.
    bits = np.random.default_rng(0).integers(2**31, size=16_000, dtype=np.int32)

    def create() -> TrainState:
        zero = jnp.zeros((), jnp.int32)
        params = {"x": zero, "bits": jnp.asarray(bits)}
        memory = Memory(jnp.zeros((1, 1, 1, 1)), zero)
        average = Average(params, zero)
        return TrainState(zero, params, (), memory, jax.random.key(0), average)

    def evaluate(params: Any, text: Any, progress: Any) -> Any:
        for done in (1, 2):
            progress(done, 2)
        return {"nll": float(jax.device_get(params["x"]))}

    state = jax.eval_shape(create)
    places = jax.tree.map(lambda _: sharding(run.mesh, ()), state)  # replicated
    like = abstract(state, places)
    init = jax.jit(create, out_shardings=places)
    run.updater = Updater(init, like, jit_step(count, like))
    run.evaluate = evaluate
    return run


def train(workdir: Path, config: Config = CONFIG) -> dict[str, Any]:
    """Trains with `count`."""
    return make_run(workdir, config).train()


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
        saved, _ = read_manifests(run / "checkpoints")
        assert saved[3].valid_nll == expected[3][1]["valid_nll"]


def test_validation_uses_the_average_of_the_parameters(tmp_path: Path) -> None:
    train(tmp_path)
    lines = [line["exact"] for line in read_metrics(tmp_path / "metrics.jsonl")]
    assert ["valid_nll" in line for line in lines] == [0, 0, 0, 1, 0, 0, 0, 1]
    assert lines[3]["valid_nll"] == -lines[2]["loss"] < 0


class Calls:
    """A compiled step that only records its calls, and when their metrics are read."""

    def __init__(self, segments_per_update: int) -> None:
        self.G = segments_per_update
        self.made, self.events = 0, list[str]()

    def lower(self, *_: Any) -> "Calls":
        """Returns what the loop calls."""
        return self

    compile = lower

    def __call__(self, state: TrainState, segments: Any) -> Any:
        """Makes the updates of a call."""
        first, S = self.made, len(segments.length_SB)
        self.made += S // self.G
        self.events.append(f"call {first}: {S}")
        zeros = np.zeros(S // self.G, np.int32)
        metrics: Any = dict.fromkeys(("loss", "tokens", "skipped_in_row"), zeros)
        return state, {**metrics, "reason": Reason(self, first, zeros)}


@dataclasses.dataclass
class Reason:
    """A metric of a call that records when it is read."""

    calls: Calls
    first: int
    zeros: np.ndarray

    def __array__(self) -> np.ndarray:
        self.calls.events.append(f"fetch {self.first}")
        return self.zeros


def events_of(
    workdir: Path,
    config: TrainConfig,
    save_every: int,
    monkeypatch: pytest.MonkeyPatch,
) -> list[str]:
    """Returns the calls, fetches and saves of a run."""
    config = dataclasses.replace(config, batch_size=8, tgt_len=4)
    checkpoint = CheckpointConfig(every_steps=save_every)
    run = make_run(
        workdir, Config(model=CONFIG.model, train=config, checkpoint=checkpoint)
    )
    calls: Any = Calls(config.segments_per_update)
    run.updater = run.updater._replace(step=calls)

    def save(_: Any, step: int, state: Any, position: Position, *rest: Any) -> None:
        calls.events.append(f"save {step} at {position.segment}")

    monkeypatch.setattr(loop.Checkpoints, "save", save)
    with contextlib.suppress(Interrupted):
        run.train()
    events: list[str] = calls.events
    return events


def test_metrics_are_fetched_after_the_next_dispatch_and_before_a_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = TrainConfig(num_steps=3, eval_every=3)
    assert events_of(tmp_path, config, 2, monkeypatch) == [
        *("call 0: 1", "call 1: 1", "fetch 0", "fetch 1", "save 2 at 2"),
        *("call 2: 1", "fetch 2", "save 3 at 3"),
    ]


def test_a_call_of_several_updates_ends_at_its_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = TrainConfig(num_steps=6, segments_per_call=2, eval_every=6)
    ask_to_end(monkeypatch, 2)
    assert events_of(tmp_path, config, 100, monkeypatch) == [
        *("call 0: 2", "call 2: 2", "fetch 0", "fetch 2", "save 4 at 4")
    ]


def test_saves_at_any_interval_are_reached_by_calls_of_one_update(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts: Any = {"segments_per_call": 8, "segments_per_update": 2}
    config = TrainConfig(num_steps=11, eval_every=6, **parts)
    events = events_of(tmp_path, config, 5, monkeypatch)
    assert [event for event in events if not event.startswith("fetch")] == [
        *("call 0: 8", "call 4: 2", "save 5 at 10"),
        *("call 5: 2", "save 6 at 12"),
        *("call 6: 8", "save 10 at 20"),
        *("call 10: 2", "save 11 at 22"),
    ]
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
        if Run.train.__code__ in callers:
            assert loop.fetch.__code__ in callers, "a device array read outside fetch"
        return value.fget(self)

    monkeypatch.setattr(array, "_value", property(guarded))
    assert float(jnp.zeros(())) == 0 and reads, "float() would be seen"
    monkeypatch.setattr(loop.Checkpoints, "save", lambda *_: None)
    run = make_run(tmp_path)
    run.evaluate = lambda *_: {"nll": 1.0}
    run.train()
    assert len(reads) > 6 * 4, "four metrics of six calls"


def test_implicit_transfers_are_disallowed(tmp_path: Path) -> None:
    jitted: Any = jax.jit(lambda x: x)
    run = make_run(tmp_path)
    run.evaluate = lambda *_: jitted(np.zeros(2))
    with pytest.raises(Exception, match="[Dd]isallowed host-to-device"):
        run.train()


def test_a_profile_is_written_where_tensorboard_finds_it(tmp_path: Path) -> None:
    train(tmp_path, dataclasses.replace(CONFIG, run=RunConfig(profile_from=2)))
    (profile,) = (tmp_path / "profile").glob("plugins/profile/*/*.xplane.pb")
    assert profile.stat().st_size > 0
