"""Environments of gymnax keep their rules, and unknown ones are refused."""

import sys

import jax
import jax.numpy as jnp
import pytest

from experiments.rl.gymnax_adapter import adapt
from txl_jax.errors import UserError


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
    assert rewards == {-1.0, 1.0}, "both bits were shown"
    with pytest.raises(UserError, match="did you mean 'MemoryChain-bsuite'"):
        adapt("MemoryChain")
    with pytest.raises(UserError, match="no discrete actions"):
        adapt("Pendulum-v1")


def test_a_missing_gymnax_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gymnax", None)
    with pytest.raises(UserError, match=r"pip install 'txl_jax\[gymnax\]'"):
        adapt("MemoryChain-bsuite")
