"""Bad updates are skipped for good, in all that they would change, and never made.

Dims: S segments in a call, U updates in a call, B streams.
"""

import dataclasses
import json
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support import tiny
from tests.support.trained import EXPERIMENT, TEXT, Done, command
from tests.update.test_step import (
    ADAM,
    AVERAGE,
    DROPOUT,
    ONE_STEP,
    SCHEDULE,
    B,
    make_config,
    make_segments,
    make_state,
    make_step,
    numbers,
    only,
)
from txl_jax.checkpoint.manager import open_checkpoints
from txl_jax.checkpoint.options import CheckpointConfig
from txl_jax.errors import BadNumbers
from txl_jax.model.memory import Memory
from txl_jax.model.txl import TransformerXL
from txl_jax.report.log import read_metrics
from txl_jax.runtime.options import MeshConfig
from txl_jax.sharding import make_mesh, place_segments
from txl_jax.update.guard import DECAY, REASONS, WARM_UPDATES, Guard
from txl_jax.update.init import init_state
from txl_jax.update.state import TrainState
from txl_jax.update.step import make_train_step
from txl_jax.workdir import load

pytestmark = pytest.mark.promise("Non-finite updates are never applied")

FACTOR = 1.2
LIMIT = {"max_loss_factor": FACTOR}
GUARDED = make_config(**LIMIT)
MADE, LOSS, GRADIENT, FAR = range(len(REASONS))


def adam_count(state: TrainState) -> int:
    """Returns the number of updates that Adam corrects its moments for."""
    return int(state.opt_state[1].count)


def warm(mean_loss: float) -> Guard:
    """Returns a guard that judges from the first update on."""
    return Guard(jnp.float32(mean_loss), jnp.int32(1000), jnp.int32(0))


# The judgement.


def judge_all(losses: list[float], factor: float) -> tuple[list[int], Guard]:
    """Returns the reason of each update, and the guard after the last."""

    def one(state: Guard, loss: jax.Array) -> tuple[Guard, jax.Array]:
        reason, state = state.judge(loss, jnp.float32(1), factor)
        return state, reason

    state, reasons = jax.lax.scan(one, Guard.fresh(), jnp.asarray(losses, jnp.float32))
    return reasons.tolist(), state


def test_the_mean_is_plain_at_first_and_then_forgets() -> None:
    losses = np.random.default_rng(0).uniform(1, 2, WARM_UPDATES + 50)
    reasons, state = judge_all(losses.tolist(), 0)
    mean = losses[:WARM_UPDATES].mean()
    for loss in losses[WARM_UPDATES:]:
        mean = DECAY * mean + (1 - DECAY) * loss
    assert set(reasons) == {MADE}
    assert (int(state.made), int(state.skipped_in_row)) == (len(losses), 0)
    tiny.assert_close(state.mean_loss, mean)


def test_a_loss_is_judged_once_the_mean_is_warm_and_only_where_the_config_says() -> (
    None
):
    calm, nan = [2.0] * (WARM_UPDATES - 1), float("nan")
    # What is skipped does not warm the mean up, so the 5 comes one update too early.
    early = [*calm, nan, 5.0]
    assert judge_all(early, 2)[0][-2:] == [LOSS, MADE]
    late = [*calm, nan, 2.0, 3.9, 5.0, 5.0, nan, float("inf"), 3.9]
    reasons, state = judge_all(late, 2)
    assert reasons[-7:] == [MADE, MADE, FAR, FAR, LOSS, LOSS, MADE]
    assert (int(state.made), int(state.skipped_in_row)) == (WARM_UPDATES + 2, 0)
    assert 2 < float(state.mean_loss) < 2.1, "5 is not in the mean"
    assert judge_all(late[:-1], 2)[1].skipped_in_row == 4
    assert judge_all(late, 0)[0][-7:] == [MADE] * 4 + [LOSS, LOSS, MADE]


def test_a_gradient_alone_is_reason_enough() -> None:
    for norm in (np.inf, np.nan):
        reason, _ = Guard.fresh().judge(jnp.float32(1), jnp.float32(norm), 0)
        assert reason == GRADIENT


# Updates.


def test_however_many_in_a_row_none_is_made() -> None:
    """The optimizer and the average do not count it, but the schedule does."""
    segments = jax.tree.map(lambda x: x[1:], make_segments(4))
    state, _ = ONE_STEP(make_state(DROPOUT), only(segments, 0))
    assert (adam_count(state), int(state.average.count)) == (1, 1)
    params = jax.tree.map(np.copy, state.params)
    params["layers"]["feed_forward"]["in"]["bias"][1, 0] = np.inf
    after, rates = dataclasses.replace(state, params=params), []
    for n in range(40):
        after, metrics = ONE_STEP(after, only(segments, n % 3))
        assert metrics["skipped"].tolist() == [True]
        assert metrics["reason"].tolist() == [LOSS]
        assert metrics["skipped_in_row"].tolist() == [n + 1]
        rates.append(metrics["lr"].item())
    empty = Memory.empty(DROPOUT, B)
    unchanged = dataclasses.replace(
        state, params=params, memory=empty, step=jnp.asarray(41)
    )
    tiny.assert_equal(numbers(after), numbers(unchanged))
    np.testing.assert_allclose(rates, [SCHEDULE(s) for s in range(1, 41)], rtol=1e-6)
    # With finite parameters, the next update is Adam's second, at the schedule's rate.
    repaired = dataclasses.replace(after, params=state.params)
    after, metrics = ONE_STEP(repaired, only(segments, 1))
    assert metrics["skipped_in_row"].tolist() == [0]
    assert (adam_count(after), int(after.average.count)) == (2, 2)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(after.params))


def test_a_spike_of_the_loss_is_skipped_in_everything() -> None:
    """A text that is learnt by heart, and then one update with other labels."""
    segments, step = make_segments(1), make_step(DROPOUT, GUARDED)
    state = make_state(DROPOUT)
    for _ in range(WARM_UPDATES + 50):
        state, metrics = step(state, segments)
        assert not metrics["skipped"].any()
    shuffled = segments._replace(targets_SBL=(segments.targets_SBL + 5) % tiny.V)
    after, spike = step(state, shuffled)
    assert spike["loss"] > FACTOR * metrics["mean_loss"], "the test would be worthless"
    assert np.isfinite(spike["grad_norm"]).all()
    assert spike["reason"].tolist() == [FAR]
    assert spike["mean_loss"] == metrics["mean_loss"]
    empty = Memory.empty(DROPOUT, B)
    unchanged = dataclasses.replace(state, memory=empty, step=state.step + 1)
    tiny.assert_equal(numbers(after), numbers(unchanged))
    assert after.guard.made == state.guard.made == WARM_UPDATES + 50
    after, metrics = step(after, segments)
    assert metrics["reason"].tolist() == [MADE]
    assert adam_count(after) == WARM_UPDATES + 51
    # The same spike is taken by a run that does not guard against it.
    _, metrics = ONE_STEP(state, shuffled)
    assert metrics["reason"].tolist() == [MADE]


def make_decisions(devices: int) -> Callable[[float], tuple[Any, Any]]:
    """Returns a function from the mean loss to the (numbers, metrics) of four updates.

    The memory of one stream, so of one device, is not finite.
    """
    config = make_config(batch_size=16, segments_per_call=4, **LIMIT)
    mesh = make_mesh(MeshConfig(), jax.devices()[:devices])
    _, places = init_state(DROPOUT, ADAM, config.batch_size, 0, mesh, averages=True)
    step = tiny.jit(
        make_train_step(TransformerXL(DROPOUT), ADAM, SCHEDULE, config, AVERAGE),
        out_shardings=(places, None),
    )
    # The first of them begins no document, so that it reads the memory.
    segments: Any = jax.tree.map(lambda x: np.roll(x, -1, 0), make_segments(4, 16))
    segments = place_segments(mesh, segments)

    def decide(mean_loss: float) -> tuple[Any, Any]:
        state = make_state(DROPOUT, ADAM, config.batch_size, "threefry2x32")
        h_NBMD = state.memory.h_NBMD.at[:, 5].set(jnp.nan)
        memory = Memory(h_NBMD, jnp.full_like(state.memory.filled_B, DROPOUT.mem_len))
        state = dataclasses.replace(state, memory=memory, guard=warm(mean_loss))
        state, metrics = step(jax.device_put(state, places), segments)
        return jax.device_get(numbers(state)), jax.device_get(metrics)

    return decide


def test_eight_devices_decide_as_one() -> None:
    one, eight = make_decisions(1), make_decisions(8)
    losses = one(1e-3)[1]["loss"]  # of the first parameters: none is made
    assert not np.isfinite(losses[0])
    low, next_low, _ = np.sort(losses[1:])
    assert next_low - low > 0.05, "a limit between them is clear of rounding"
    limit = (low + next_low) / 2
    expected_numbers, expected = one(limit / FACTOR)
    assert set(expected["reason"].tolist()) == {MADE, LOSS, FAR}
    actual_numbers, metrics = eight(limit / FACTOR)
    for name in ("reason", "skipped", "skipped_in_row"):
        np.testing.assert_array_equal(metrics[name], expected[name])
    tiny.assert_close(actual_numbers, expected_numbers, 3 * tiny.FLOAT32)


@pytest.mark.long
@pytest.mark.exact_bits
def test_good_updates_are_those_of_a_step_that_selects_what_is_finite(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    segments, config = make_segments(2), make_config(segments_per_call=2, **LIMIT)
    state = dataclasses.replace(make_state(DROPOUT), guard=warm(1e3))

    def run() -> tuple[TrainState, Any]:
        step = make_train_step(TransformerXL(DROPOUT), ADAM, SCHEDULE, config, AVERAGE)
        return jax.jit(step)(state, segments)

    guarded, metrics = run()
    assert metrics["reason"].tolist() == [MADE] * 2

    def finite(self: Guard, loss: Any, grad_norm: Any, _: float) -> tuple[Any, Guard]:
        good = jnp.isfinite(loss) & jnp.isfinite(grad_norm)
        return jnp.where(good, MADE, LOSS), self

    monkeypatch.setattr(Guard, "judge", finite)
    expected, _ = run()
    tiny.assert_equal(numbers(guarded), numbers(expected))


# The run.


def start(folder: Path, *argv: str) -> Done:
    (folder / "text.txt").write_text(TEXT)
    places = {"path": str(folder / "text.txt"), "data_dir": str(folder / "data")}
    (folder / "tiny.py").write_text(EXPERIMENT.format(**places))
    return command(
        f"--config={folder / 'tiny.py'}", f"--workdir={folder / 'run'}", *argv
    )


def refuse_constant(name: str) -> None:
    raise AssertionError(f"{name} is not JSON")


def test_a_run_of_bad_updates_stops_with_a_good_checkpoint(tmp_path: Path) -> None:
    # The first update makes parameters of 1e30: finite, but no loss is.
    flags = ("--config.optim.lr=1e30", "--config.train.max_bad_steps=3")
    done = start(tmp_path, *flags)
    assert (done.status, done.out) == (BadNumbers.status, "") == (76, "")
    *_, line = done.err.splitlines()
    assert line.startswith("txl_jax: update 4 was skipped, number 3 in a row")
    for part in ("train.max_bad_steps = 3", REASONS[LOSS], "the output of layers[0]"):
        assert part in line
    assert line.endswith("checkpoint 5"), "the third bad one was seen a call later"

    text = (tmp_path / "run" / "metrics.jsonl").read_text()
    lines = [
        json.loads(line, parse_constant=refuse_constant) for line in text.splitlines()
    ]
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5]
    exact = [line["exact"] for line in lines]
    assert [x["skipped"] for x in exact] == [False] + [True] * 4
    assert [x["reason"] for x in exact] == [REASONS[MADE]] + [REASONS[LOSS]] * 4
    assert [x["skipped_in_row"] for x in exact] == [0, 1, 2, 3, 4]
    assert [x["loss"] for x in exact[1:]] == [None] * 4
    assert {x["mean_loss"] for x in exact} == {exact[0]["loss"]}

    loaded = load.load(tmp_path / "run")
    assert loaded.step == 5
    for leaf in jax.tree.leaves(loaded.params):
        assert np.isfinite(leaf).all()

    # The count continues where it was, so only a higher limit lets a restart proceed.
    patient = start(tmp_path, flags[0], "--config.train.max_bad_steps=6")
    assert patient.status == 76
    assert "resumed at update 5" in patient.err
    assert "update 7 was skipped, number 6 in a row" in patient.err


@pytest.mark.long
def test_a_run_that_stops_where_it_saves_anyway_saves_once(tmp_path: Path) -> None:
    """And sees the bad update at once, since a checkpoint waits for the metrics."""
    flags = ("--config.optim.lr=1e30", "--config.train.max_bad_steps=3")
    done = start(tmp_path, *flags, "--config.checkpoint.every_steps=4")
    assert done.status == 76
    assert done.err.splitlines()[-1].endswith("checkpoint 4")
    config = CheckpointConfig()
    opened = open_checkpoints(tmp_path / "run", config, read_only=True)
    with closing(opened) as manager:
        assert manager.all_steps() == [4]
    assert read_metrics(tmp_path / "run" / "metrics.jsonl")[-1]["step"] == 4
