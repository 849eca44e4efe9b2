"""No token depends on a later one, on another stream, or on padding.

Dims: B streams, L segment, T = 2 L tokens.
"""

from typing import Any

import numpy as np
import pytest

from tests.reference import Array
from tests.support import tiny
from txl_jax.model.memory import Memory

B, L = 2, 6
with_all_settings = pytest.mark.parametrize(
    "settings",
    [tiny.ALL, *(pytest.param(x, marks=pytest.mark.long) for x in ({}, tiny.KINDS))],
    ids=str,
)


def read_nll(settings: dict[str, Any], tokens_BT: Array, **more: Any) -> Any:
    """Returns the nll_BT of each token's successor, and the memory."""
    config = tiny.config(**settings)
    params = tiny.make_params(config)
    memory, pieces = Memory.empty(config, B), []
    for begin in (0, L):
        inputs_BL = tokens_BT[:, begin : begin + L]
        targets_BL = tokens_BT[:, begin + 1 : begin + L + 1]
        nll_BL, memory = tiny.apply(
            config, params, inputs_BL, targets_BL, memory, method="nll", **more
        )
        pieces.append(nll_BL)
    return np.concatenate(pieces, axis=1), memory


@with_all_settings
def test_later_tokens_change_no_bit_of_earlier_likelihoods(
    settings: dict[str, Any],
) -> None:
    tokens_BT = tiny.make_tokens(B, 2 * L + 1)
    before_BT, _ = read_nll(settings, tokens_BT)
    for changed in (2, L, L + 3):
        other_BT = tokens_BT.copy()
        other_BT[:, changed:] = (other_BT[:, changed:] + 1) % tiny.V
        after_BT, _ = read_nll(settings, other_BT)
        # Position changed - 1 already has another target.
        same_BT = after_BT == before_BT
        assert same_BT[:, : changed - 1].all()
        assert not same_BT[:, changed - 1 :].any()


@with_all_settings
def test_streams_never_meet(settings: dict[str, Any]) -> None:
    tokens_BT = tiny.make_tokens(B, 2 * L + 1)
    other_BT = tokens_BT.copy()
    other_BT[1] = (other_BT[1] + 1) % tiny.V
    before_BT, before = read_nll(settings, tokens_BT)
    after_BT, after = read_nll(settings, other_BT)
    np.testing.assert_array_equal(after_BT[0], before_BT[0])
    np.testing.assert_array_equal(after.h_NBMD[:, 0], before.h_NBMD[:, 0])
    assert (after_BT[1] != before_BT[1]).all()


@with_all_settings
def test_padding_changes_nothing(settings: dict[str, Any]) -> None:
    """Tokens read after it do not change either: it never enters the memory."""
    length_B = np.array([L - 2, L], np.int32)
    padding_T = np.arange(2 * L + 1) % L >= L - 2
    tokens_BT = tiny.make_tokens(B, 2 * L + 1)
    other_BT = tokens_BT.copy()
    other_BT[0] = np.where(padding_T, (other_BT[0] + 1) % tiny.V, other_BT[0])
    before_BT, before = read_nll(settings, tokens_BT, length_B=length_B)
    after_BT, after = read_nll(settings, other_BT, length_B=length_B)
    scored_T = ~padding_T[:-1] & ~padding_T[1:]  # tokens with unchanged targets
    np.testing.assert_array_equal(after_BT[0, scored_T], before_BT[0, scored_T])
    np.testing.assert_array_equal(after_BT[1], before_BT[1])
    np.testing.assert_array_equal(after.filled_B, before.filled_B)
    np.testing.assert_array_equal(after.h_NBMD, before.h_NBMD)


@pytest.mark.parametrize(
    "settings",
    [tiny.KINDS, *(pytest.param(x, marks=pytest.mark.long) for x in ({}, tiny.ALL))],
    ids=str,
)
def test_a_document_sees_nothing_before_it(settings: dict[str, Any]) -> None:
    """No bit depends on earlier documents, in memory or in the same segment."""
    config = tiny.config(**settings)
    params, start = tiny.make_params(config), L + 2
    tokens_BT = tiny.make_tokens(B, 3 * L)
    other_BT = tokens_BT.copy()
    other_BT[:, :start] = (other_BT[:, :start] + 1) % tiny.V

    def read(tokens_BT: Array) -> Array:
        memory, pieces = Memory.empty(config, B), []
        for begin in range(0, 3 * L, L):
            first_BL = np.broadcast_to(np.arange(begin, begin + L) == start, (B, L))
            tokens_BL = tokens_BT[:, begin : begin + L]
            hidden_BLD, memory = tiny.apply(
                config, params, tokens_BL, memory, first_BL=first_BL
            )
            pieces.append(hidden_BLD)
        return np.concatenate(pieces, axis=1)

    same_BT = (read(tokens_BT) == read(other_BT)).all(axis=-1)
    assert same_BT[:, start:].all() and not same_BT[:, :start].any()
