"""Training learns and resumes exactly, and the loop never waits for the devices."""

import dataclasses
import inspect
import itertools
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from txl_jax import train as loop
from txl_jax.checkpoint.manager import open_checkpoints
from txl_jax.checkpoint.options import CheckpointConfig
from txl_jax.checkpoint.save_restore import restore_params
from txl_jax.cli.run import make_streams, train_on
from txl_jax.config import Config
from txl_jax.data.streams import Position
from txl_jax.errors import RETRY, Interrupted
from txl_jax.evaluate.options import EvalConfig
from txl_jax.evaluate.perplexity import make_evaluate
from txl_jax.model.config import ModelConfig
from txl_jax.report.log import read_metrics
from txl_jax.runtime.options import RunConfig
from txl_jax.runtime.preemption import Stop
from txl_jax.sharding import make_mesh
from txl_jax.update.options import OptimConfig, TrainConfig
from txl_jax.update.state import Program, TrainState
from txl_jax.update.step import make_program
from txl_jax.workdir import load

# A text that repeats: the entropy of the next byte is near 0 once it is learnt.
TEXT = np.frombuffer(b"segment after segment; " * 800, "u1")


def tiny(mem_len: int = 16, **changes: Any) -> Config:
    train = TrainConfig(
        num_steps=150,
        batch_size=8,
        tgt_len=16,
        log_every=1,
        eval_every=75,
    )
    return Config(
        model=ModelConfig(
            vocab_size=256,
            n_layer=1,
            d_model=32,
            n_head=2,
            d_head=16,
            d_inner=64,
            mem_len=mem_len,
            dropout=0.0,
        ),
        train=dataclasses.replace(train, **changes),
        optim=OptimConfig(lr=1e-2, warmup_steps=5),
        eval=EvalConfig(streams=8, tgt_len=16, mem_len=32),
        checkpoint=CheckpointConfig(every_steps=75),
    )


def test_loss_falls(tmp_path: Path) -> None:
    train_on(tiny(), tmp_path, TEXT, TEXT[:2000])
    lines = read_metrics(tmp_path / "metrics.jsonl")
    assert [line["step"] for line in lines] == list(range(1, 151))
    assert lines[0]["exact"]["loss"] > 5
    assert lines[-1]["exact"]["loss"] < 0.7
    assert lines[-1]["exact"]["valid_nll"] < 0.7


@pytest.mark.long
def test_a_model_without_memory_learns_from_overlapping_windows(
    tmp_path: Path,
) -> None:
    evaluation = EvalConfig(streams=8, tgt_len=16, mem_len=0, ext_len=16)
    config = tiny(mem_len=0, num_steps=75, ext_len=16)
    config = dataclasses.replace(config, eval=evaluation)
    train_on(config, tmp_path, TEXT, TEXT[:2000])
    lines = read_metrics(tmp_path / "metrics.jsonl")
    assert {line["exact"]["tokens"] for line in lines} == {8 * 16}
    assert lines[-1]["exact"]["valid_nll"] < 1.5


def test_a_run_with_an_average_is_judged_by_it(tmp_path: Path) -> None:
    """By validation, and so by which checkpoint is best, and by whoever loads it."""
    config = tiny(num_steps=6, eval_every=3)
    optim = dataclasses.replace(config.optim, asgd_from=2)
    config = dataclasses.replace(config, optim=optim)
    train_on(config, tmp_path, TEXT, TEXT[:2000])
    mesh = make_mesh(config.mesh)
    like = load.like_params(config.model, mesh)
    opened = open_checkpoints(tmp_path, config.checkpoint, read_only=True)
    with closing(opened) as manager:
        mean, _ = restore_params(manager, "6", like, averages=True)
        last, _ = restore_params(manager, "6", like)
    evaluate = make_evaluate(config.model, config.eval, mesh)
    nll_mean, nll_last = (
        evaluate(params, TEXT[:2000], lambda *_: None)["nll"] for params in (mean, last)
    )
    lines = read_metrics(tmp_path / "metrics.jsonl")
    assert lines[-1]["exact"]["valid_nll"] == nll_mean
    assert nll_mean != nll_last


def ask_to_end(monkeypatch: pytest.MonkeyPatch, boundary: int) -> None:
    """Simulates a signal before the boundary with that number, counted from 1."""
    stop = Stop()
    monkeypatch.setattr(loop, "stop", stop)
    at_boundary, count = stop.at_boundary, itertools.count(1)

    def counted() -> bool:
        stop.status = RETRY if next(count) == boundary else stop.status
        return at_boundary()

    monkeypatch.setattr(stop, "at_boundary", counted)


ENDING = tiny(num_steps=6, eval_every=3)


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The workdir of a run that nobody ended."""
    folder = tmp_path_factory.mktemp("straight")
    train_on(ENDING, folder, TEXT, TEXT[:2000])
    return folder


@pytest.mark.promise("SIGTERM loses nothing")
@pytest.mark.parametrize(
    ("boundary", "steps"),
    [
        pytest.param(1, [1], marks=pytest.mark.long, id="an update"),
        pytest.param(3, [1, 2, 3], marks=pytest.mark.long, id="at a validation"),
        pytest.param(5, [1, 2, 3], id="in a validation"),
    ],
)
def test_a_run_that_is_asked_to_end_goes_on_exactly(
    straight: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    boundary: int,
    steps: list[int],
) -> None:
    """Also where a validation was due, which is made when it goes on."""
    with monkeypatch.context() as patch:
        ask_to_end(patch, boundary)
        with pytest.raises(Interrupted, match=f"at update {steps[-1]}, which is saved"):
            train_on(ENDING, tmp_path, TEXT, TEXT[:2000])
    lines = read_metrics(tmp_path / "metrics.jsonl")
    assert [line["step"] for line in lines] == steps
    assert "valid_nll" not in lines[-1]["exact"]
    train_on(ENDING, tmp_path, TEXT, TEXT[:2000])

    exact, expected = (
        [(line["step"], line["exact"]) for line in read_metrics(run / "metrics.jsonl")]
        for run in (tmp_path, straight)
    )
    assert exact == expected
    for run in (tmp_path, straight):
        opened = open_checkpoints(run, ENDING.checkpoint, read_only=True)
        with closing(opened) as manager:
            assert manager.manifests[3].valid_nll == expected[2][1]["valid_nll"]


def test_the_step_names_its_phases() -> None:
    config = tiny()
    init, _, train_step = make_program(
        config.model, config.train, config.optim, make_mesh(config.mesh)
    )
    streams = make_streams(config, TEXT, slice(None))
    segments, _ = streams.batch(Position())
    text = train_step.lower(jax.eval_shape(init), segments).as_text(debug_info=True)
    for phase in ("forward_and_backward", "memory", "optimizer"):
        assert f"{phase}/" in text or f"{phase})" in text


# The loop alone, with steps that compute nothing.


def updates(step: int, count: int) -> dict[str, Any]:
    """Returns the metrics of updates step + 1 to step + count, as numpy arrays."""
    loss = np.arange(step + 1, step + count + 1, dtype=np.float32)
    zeros = np.zeros(count, np.int32)
    metrics = {"loss": loss, "tokens": zeros + 64, "skipped_in_row": zeros}
    return metrics | {"reason": zeros}


def calls_of(config: TrainConfig, save_every: int, last: int = 0) -> list[str]:
    """Returns what the loop does, in order, in a run that is to end after `last`."""
    done: list[str] = []

    def step(state: Any, segments: Any) -> Any:
        done.append("step")
        made = config.updates_per_call
        return state + made, updates(state, made)

    def boundary() -> bool:
        done.append("boundary")
        return done.count("boundary") == last

    hooks = loop.Hooks(
        before=[lambda step, state: done.append(f"before {step} {state}")],
        dispatched=[lambda segments: done.append(f"dispatched {segments}")],
        fetched=[
            lambda step, made: done.append(
                f"fetched {step} {[x['loss'] for x in made]}"
            )
        ],
        boundary=[boundary, lambda: None],
    )
    batches: Any = ((f"batch {n}", n + 1) for n in itertools.count())
    start: Any = 0, 0, 0
    call: Any = step
    for saved in loop.advance(call, start, batches, config, save_every, hooks):
        done.append(f"save {tuple(saved)}")
    return done


def test_metrics_are_fetched_after_the_next_dispatch_and_before_a_save() -> None:
    config = TrainConfig(num_steps=3, batch_size=1, tgt_len=1, eval_every=3)
    assert calls_of(config, save_every=2) == [
        *("before 0 0", "step", "dispatched batch 0", "boundary"),
        *("before 1 1", "step", "dispatched batch 1", "fetched 0 [1.0]", "boundary"),
        *("fetched 1 [2.0]", "save (2, 2, 2)"),
        *("before 2 2", "step", "dispatched batch 2", "boundary"),
        *("fetched 2 [3.0]", "save (3, 3, 3)"),
    ]


def test_a_call_of_several_updates_ends_at_its_last() -> None:
    config = TrainConfig(
        num_steps=6, batch_size=1, tgt_len=1, segments_per_call=2, eval_every=6
    )
    done = calls_of(config, save_every=100, last=2)
    assert [line for line in done if line.startswith(("fetched", "save"))] == [
        *("fetched 0 [1.0, 2.0]", "fetched 2 [3.0, 4.0]", "save (4, 4, 2)"),
        *("fetched 4 [5.0, 6.0]", "save (6, 6, 3)"),
    ]


def train_idle(config: Config, workdir: Path, call: Any = lambda: None) -> None:
    """Trains with steps that compute nothing, but run `call`."""
    place = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    zero = jax.device_put(np.int32(0), place)
    empty: Any = ()
    state = TrainState(zero, {"x": zero}, (), empty, zero, guard=empty)
    metrics = jax.device_put(updates(0, 1), place)

    def step(state: Any, segments: Any) -> Any:
        call()
        return state, metrics

    places = jax.tree.map(lambda _: place, state)
    batch = make_streams(config, TEXT, slice(None)).batch
    program = Program(lambda: state, places, step)
    loop.train(config, workdir, program, batch, lambda params, progress: 1.0)


IDLE = tiny(num_steps=6, eval_every=6)


def test_device_arrays_are_read_in_fetch_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Any other conversion of a device array would stall the devices, so it fails."""
    array: Any = type(jax.numpy.zeros(1))
    value = array._value
    reads: list[int] = []

    def guarded(self: Any) -> Any:
        frame, callers = sys._getframe(1), set()
        while frame is not None:
            callers.add(frame.f_code)
            frame = frame.f_back  # type: ignore[assignment]
        if loop.train.__code__ in callers:
            assert loop.fetch.__code__ in callers, "a device array read outside fetch"
            reads.append(1)
        return value.fget(self)

    monkeypatch.setattr(array, "_value", property(guarded))
    monkeypatch.setattr(loop.save_restore, "save", lambda *_: None)
    train_idle(IDLE, tmp_path)
    assert len(reads) >= 6 * 4, "four metrics of six calls"


def test_the_guard_sees_a_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """float() of a device array goes through what the test above replaces."""
    array = type(jax.numpy.zeros(1))

    def refuse(_: Any) -> None:
        raise AssertionError("read")

    monkeypatch.setattr(array, "_value", property(refuse))
    with pytest.raises(AssertionError, match="read"):
        float(jax.numpy.zeros(()))


def test_implicit_transfers_are_disallowed(tmp_path: Path) -> None:
    jitted = jax.jit(lambda x: x)
    with pytest.raises(Exception, match="[Dd]isallowed host-to-device"):
        train_idle(IDLE, tmp_path, lambda: jitted(np.zeros(2)))


def test_a_profile_of_some_updates_is_where_tensorboard_looks(tmp_path: Path) -> None:
    run = RunConfig(profile_steps="1:3")
    train_idle(dataclasses.replace(IDLE, run=run), tmp_path)
    (profile,) = (tmp_path / "profile").glob("plugins/profile/*/*.xplane.pb")
    assert profile.stat().st_size > 0


def test_the_loop_is_short() -> None:
    assert len(inspect.getsource(loop.train).splitlines()) <= 65
