"""Every position scheme, with its memory or without, learns a text of positions.

Dims: S segments, B streams, L segment, P tokens of a period.
"""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tests.support import tiny
from tests.support.training import train
from txl_jax.update.init import init_params

B, L, S, P = 8, 8, 60, 5
LEARNED = 0.7  # nats

# `test_published_models` trains the paper's, `test_gradients` compares more gradients.
LEARNED_PLACES: dict[str, Any] = {"position": "learned", "n_position": L, "mem_len": 0}
OTHERS: list[dict[str, Any]] = [
    {},
    {"cutoffs": (5, 9), "div_val": 2, "untie_r": True},
    {"position": "shaw", "n_position": 12},
    {"position": "shaw_biased", "n_position": 12},
    {"position": "none"},
    {"position": "rotary", "d_head": 4},
    {"position": "alibi"},
    {"norm": "rms", "feed_forward": "swiglu", "qk_norm": True},
    {"position": "sinusoidal", "mem_len": 0},
    tiny.GATED,
    tiny.T5,
    tiny.SAME,
    {**tiny.COMPRESSED, "compression": "conv", "mem_len": 4},
    {**tiny.TOKENS, "mem_len": 0},
]


@pytest.mark.parametrize(
    "changes",
    [
        LEARNED_PLACES,
        *(pytest.param(changes, marks=pytest.mark.long) for changes in OTHERS),
    ],
    ids=str,
)
def test_loss_falls(changes: dict[str, Any]) -> None:
    """Each stream repeats its own P tokens."""
    sizes = {"d_model": 32, "n_head": 2, "d_head": 16, "d_inner": 64, "mem_len": L}
    config = tiny.config(**{**sizes, "init_std": 0.1, "proj_init_std": 0.1, **changes})
    key = jax.random.key(0, impl="rbg")  # compiles fastest
    params: Any = nn.unbox(jax.jit(lambda: init_params(config, key))())
    text_BP = np.random.default_rng(0).integers(0, tiny.V, (B, P))
    text_BT = np.tile(text_BP, (1, S * L // P + 1))[:, : S * L + 1]
    metrics = train(
        config, params, optax.scale_by_adam(), lambda _: jnp.asarray(0.01), text_BT, L
    )
    loss = np.asarray(metrics["loss"])
    # Tokens drawn evenly leave log(V) = 2.48 nats.
    assert loss[0] > 2.2
    assert loss[-10:].mean() < LEARNED
