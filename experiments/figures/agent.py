"""An agent with a memory per episode: actor-critic with the model as a recurrent core.

    python -m experiments.figures.agent

An episode begins with a cue, 1 or -1. After 6 to 11 steps, at a junction, the action
that fits the cue earns 1 and the other one -1. The program prints the share of
junctions that a trained agent passes rightly, with memory and without.

Dims: B streams, L steps of an update, X numbers observed, D model, A actions.
"""

import dataclasses
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from jax import Array

import txl_jax

B, L, GAMMA = 64, 8, 0.97  # streams, steps of an update, discount

Params = Any  # the agent's parameters
Episodes = tuple[Array, Array, Array]  # cue, steps until the junction, steps so far
State = tuple[Episodes, txl_jax.Memory]
# What is observed, whether an episode begins, action, reward, whether it is over.
Happened = tuple[Array, Array, Array, Array, Array]


class Agent(nn.Module):
    """The logits of two actions, and the expected return."""

    config: txl_jax.ModelConfig

    @nn.compact
    def __call__(
        self, seen_BLX: Array, first_BL: Array, memory: txl_jax.Memory
    ) -> tuple[Array, Array, txl_jax.Memory]:
        """Returns the logits, the expected return and the memory."""
        inputs_BLD = nn.Dense(self.config.d_model)(seen_BLX)
        model = txl_jax.TransformerXL(self.config)
        hidden_BLD, memory = model(
            None, memory, inputs_BLD=inputs_BLD, first_BL=first_BL
        )
        return nn.Dense(2)(hidden_BLD), nn.Dense(1)(hidden_BLD)[..., 0], memory


agent = Agent(
    txl_jax.ModelConfig(
        n_layer=2, d_model=32, n_head=2, d_head=16, d_inner=64, mem_len=16, dropout=0.0
    )
)
optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(3e-3))


def act(
    params: Params, seen_BLX: Array, first_BL: Array, memory: txl_jax.Memory
) -> tuple[Array, Array, txl_jax.Memory]:
    """Returns the logits, the expected return and the memory."""
    outputs: Any = agent.apply(params, seen_BLX, first_BL, memory)
    return outputs


def begin(key: Array) -> Episodes:
    """Returns new episodes."""
    keys = jax.random.split(key)
    cue_B = jax.random.randint(keys[0], (B,), 0, 2)
    return cue_B, jax.random.randint(keys[1], (B,), 6, 12), jnp.zeros(B, int)


def observe(episodes: Episodes) -> tuple[Array, Array]:
    """Returns what each stream observes, [B, 1, 3], and whether an episode begins."""
    cue_B, end_B, step_B = episodes
    cue_B = jnp.where(step_B == 0, 2 * cue_B - 1, 0)
    seen_BX = jnp.stack([cue_B, step_B == end_B, step_B / 10], axis=-1)
    return seen_BX[:, None], (step_B == 0)[:, None]


def play(params: Params, state: State, key: Array) -> tuple[State, Happened]:
    """Makes one step in every stream; returns the state and what happened."""
    episodes, memory = state
    keys = jax.random.split(key)
    seen_BLX, first_BL = observe(episodes)
    logits_BLA, _, memory = act(params, seen_BLX, first_BL, memory)
    action_B = jax.random.categorical(keys[0], logits_BLA[:, 0])
    cue_B, end_B, step_B = episodes
    over_B = step_B == end_B
    reward_B = over_B * jnp.where(action_B == cue_B, 1.0, -1.0)
    new_cue_B, new_end_B, new_step_B = begin(keys[1])
    episodes = (
        jnp.where(over_B, new_cue_B, cue_B),
        jnp.where(over_B, new_end_B, end_B),
        jnp.where(over_B, new_step_B, step_B + 1),
    )
    happened = seen_BLX[:, 0], first_BL[:, 0], action_B, reward_B, over_B
    return (episodes, memory), happened


def loss(
    params: Params, memory: txl_jax.Memory, happened: Happened, episodes: Episodes
) -> Array:
    """Returns the actor's and the critic's loss of L steps, and minus the entropy."""
    seen_BLX, first_BL, action_BL, reward_BL, over_BL = happened
    logits_BLA, value_BL, memory = act(params, seen_BLX, first_BL, memory)
    next_BLX, next_first_BL = observe(episodes)
    _, after_BL, _ = act(params, next_BLX, next_first_BL, memory)

    def discount(return_B: Array, step: tuple[Array, Array]) -> tuple[Array, Array]:
        reward_B, over_B = step
        return_B = reward_B + GAMMA * jnp.where(over_B, 0, return_B)
        return return_B, return_B

    steps = reward_BL.T, over_BL.T
    last_B = jax.lax.stop_gradient(after_BL[:, 0])
    _, return_LB = jax.lax.scan(discount, last_B, steps, reverse=True)
    gain_BL = return_LB.T - value_BL
    log_p_BLA = jax.nn.log_softmax(logits_BLA)
    taken_BL = jnp.take_along_axis(log_p_BLA, action_BL[..., None], axis=-1)[..., 0]
    actor = -(taken_BL * jax.lax.stop_gradient(gain_BL)).mean()
    entropy = -(jnp.exp(log_p_BLA) * log_p_BLA).sum(axis=-1).mean()
    return actor + (gain_BL**2).mean() / 2 - 0.01 * entropy


@jax.jit
def learn(
    params: Params, opt_state: optax.OptState, state: State, key: Array
) -> tuple[Params, optax.OptState, State, tuple[Array, Array]]:
    """Plays L steps and learns from them; counts the junctions passed and won."""
    memory = state[1]
    state, happened = jax.lax.scan(
        lambda state, key: play(params, state, key), state, jax.random.split(key, L)
    )
    happened = jax.tree.map(lambda x: x.swapaxes(0, 1), happened)
    grads = jax.grad(loss)(params, memory, happened, state[0])
    updates, opt_state = optimizer.update(grads, opt_state)
    *_, reward_BL, over_BL = happened
    counts = over_BL.sum(), (reward_BL > 0).sum()
    return optax.apply_updates(params, updates), opt_state, state, counts


def train(mem_len: int, updates: int = 150) -> float:
    """Returns the share of junctions passed rightly in the last 50 updates."""
    key = jax.random.key(0)
    config = dataclasses.replace(agent.config, mem_len=mem_len)
    state = begin(key), txl_jax.Memory.empty(config, B)
    seen_BLX, first_BL = observe(state[0])
    params = jax.jit(agent.init)(key, seen_BLX, first_BL, state[1])
    opt_state, counts = optimizer.init(params), []
    for number in range(updates):
        params, opt_state, state, count = learn(
            params, opt_state, state, jax.random.fold_in(key, number)
        )
        counts.append(count)
    passed, won = jnp.array(counts[-50:]).sum(axis=0)
    return float(won / passed)


if __name__ == "__main__":
    print(f"with memory {train(16):.2f}, without {train(0):.2f}")
