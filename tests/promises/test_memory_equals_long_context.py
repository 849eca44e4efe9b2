"""With memory, segments give the results of one long text, up to a known reach.

Dims: B streams, T tokens, L segment, M memory, N layers, D model.
"""

from typing import Any

import numpy as np
import pytest

from tests.reference import Array
from tests.support import tiny
from txl_jax.model.config import ModelConfig
from txl_jax.model.memory import Memory

B, T = 2, 12

CASES: list[tuple[int, dict[str, Any]]] = [
    (1, {"pre_lnorm": True, "untie_r": True, "clamp_len": 3}),
    (4, {"position": "rotary", "d_head": 4}),
    (3, {"mem_len": 4, "same_length": True}),  # each layer's own memory is enough
]


@pytest.mark.parametrize(
    ("tgt_len", "settings"),
    CASES,
    ids=str,
)
def test_segments_with_enough_memory_equal_one_pass(
    tgt_len: int, settings: dict[str, Any]
) -> None:
    config = tiny.config(**{"mem_len": T, **settings})
    params, tokens_BT = tiny.make_params(config), tiny.make_tokens(B, T)
    expected = tiny.read(config, params, tokens_BT, T)
    tiny.assert_close(tiny.read(config, params, tokens_BT, tgt_len), expected)


@pytest.mark.parametrize("before", [6, pytest.param(1001, marks=pytest.mark.long)])
@pytest.mark.parametrize("settings", [{}, {"position": "rotary", "d_head": 4}], ids=str)
def test_relative_positions_are_translation_invariant(
    settings: dict[str, Any], before: int
) -> None:
    """A document has the same results after another, wherever segments divide it."""
    config = tiny.config(mem_len=T, **settings)
    params, tokens_BT = tiny.make_params(config), tiny.make_tokens(B, T)

    def read(tokens_BT: Array, start: int) -> Array:
        first_BT = np.broadcast_to(
            np.arange(tokens_BT.shape[1]) == start, tokens_BT.shape
        )
        memory, hidden = Memory.empty(config, B), []
        for i in range(0, tokens_BT.shape[1], 4):
            part = slice(i, i + 4)
            hidden_BLD, memory = tiny.apply(
                config, params, tokens_BT[:, part], memory, first_BL=first_BT[:, part]
            )
            hidden.append(hidden_BLD)
        return np.concatenate(hidden, axis=1)[:, start:]

    moved_BT = np.concatenate([tiny.make_tokens(B, before, 9), tokens_BT], axis=1)
    tiny.assert_close(read(moved_BT, before), read(tokens_BT, 0))


def depends_T(config: ModelConfig, tgt_len: int) -> Array:
    """Returns whether the last token's output depends on each token, bool.

    Every token is changed in its own stream, and nothing else there.
    """
    params = tiny.make_params(config)
    tokens_BT = np.repeat(tiny.make_tokens(1, T), T, axis=0)
    other_BT = (tokens_BT + np.eye(T, dtype=np.int32)) % tiny.V
    before_BTD, _ = tiny.read(config, params, tokens_BT, tgt_len)
    after_BTD, _ = tiny.read(config, params, other_BT, tgt_len)
    return (after_BTD[:, -1] != before_BTD[:, -1]).any(axis=-1)


def oldest_read(position: int, n_layer: int, tgt_len: int, mem_len: int) -> int:
    """Returns the oldest token that n layers reach from a position (section 3.2).

    A layer sees mem_len tokens before its segment. For the oldest of those, the layer
    below saw as many before the segment in which that token was read.
    """
    if not n_layer:
        return position
    begin = position - position % tgt_len
    return oldest_read(max(0, begin - mem_len), n_layer - 1, tgt_len, mem_len)


@pytest.mark.parametrize(
    ("n_layer", "tgt_len", "mem_len"),
    [(3, 2, 2), (2, 1, 3)],
)
def test_reach_grows_by_the_memory_in_every_layer(
    n_layer: int, tgt_len: int, mem_len: int
) -> None:
    config = tiny.config(n_layer=n_layer, mem_len=mem_len)
    oldest = oldest_read(T - 1, n_layer, tgt_len, mem_len)
    if tgt_len == mem_len:
        # The paper's O(N x L): N memories before the segment.
        assert oldest == T - tgt_len - n_layer * mem_len
    assert oldest > 0
    expected_T = np.arange(T) >= oldest
    np.testing.assert_array_equal(depends_T(config, tgt_len), expected_T)


def test_reach_with_same_length_is_the_same_for_every_token() -> None:
    config = tiny.config(n_layer=3, mem_len=3, same_length=True, same_length_self=True)
    expected_T = np.arange(T) >= T - 1 - 3 * 3
    np.testing.assert_array_equal(depends_T(config, 3), expected_T)
