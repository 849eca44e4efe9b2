"""A bad update is skipped for good: it changes no parameter, moment or average."""

import dataclasses
from pathlib import Path

import jax
import numpy as np
import pytest

from tests.support import tiny
from tests.support.trained import EXPERIMENT, TEXT, command
from tests.update.test_step import (
    DROPOUT,
    ONE_STEP,
    SCHEDULE,
    B,
    G,
    make_segments,
    make_state,
    numbers,
    of_update,
    poison_memory,
)
from txl_jax import train
from txl_jax.errors import BadNumbers
from txl_jax.model.memory import Memory
from txl_jax.report.metrics_log import read_metrics
from txl_jax.update.state import TrainState
from txl_jax.update.step import REASONS
from txl_jax.workdir import load

pytestmark = pytest.mark.promise("Non-finite updates are never applied")

MADE, LOSS, GRADIENT = range(len(REASONS))


def skipped(state: TrainState, count: int = 1) -> TrainState:
    """Returns the state after updates that are skipped."""
    empty = Memory.empty(DROPOUT, B)
    return dataclasses.replace(state, memory=empty, step=state.step + count)


def test_no_bad_update_is_applied_however_many() -> None:
    """Skipped updates count for the schedule, not for the optimizer or the average."""
    # The first of them begins no document, so it reads the memory.
    segments = jax.tree.map(lambda x: np.roll(x, -1, axis=0), make_segments(2 * G))
    first, second = of_update(segments, 0), of_update(segments, 1)
    state, _ = ONE_STEP(make_state(DROPOUT), first)
    assert state.average.count == state.opt_state[1].count == 1
    after, metrics = ONE_STEP(poison_memory(state), first)
    assert not np.isfinite(metrics["loss"]).any()
    tiny.assert_equal(numbers(after), numbers(skipped(state)))
    params = jax.tree.map(np.copy, state.params)
    params["layers"]["feed_forward"]["in"]["bias"][1, 0] = np.inf
    broken, rates = dataclasses.replace(after, params=params), []
    for n in range(1, 30):
        broken, metrics = ONE_STEP(broken, second)
        assert metrics["reason"].tolist() == [LOSS]
        assert metrics["skipped_in_row"].tolist() == [n + 1]
        rates.append(metrics["lr"].item())
    np.testing.assert_allclose(rates, [SCHEDULE(s) for s in range(2, 31)], rtol=1e-6)
    repaired = dataclasses.replace(broken, params=state.params)
    tiny.assert_equal(numbers(repaired), numbers(skipped(state, 30)))
    # The next update is Adam's second, at the schedule's rate, and in the mean.
    later, metrics = ONE_STEP(repaired, second)
    expected, _ = ONE_STEP(skipped(state, 30), second)
    assert metrics["skipped_in_row"].tolist() == [0]
    tiny.assert_equal(numbers(later), numbers(expected))
    both = jax.device_get((state.params, later.params))
    made = jax.tree.map(lambda a, b: (a + b) / 2, *both)
    tiny.assert_close(later.average.params, made)
    assert later.average.count == later.opt_state[1].count == 2


def test_an_infinite_gradient_alone_is_not_applied() -> None:
    """A zero matrix hides a huge input from the loss, but not from the gradient."""
    state = make_state(DROPOUT)
    feed_forward = state.params["layers"]["feed_forward"]
    feed_forward["in"]["kernel"] *= 1e25
    feed_forward["out"]["kernel"] *= 0
    after, metrics = ONE_STEP(state, make_segments(G))
    assert np.isfinite(metrics["loss"]).all()
    assert not np.isfinite(metrics["grad_norm"]).any()
    assert metrics["reason"].tolist() == [GRADIENT]
    tiny.assert_equal(after.params, state.params)


def test_a_run_of_bad_updates_stops_with_a_good_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(train, "MOST_SKIPPED", 3)
    (tmp_path / "text.txt").write_text(TEXT)
    places = {"path": f"{tmp_path}/text.txt", "data_dir": f"{tmp_path}/data"}
    (tmp_path / "tiny.py").write_text(EXPERIMENT.format(**places, curve=""))
    # The first update makes parameters of 1e30: finite, but no later loss is.
    flags = ("model.n_layer=1", "optim.lr=1e30")
    done = command(
        *(f"--config={tmp_path}/tiny.py", f"--workdir={tmp_path}/run"),
        *(f"--config.{flag}" for flag in flags),
    )
    assert (done.status, done.out) == (BadNumbers.status, "") == (76, "")
    *_, line = done.err.splitlines()
    assert line.startswith("txl_jax: update 4 was skipped, number 3 in a row")
    assert REASONS[LOSS] in line
    assert " checkpoint 5; " in line, "the third bad one was seen a call later"

    exact = [x["exact"] for x in read_metrics(tmp_path / "run" / "metrics.jsonl")]
    assert [x["reason"] for x in exact] == [REASONS[MADE]] + [REASONS[LOSS]] * 4
    assert [x["skipped_in_row"] for x in exact] == [0, 1, 2, 3, 4]
    assert [x["loss"] for x in exact[1:]] == [None] * 4

    loaded = load.load(tmp_path / "run")
    assert loaded.step == 5
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(loaded.params))

    with pytest.raises(FloatingPointError) as caught, jax.debug_nans(True):
        command(f"--workdir={tmp_path}/run")
    assert any(Path(x.path).name == "block.py" for x in caught.traceback)
