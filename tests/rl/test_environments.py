"""The rules and observations of the environments."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.rl import environments
from experiments.rl.environments import BUMP, ENVIRONMENTS, Environment
from experiments.rl.gymnax_adapter import adapt
from txl_jax.errors import UserError

FORWARD, UP, DOWN = 0, 1, 2
KEY = jax.random.key(0)


def run(env: Environment, actions: list[int], state: Any) -> list[tuple[Any, ...]]:
    """Returns (seen, reward, over) of each action."""
    step, rows = jax.jit(env.step), []
    for action in actions:
        state, seen_X, reward, over = step(KEY, state, jnp.asarray(action))
        rows.append((seen_X.tolist(), round(float(reward), 6), bool(over)))
    return rows


@pytest.mark.parametrize("cue", [0, 1])
def test_the_arm_of_the_cue_is_rewarded(cue: int) -> None:
    env = environments.t_maze(2)
    start = environments.Maze(jnp.asarray(cue), jnp.asarray(0))
    sign = 2.0 * cue - 1
    rows = run(env, [UP, FORWARD, FORWARD, FORWARD, UP], start)
    assert rows[0] == ([sign, 0], BUMP, False), "the cue is seen at the start only"
    assert rows[1] == ([0, 0], 0, False)
    assert rows[2] == ([0, 1], 0, False), "the junction"
    assert rows[3] == ([0, 1], BUMP, False)
    assert rows[4][1:] == (-sign, True)
    assert run(env, [FORWARD, FORWARD, DOWN], start)[-1][1:] == (sign, True)


def test_the_goal_of_a_room_is_seen_when_near_and_stays() -> None:
    env = environments.search(4)
    goal, right = 7, 3
    start = environments.Room(jnp.asarray(goal), jnp.asarray(5), jnp.asarray(0))
    rows = run(env, [right, right, right, right], start)
    # In row 1, column 1: the goal is one cell to the right.
    assert np.flatnonzero(rows[0][0]).tolist() == [1, 5 + 1, 10 + 5]
    assert [row[1] for row in rows[:2]] == [0, 1]
    assert [row[2] for row in rows] == [False, False, False, True]
    assert rows[1][0] != rows[0][0], "the agent is elsewhere"
    # A wall stops the agent.
    start = start._replace(cell=jnp.asarray(4))
    assert np.flatnonzero(run(env, [right], start)[0][0])[:2].tolist() == [0, 5 + 4]


def test_a_card_is_named_two_steps_later() -> None:
    """A short episode by hand: its last four cards, of which two are never named."""
    env = environments.repeat_previous(3)
    share = round(1 / (52 - 3), 6)
    left_S, newest_K = jnp.array([0.0, 1, 0, 2]), jnp.array([3, 0, 2])
    last = environments.Deck(left_S, newest_K)
    rows = run(env, [3, 3, 2], last)
    assert [row[1:] for row in rows[:2]] == [(share, False), (-share, False)]
    assert rows[2][1:] == (share, True), "the deck is empty"
    suits = sorted(int(np.argmax(row[0])) for row in rows)
    assert suits == [1, 3, 3] and all(sum(row[0]) == 1 for row in rows)
    first = environments.Deck(jnp.array([13.0, 12, 13, 13]), jnp.array([0, 0, 1]))
    assert [row[1] for row in run(env, [0, 0, 0], first)[:2]] == [0, 0]


@pytest.mark.parametrize(("length", "cards"), [(4, 52), (32, 104), (64, 156)])
def test_repeating_cards_earns_one_in_all_published_difficulties(
    length: int, cards: int
) -> None:
    """As in POPGym: an episode deals whole decks, in cards - 1 steps."""
    env = environments.repeat_previous(length)
    right, wrong = (
        jax.jit(jax.vmap(lambda key, shift=shift: episode(env, length, key, shift)))(
            jax.random.split(KEY, 8)
        )
        for shift in (0, 1)
    )
    for (seen_BTS, return_B, over_BT), total in ((right, 1), (wrong, -1)):
        assert over_BT.sum(axis=1).tolist() == [1] * 8 and over_BT[:, -1].all()
        assert seen_BTS.shape == (8, cards, 4)
        np.testing.assert_array_equal(seen_BTS.sum(axis=1), cards // 4)
        np.testing.assert_allclose(return_B, total, rtol=1e-5)
    np.testing.assert_array_equal(right[0], wrong[0])  # actions change no card
    assert len(np.unique(right[0], axis=0)) == 8, "two episodes have one order"


def episode(env: Environment, length: int, key: Any, shift: int) -> tuple[Any, ...]:
    """Returns (seen_TS, return, over_T) of naming every card, or its neighbor."""
    keys = jax.random.split(key, 52 * (1 + length // 32))
    state, seen_X = env.begin(keys[0])

    def step(state: Any, key: Any) -> Any:
        action = (state.newest_K[0] + shift) % 4
        state, seen_X, reward, over = env.step(key, state, action)
        return state, (seen_X, reward, over)

    _, (seen_TX, reward_T, over_T) = jax.lax.scan(step, state, keys[1:])
    return jnp.vstack([seen_X, seen_TX]), reward_T.sum(), over_T


@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_episodes_begin_at_random(name: str) -> None:
    env = ENVIRONMENTS[name](5)
    state, seen_BX = jax.vmap(env.begin)(jax.random.split(KEY, 64))
    assert seen_BX.shape == (64, env.observed)
    assert len(np.unique(seen_BX, axis=0)) > 1
    actions_B = jnp.arange(64) % env.actions
    after = jax.vmap(env.step)(jax.random.split(KEY, 64), state, actions_B)
    same = jax.tree.map(lambda a, b: a.dtype == b.dtype, state, after[0])
    assert jax.tree.all(same), "a scan needs the same types"


def test_a_chain_of_gymnax_rewards_the_bit_that_it_showed() -> None:
    pytest.importorskip("gymnax", reason="pip install -e '.[gymnax]'")
    env = adapt("MemoryChain-bsuite")
    assert (env.observed, env.actions) == (3, 2)
    step = jax.jit(env.step)
    rewards = set()
    for seed in range(4):
        state, seen_X = env.begin(jax.random.key(seed))
        bit, rows = int(seen_X[-1] > 0), []
        for _ in range(6):
            state, seen_X, reward, over = step(jax.random.key(9), state, jnp.asarray(1))
            rows.append((float(reward), bool(over)))
        assert rows == [(0.0, False)] * 5 + [(2.0 * bit - 1, True)]
        assert seen_X.shape == (3,) and seen_X.dtype == reward.dtype == jnp.float32
        rewards.add(rows[-1][0])
    assert rewards == {-1.0, 1.0}, "both bits occurred"
    with pytest.raises(UserError, match="did you mean 'MemoryChain-bsuite'"):
        adapt("MemoryChain")
    with pytest.raises(UserError, match="no discrete actions"):
        adapt("Pendulum-v1")
