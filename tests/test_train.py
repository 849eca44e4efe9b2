"""The loop: how it talks to the devices, and that it learns."""

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

from txl_jax import restore
from txl_jax import train as loop
from txl_jax.checkpoint import CheckpointConfig, open_checkpoints, restore_params
from txl_jax.config import Config
from txl_jax.data.streams import Position
from txl_jax.distributed import RunConfig
from txl_jax.errors import AGAIN, Interrupted
from txl_jax.evaluate.perplexity import EvalConfig, make_evaluate
from txl_jax.model.config import ModelConfig
from txl_jax.optim import OptimConfig
from txl_jax.preemption import Stop
from txl_jax.report.writer import read_metrics
from txl_jax.sharding import make_mesh
from txl_jax.step import TrainConfig

pytestmark = pytest.mark.usefixtures("quick_compiler")

# A text that repeats: the entropy of the next byte is near 0 once it is learnt.
TEXT = np.frombuffer(b"segment after segment; " * 800, "u1")


def tiny(mem_len: int = 16, **changes: Any) -> Config:
    how = TrainConfig(
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
        train=dataclasses.replace(how, **changes),
        optim=OptimConfig(lr=1e-2, warmup_steps=5),
        eval=EvalConfig(streams=8, tgt_len=16, mem_len=32),
        checkpoint=CheckpointConfig(every_steps=75),
    )


def test_loss_falls(tmp_path: Path) -> None:
    loop.train(tiny(), tmp_path, TEXT, TEXT[:2000])
    lines = read_metrics(tmp_path / "metrics.jsonl")
    assert [line["step"] for line in lines] == list(range(1, 151))
    assert lines[0]["exact"]["loss"] > 5
    assert lines[-1]["exact"]["loss"] < 0.7
    assert lines[-1]["exact"]["valid_nll"] < 0.7


def test_a_model_without_memory_learns_from_overlapping_windows(
    tmp_path: Path,
) -> None:
    how = EvalConfig(streams=8, tgt_len=16, mem_len=0, ext_len=16)
    config = tiny(mem_len=0, num_steps=75, ext_len=16)
    config = dataclasses.replace(config, eval=how)
    loop.train(config, tmp_path, TEXT, TEXT[:2000])
    lines = read_metrics(tmp_path / "metrics.jsonl")
    assert {line["exact"]["tokens"] for line in lines} == {8 * 16}
    assert lines[-1]["exact"]["valid_nll"] < 1.5


def test_a_run_with_an_average_is_judged_by_it(tmp_path: Path) -> None:
    """By validation, and so by which checkpoint is best, and by whoever loads it."""
    config = tiny(num_steps=6, eval_every=3)
    optim = dataclasses.replace(config.optim, average="asgd", average_from=2)
    config = dataclasses.replace(config, optim=optim)
    loop.train(config, tmp_path, TEXT, TEXT[:2000])
    mesh = make_mesh(config.mesh)
    like = restore.like_params(config.model, mesh)
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


def stub_slow_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaves out validation and checkpoints, which stall the devices by nature."""

    def skip(*_: Any, **__: Any) -> dict[str, float]:
        return {"nll": 1.0}

    monkeypatch.setattr(loop, "make_evaluate", lambda *_: skip)
    monkeypatch.setattr(loop.checkpoint, "save", skip)


def test_the_loop_is_short() -> None:
    assert len(inspect.getsource(loop.train).splitlines()) <= 85


def ask_to_end(monkeypatch: pytest.MonkeyPatch, boundary: int) -> None:
    """Lets a signal have come before the boundary of that number, from 1."""
    asked = Stop()
    monkeypatch.setattr(loop, "stop", asked)
    at_boundary, count = asked.at_boundary, itertools.count(1)

    def counted() -> bool:
        asked.asked = AGAIN if next(count) == boundary else asked.asked
        return at_boundary()

    monkeypatch.setattr(asked, "at_boundary", counted)


ENDING = tiny(num_steps=6, eval_every=3)


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The workdir of a run that nobody ended."""
    folder = tmp_path_factory.mktemp("straight")
    loop.train(ENDING, folder, TEXT, TEXT[:2000])
    return folder


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
            loop.train(ENDING, tmp_path, TEXT, TEXT[:2000])
    lines = read_metrics(tmp_path / "metrics.jsonl")
    assert [line["step"] for line in lines] == steps
    assert "valid_nll" not in lines[-1]["exact"]
    loop.train(ENDING, tmp_path, TEXT, TEXT[:2000])

    exact, expected = (
        [(line["step"], line["exact"]) for line in read_metrics(run / "metrics.jsonl")]
        for run in (tmp_path, straight)
    )
    assert exact == expected
    for run in (tmp_path, straight):
        opened = open_checkpoints(run, ENDING.checkpoint, read_only=True)
        with closing(opened) as manager:
            assert manager.records[3].valid_nll == expected[2][1]["valid_nll"]


def test_a_profile_of_some_updates(tmp_path: Path) -> None:
    """With the names of the step's phases, where TensorBoard looks for it."""
    config = tiny(num_steps=6, eval_every=6)
    config = dataclasses.replace(config, run=RunConfig(profile_steps="1:3"))
    loop.train(config, tmp_path, TEXT, TEXT[:2000])
    (found,) = (tmp_path / "profile").glob("plugins/profile/*/*.xplane.pb")
    assert found.stat().st_size > 10_000


def test_the_step_names_its_phases() -> None:
    config = tiny()
    init, _, train_step = loop.make_step(config, make_mesh(config.mesh))
    streams = loop.make_streams(config.train, TEXT, slice(None))
    segments, _ = streams.batch(Position())
    text = train_step.lower(jax.eval_shape(init), segments).as_text(debug_info=True)
    for phase in ("forward_and_backward", "memory", "optimizer"):
        assert f"{phase}/" in text or f"{phase})" in text


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

    stub_slow_parts(monkeypatch)
    monkeypatch.setattr(array, "_value", property(guarded))
    loop.train(tiny(num_steps=6), tmp_path, TEXT, TEXT[:2000])
    assert len(reads) >= 6 * 8, "eight metrics of six calls"


def test_the_guard_sees_a_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test above is worth something: float() of a device array goes through it."""
    array = type(jax.numpy.zeros(1))

    def refuse(_: Any) -> None:
        raise AssertionError("read")

    monkeypatch.setattr(array, "_value", property(refuse))
    with pytest.raises(AssertionError, match="read"):
        float(jax.numpy.zeros(()))


def test_metrics_are_fetched_after_the_next_dispatch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stub_slow_parts(monkeypatch)
    calls: list[str] = []
    dispatch, fetch = loop.dispatch, loop.fetch

    def noted(name: str, call: Any) -> Any:
        def run(*arguments: Any) -> Any:
            calls.append(name)
            return call(*arguments)

        return run

    monkeypatch.setattr(loop, "dispatch", noted("dispatch", dispatch))
    monkeypatch.setattr(loop, "fetch", noted("fetch", fetch))
    loop.train(tiny(num_steps=5), tmp_path, TEXT, TEXT[:2000])
    assert calls == ["dispatch"] + ["dispatch", "fetch"] * 4 + ["fetch"]


def test_implicit_transfers_are_disallowed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def implicit(step: Any, state: Any, segments: Any) -> Any:
        return step(state, jax.tree.map(np.asarray, jax.device_get(segments)))

    stub_slow_parts(monkeypatch)
    monkeypatch.setattr(loop, "dispatch", implicit)
    with pytest.raises(Exception, match="[Dd]isallowed host-to-device"):
        loop.train(tiny(), tmp_path, TEXT, TEXT[:2000])
