"""Every position scheme, with its memory or without, learns what needs positions.

Dims: S segments, B streams, L segment.
"""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tests.support import tiny
from txl_jax.data.streams import Segment
from txl_jax.model.memory import Memory
from txl_jax.model.txl import TransformerXL
from txl_jax.update.init import init_params
from txl_jax.update.options import TrainConfig
from txl_jax.update.state import TrainState
from txl_jax.update.step import make_train_step

B, L, S = 8, 8, 60
PERIOD = 5
LEARNED = 0.7  # nats


def make_segments() -> Segment:
    """Returns text that repeats its last PERIOD tokens, each stream its own."""
    rng = np.random.default_rng(0)
    cycle_BP = rng.integers(0, tiny.V, (B, PERIOD))
    text_BT = np.tile(cycle_BP, (1, S * L // PERIOD + 2))[:, : S * L + 1]
    text_BT = text_BT.astype(np.int32)
    inputs_SBL, targets_SBL = (
        np.moveaxis(x.reshape(B, S, L), 1, 0) for x in (text_BT[:, :-1], text_BT[:, 1:])
    )
    first_SBL = np.zeros((S, B, L), bool)
    first_SBL[0, :, 0] = True
    weights_SBL = np.ones((S, B, L), np.float32)
    return Segment(
        inputs_SBL, targets_SBL, weights_SBL, first_SBL, np.full((S, B), L, np.int32)
    )


SCHEMES: list[dict[str, Any]] = [
    {"cutoffs": (5, 9), "div_val": 2, "untie_r": True},
    {"position": "shaw_biased", "n_position": 12},
    {"position": "learned", "n_position": L, "mem_len": 0},
    {"position": "sinusoidal_repeated"},
]
OTHERS: list[dict[str, Any]] = [
    {},
    {"position": "shaw", "n_position": 12},
    {"position": "none"},
    {"position": "sinusoidal", "mem_len": 0},
]


@pytest.mark.parametrize(
    "changes",
    [*SCHEMES, *(pytest.param(changes, marks=pytest.mark.long) for changes in OTHERS)],
    ids=str,
)
def test_loss_falls(changes: dict[str, Any]) -> None:
    sizes = {"d_model": 32, "n_head": 2, "d_head": 16, "d_inner": 64, "mem_len": L}
    config = tiny.config(**{**sizes, "init_std": 0.1, "proj_init_std": 0.1, **changes})
    optimizer = optax.scale_by_adam()
    how = TrainConfig(
        batch_size=B, tgt_len=L, segments_per_call=S, num_steps=S, eval_every=S
    )
    step = tiny.jit(
        make_train_step(
            TransformerXL(config), optimizer, lambda _: jnp.asarray(0.01), how
        )
    )
    params: Any = nn.unbox(init_params(config, jax.random.key(0)))
    state = TrainState(
        step=jnp.zeros((), jnp.int32),
        params=params,
        opt_state=optimizer.init(params),
        memory=Memory.empty(config, B),
        rng=jax.random.key(1),
    )
    _, metrics = step(state, make_segments())
    loss = np.asarray(metrics["loss"])
    # Tokens drawn evenly leave log(V) = 2.48 nats.
    assert loss[0] > 2.2
    assert loss[-10:].mean() < LEARNED
