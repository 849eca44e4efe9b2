"""An update reads what the rollout read, and no episode reads another."""

import dataclasses
import functools
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.rl import learning, ppo
from experiments.rl.agent import Agent, make_agent, read_window
from tests.support import tiny
from tests.support.refusal import contents, refusal, refused
from txl_jax.errors import BadNumbers, UserError
from txl_jax.sharding.mesh import make_mesh
from txl_jax.sharding.options import MeshConfig
from txl_jax.update.state import Average

TINY = ppo.Options(
    length=3, d_model=8, mem_len=5, streams=16, steps=12, segment_len=3, minibatches=2,
    epochs=1, updates=4, save_every=2,
)  # fmt: skip
KEY = jax.random.key(2)
GATED: dict[str, Any] = {"gate": "gru"}
FAST: dict[str, Any] = {"fast_weights": True}
CORES: list[Any] = [
    {},
    *(pytest.param(x, marks=pytest.mark.long) for x in (GATED, FAST, {"core": "gru"})),
]


class Played(NamedTuple):
    """Two rollouts, the streams before each, and the compiled functions."""

    options: ppo.Options
    agent: Agent
    params: Any
    play: Any  # (streams, key) -> (window, value_B, streams)
    replay: Any  # (memory, seen_BTX, window) -> (log-probability, value)
    rollouts: list[Any]


@functools.cache
def played(**changes: Any) -> Played:
    """Returns two rollouts, one after the other."""
    options = dataclasses.replace(TINY, **changes)
    env = ppo.make_environment(options)
    agent = make_agent(options, env.observed, env.actions)
    params = agent.init_params(jax.random.key(1))
    # Larger weights than initially, so that log-probabilities differ.
    params["actor"]["kernel"] *= 100.0

    @jax.jit
    def play(streams: Any, key: Any) -> Any:
        return learning.play(agent, env, params, streams, key, options.steps)

    @jax.jit
    def replay(memory: Any, seen_BTX: Any, window: Any) -> Any:
        logits_BTA, value_BT, _ = read_window(
            agent, params, memory, seen_BTX, window.first_BT, options.call_len
        )
        return learning.log_probability(logits_BTA, window.action_BT), value_BT

    streams, rollouts = learning.begin(agent, env, options.streams, KEY), []
    for n in range(2):
        window, _, after = play(streams, jax.random.key(3 + n))
        rollouts.append((streams, window))
        streams = after
    return Played(options, agent, params, play, replay, rollouts)


@pytest.mark.parametrize("changes", CORES, ids=str)
def test_an_update_reads_what_the_rollout_saw(changes: dict[str, Any]) -> None:
    """Step by step and in segments; the second window has a memory."""
    run = played(**changes)
    for streams, window in run.rollouts:
        outputs = run.replay(streams.memory, window.seen_BTX, window)
        assert window.first_BT[:, 1:].any() and len(np.unique(window.logp_BT)) > 9
        np.testing.assert_allclose(outputs[0], window.logp_BT, atol=tiny.FLOAT32)
        np.testing.assert_allclose(outputs[1], window.value_BT, atol=tiny.FLOAT32)


def changed(memory: Any) -> Any:
    """Returns a memory with other numbers."""
    return jax.tree.map(lambda x: x + 1 if x.dtype == jnp.float32 else x, memory)


@pytest.mark.parametrize("changes", CORES, ids=str)
def test_no_bit_of_an_episode_reaches_the_next_in_an_update(
    changes: dict[str, Any],
) -> None:
    """Other memories and observations before an episode change no output in it."""
    run = played(**changes)
    streams, window = run.rollouts[1]
    later_BT = np.logical_or.accumulate(window.first_BT.at[:, 0].set(False), axis=1)
    assert later_BT.any()
    seen_BTX = jnp.where(later_BT[..., None], window.seen_BTX, window.seen_BTX + 1)
    before = run.replay(streams.memory, window.seen_BTX, window)
    after = run.replay(changed(streams.memory), seen_BTX, window)
    for x, y in zip(before, after, strict=True):
        np.testing.assert_array_equal(np.asarray(x)[later_BT], np.asarray(y)[later_BT])
        assert (np.asarray(x) != np.asarray(y)).any(), "the earlier steps do change"


@pytest.mark.parametrize("changes", CORES, ids=str)
def test_no_bit_of_an_episode_reaches_the_next_in_a_rollout(
    changes: dict[str, Any],
) -> None:
    run = played(**changes)
    streams, _ = run.rollouts[1]
    other = streams._replace(memory=changed(streams.memory))
    start_B = np.arange(run.options.streams) % 2 == 0
    windows = [
        run.play(each._replace(first_B=jnp.asarray(start_B)), KEY)[0]
        for each in (streams, other)
    ]
    for x, y in zip(*windows, strict=True):
        np.testing.assert_array_equal(x[start_B], y[start_B])
    differ_BT = windows[0].logp_BT != windows[1].logp_BT
    assert differ_BT[~start_B].any(), "the other episodes do change"


def test_advantages_are_discounted_sums_of_errors() -> None:
    rng = np.random.default_rng(0)
    B, T = 3, 7
    reward_BT, value_BT = rng.normal(size=(2, B, T)).astype(np.float32)
    over_BT, value_B = rng.random((B, T)) < 0.3, rng.normal(size=B).astype(np.float32)
    assert over_BT.any()
    unused = dict.fromkeys(learning.Window._fields)
    known = {"value_BT": value_BT, "reward_BT": reward_BT, "over_BT": over_BT}
    window = learning.Window(**unused | known)  # type: ignore[arg-type]
    options = dataclasses.replace(TINY, discount=0.9, trace_decay=0.8)
    gain_BT = learning.advantages(window, jnp.asarray(value_B), options)
    next_BT = np.concatenate([value_BT[:, 1:], value_B[:, None]], axis=1)
    error_BT = reward_BT + 0.9 * np.where(over_BT, 0, next_BT) - value_BT
    for b in range(B):
        for t in range(T):
            end = next((u for u in range(t, T) if over_BT[b, u]), T - 1)
            terms = [(0.9 * 0.8) ** (u - t) * error_BT[b, u] for u in range(t, end + 1)]
            assert gain_BT[b, t] == pytest.approx(sum(terms), abs=1e-5)


def test_the_best_policy_is_the_one_whose_newest_episodes_returned_most() -> None:
    unused = dict.fromkeys(learning.Window._fields)
    best = Average({"w": jnp.asarray(-1.0)}, jnp.asarray(0))
    record = learning.Record(*map(jnp.asarray, (0.0, 0.0, -jnp.inf)))
    chosen = []
    for step, returns in enumerate([[], [2.0, 4.0], [], [6.0], [0.0, 0.0]]):
        return_BT = jnp.asarray([[9.0, *returns]])  # the first episode does not end
        over_BT = jnp.arange(1 + len(returns))[None] > 0
        ends = {"return_BT": return_BT, "over_BT": over_BT}
        window = learning.Window(**unused | ends)  # type: ignore[arg-type]
        params = {"w": jnp.asarray(float(step))}
        number = jnp.asarray(step)
        best, record = learning.keep_best(best, record, params, number, window)
        assert best.params["w"] == best.count or not step
        chosen.append(best.count.item())
    assert chosen == [0, 1, 1, 3, 3], "no episode ends in the windows 0 and 2"
    decayed = 0.9**2 * 2 + 1
    assert record.best.item() == pytest.approx((0.9**2 * 6 + 6) / decayed)


def test_a_run_stops_on_request_once_the_task_is_solved(tmp_path: Path) -> None:
    """The same command trains no further, and the saved policy is the reported one."""
    flags: dict[str, Any] = {"environment": "search", "solved": -1.0, "stop": True}
    options = dataclasses.replace(TINY, **flags)
    result = ppo.train(options, tmp_path)
    assert result["updates"] == result["solved_after"] == 1
    assert result["max_return"] == result["return"]
    again = ppo.train(options, tmp_path)
    names = "updates", "return", "best_return", "best_update"
    assert [again[name] for name in names] == [result[name] for name in names]
    agent, env, params = ppo.load(str(tmp_path))
    play = functools.partial(learning.evaluate, agent, env, options)
    key = jax.random.split(jax.random.key(options.seed), 3)[2]
    value = jax.jit(play)(params, jax.random.fold_in(key, options.updates)).item()
    assert value == pytest.approx(result["best_return"], abs=1e-4)
    (tmp_path / ppo.CHECKPOINTS).rename(tmp_path / "away")
    before = contents(tmp_path)
    with refused("was at update 1, and .*checkpoints has no checkpoint: mount"):
        ppo.train(options, tmp_path)
    assert contents(tmp_path) == before
    (tmp_path / "away").rename(tmp_path / ppo.CHECKPOINTS)
    (tmp_path / ppo.METRICS).write_text("")
    further = ppo.train(options, tmp_path)  # whether it was solved is lost
    counts, steps = ("updates", "steps", "solved_after"), TINY.streams * TINY.steps
    assert [further[name] for name in counts] == [2, 2 * steps, 2]
    (tmp_path / ppo.METRICS).write_text("")
    without = ppo.summarize(options, tmp_path, 2)
    assert [without[name] for name in counts] == [2, 2 * steps, None]
    assert without["max_return"] is None
    (tmp_path / ppo.OPTIONS).write_text("")
    for call in (lambda: ppo.train(options, tmp_path), lambda: ppo.load(tmp_path)):
        assert "options.json is damaged" in refusal(call)
    assert "holds no run of this program" in refusal(ppo.load, tmp_path / "other")
    assert "no such user" in refusal(ppo.load, "~no.one/run")


def killed_after_update_3(options: ppo.Options, step: int, updates: list[Any]) -> bool:
    """Ends a training between two checkpoints."""
    if step == 3:
        raise KeyboardInterrupt
    return False


@pytest.mark.long
def test_a_resumed_run_equals_one_that_was_never_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = make_mesh(MeshConfig(), jax.devices()[:1])
    monkeypatch.setattr(ppo, "make_mesh", lambda config: one)
    options = dataclasses.replace(TINY, core="gru")
    whole = ppo.train(options, tmp_path / "whole")
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(ppo, "is_over", killed_after_update_3)
        ppo.train(options, tmp_path / "parts")
    resumed = ppo.train(options, tmp_path / "parts")
    metrics = [
        [line["exact"] for line in ppo.read_metrics(tmp_path / name / ppo.METRICS)]
        for name in ("whole", "parts")
    ]
    assert metrics[0] == metrics[1] and len(metrics[0]) == 4
    names = "return", "best_return", "best_update"
    assert [whole[name] for name in names] == [resumed[name] for name in names]
    with pytest.raises(UserError, match="other values of updates, lr, seed"):
        changed = dataclasses.replace(options, lr=1.0, seed=7, updates=9)
        ppo.train(changed, tmp_path / "parts")


def test_updates_that_are_not_finite_end_the_run_and_are_not_saved(
    tmp_path: Path,
) -> None:
    options = dataclasses.replace(TINY, lr=1e30, save_every=1)
    with pytest.raises(BadNumbers, match="not finite: give a lower --lr"):
        ppo.train(options, tmp_path)
    saved = [path.name for path in tmp_path.glob("checkpoints/*")]
    assert len(saved) < options.updates
    with pytest.raises(BadNumbers):  # it resumes at the last finite update
        ppo.train(options, tmp_path)


@pytest.mark.parametrize("name", ["checkpoints", "config.json"])
def test_the_run_of_another_program_is_left_alone(name: str, tmp_path: Path) -> None:
    (tmp_path / name).mkdir()
    with pytest.raises(UserError, match="holds another program's run"):
        ppo.train(TINY, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_flags_that_do_not_fit_are_refused() -> None:
    with pytest.raises(UserError, match="steps = 12 is not divisible by segment_len x"):
        dataclasses.replace(TINY, segment_len=5)
    with pytest.raises(UserError, match="gate and fast_weights are for the"):
        dataclasses.replace(TINY, core="gru", gate="gru")
    with pytest.raises(UserError, match="set core = "):
        dataclasses.replace(TINY, core="gru", fast_weights=True)
    with pytest.raises(UserError, match="set mem_len above 0"):
        make_agent(dataclasses.replace(TINY, mem_len=0, fast_weights=True), 2, 3)


@pytest.mark.long
@pytest.mark.parametrize("changes", [{}, GATED, {"core": "gru"}], ids=str)
def test_a_maze_of_ten_steps_is_solved(changes: dict[str, Any], tmp_path: Path) -> None:
    """Without memory, the return is at most 0."""
    options = ppo.Options(updates=60, **changes)
    assert ppo.train(options, tmp_path)["solved_after"] <= 50
