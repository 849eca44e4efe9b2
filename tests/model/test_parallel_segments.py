"""Several segments in one call give the results of one after the other.

Dims: B streams, S segments of L tokens, T = S L tokens of the call under test.
"""

import functools
from typing import Any

import numpy as np
import pytest

from tests.support import tiny
from txl_jax.model.fixed import lay_out
from txl_jax.model.key_values import KeyValueMemory
from txl_jax.model.memory import Memory

B = 3
SIZES = [(3, 4), (5, 2), (2, 7), (4, 3)]  # S and L
VARIANTS: list[dict[str, Any]] = [
    {"mem_len": 5},
    {"mem_len": 2, "same_length": True, "same_length_self": True},
    {"mem_len": 17, "kernel": "chunked", **tiny.ALL},
    {"mem_len": 9, "clamp_len": 3, "initial_memory": "zeros", "untie_r": True},
    {"mem_len": 6, "position": "rotary", "d_head": 4, **tiny.MODERN},
    {"mem_len": 4, "position": "shaw_biased", "n_position": 4, "pre_lnorm": True},
    {"mem_len": 7, "position": "alibi"},
    {"mem_len": 0},
]


KINDS = ["states", "keys and values", "windows"]
CASES = [(changes, KINDS[i % 3], *SIZES[i % 4]) for i, changes in enumerate(VARIANTS)]


@pytest.mark.parametrize(
    "changes, kind, S, L",
    CASES,
    ids=str,
)
def test_segments_of_one_call_match_many(
    changes: dict[str, Any], kind: str, S: int, L: int
) -> None:
    """There are two calls, with padding at the end; documents start anywhere."""
    T = S * L
    config = tiny.config(**changes)
    params = tiny.make_params(config)
    rng = np.random.default_rng(0)
    many: Any
    one: Any
    many = one = Memory.empty(config, B)
    if kind != "states":
        params = lay_out(params)
        empty = functools.partial(KeyValueMemory.empty, config, params, B)
        many, one = empty(T, window_len=L if kind == "windows" else 0), empty(L)
    read = functools.partial(tiny.apply, config, params, method="__call__")
    for length_B in ([T] * B, [T, L + 1, 0]):
        tokens_BT = tiny.make_tokens(B, T, len(length_B))
        first_BT = rng.random((B, T)) < 0.15
        if config.initial_memory == "zeros":
            first_BT[:] = False
        hidden_BTD, many = read(
            tokens_BT,
            many,
            first_BL=first_BT,
            length_B=np.array(length_B, np.int32),
            segment_len=L,
        )
        for s in range(S):
            part = np.s_[:, s * L : (s + 1) * L]
            own_B = np.clip(np.array(length_B) - s * L, 0, L).astype(np.int32)
            expected_BLD, one = read(
                tokens_BT[part], one, first_BL=first_BT[part], length_B=own_B
            )
            real_BL1 = (np.arange(L) < own_B[:, None])[..., None]
            tiny.assert_close(
                np.where(real_BL1, hidden_BTD[part], 0),
                np.where(real_BL1, expected_BLD, 0),
            )
        np.testing.assert_array_equal(many.filled_B, one.filled_B)
        if kind == "states":
            tiny.assert_close(many.h_NBMD, one.h_NBMD)
