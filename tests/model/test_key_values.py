"""Memories of keys and values, in order or in rings, give the results of `Memory`."""

import functools
from typing import Any

import jax
import numpy as np
import pytest

from tests.support import tiny
from txl_jax.model.fixed import lay_out
from txl_jax.model.key_values import KeyValueMemory
from txl_jax.model.memory import Memory
from txl_jax.model.ring import RingMemory

B, L, M = 3, 4, 5
UNTIED: dict[str, Any] = {"untie_r": True, "same_length_self": True}
VARIANTS: list[dict[str, Any]] = [
    {**tiny.ALL, "pre_lnorm": False},
    {**UNTIED, "same_length": True, "initial_memory": "zeros", "pre_lnorm": True},
    {"position": "rotary", "d_head": 4, "pre_lnorm": True, **tiny.MODERN},
]
OTHERS: list[dict[str, Any]] = [
    {"position": "alibi", "clamp_len": 3},
    {"clamp_len": 2, "cutoffs": (5, 9), "div_val": 2},
    {"position": "shaw", "n_position": 4},
    {"position": "shaw_biased", "n_position": 4},
    tiny.GATED,
    {**UNTIED, "same_length": True},
]


@pytest.mark.parametrize(
    "changes",
    [*VARIANTS, *(pytest.param(changes, marks=pytest.mark.long) for changes in OTHERS)],
    ids=str,
)
def test_cached_keys_and_values_equal_memory(changes: dict[str, Any]) -> None:
    """Segments with documents and padding come first, then single tokens."""
    config = tiny.config(mem_len=M, **changes)
    params = tiny.make_params(config)
    apart = lay_out(params)
    rng = np.random.default_rng(0)
    read: Any = functools.partial(tiny.apply, config, method="logits")
    memory = Memory.empty(config, B)
    empty = functools.partial(KeyValueMemory.empty, config, batch_size=B, tgt_len=L)
    kept: Any = jax.jit(empty)(params=apart)
    for s in range(4):
        tokens_BL = tiny.make_tokens(B, L, 10 + s)
        more: dict[str, Any] = {
            "length_B": np.roll(np.array([L, 2, 0], np.int32), s),
            "first_BL": rng.random((B, L)) < 0.2,
        }
        if config.initial_memory == "zeros":
            more["first_BL"][:, 1:] = False
        expected_BLV, memory = read(params, tokens_BL, memory, **more)
        logits_BLV, kept = read(apart, tokens_BL, kept, **more)
        real_BL1 = (np.arange(L) < more["length_B"][:, None])[..., None]
        tiny.assert_close(
            np.where(real_BL1, logits_BLV, 0), np.where(real_BL1, expected_BLV, 0)
        )
        np.testing.assert_array_equal(kept.filled_B, memory.filled_B)
    projected: Any = jax.jit(KeyValueMemory.of, static_argnums=(0, 3))(
        config, apart, memory, L
    )
    for n, layer in enumerate(kept.layers):
        for b, start in enumerate(layer.start_B):
            for name in ("k_HBKA", "v_HBKA"):
                tiny.assert_close(
                    getattr(projected.layers[n], name)[:, b, L:],
                    getattr(layer, name)[:, b, start : start + M],
                )
    ring: Any = jax.jit(functools.partial(RingMemory.of, config))(apart, projected)
    for s in range(ring.rings[0].k_BHAM.shape[3] + 2):  # once around the ring
        token_B1 = tiny.make_tokens(B, 1, 30 + s)
        more = {"first_BL": rng.random((B, 1)) < 0.1}
        if config.initial_memory == "zeros":
            more = {}
        expected_B1V, memory = read(params, token_B1, memory, **more)
        logits_B1V, ring = read(apart, token_B1, ring, **more)
        tiny.assert_close(logits_B1V, expected_B1V)
        np.testing.assert_array_equal(ring.filled_B, memory.filled_B)


def test_a_memory_for_other_calls_is_refused() -> None:
    params = lay_out(tiny.make_params(tiny.CONFIG))
    memory = KeyValueMemory.empty(tiny.CONFIG, params, B, tgt_len=L)
    tokens_BL = tiny.make_tokens(B, L - 1)
    with pytest.raises(ValueError, match="for calls of 4 tokens"):
        tiny.apply(tiny.CONFIG, params, tokens_BL, memory)
