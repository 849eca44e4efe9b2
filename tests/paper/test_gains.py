"""RECL by hand, and of n-gram models, whose RECL is their order.

Dims: I models, C contexts, T positions.
"""

import math

import numpy as np
import pytest

from txl_jax.paper.gains import gains, hardest, recl

# Two models, three contexts, two positions. b(c, t): [2, 1], [1, 1], [1, 0.5].
HAND_ICT = np.array(
    [[[3.0, 1.0], [1.0, 2.0], [1.0, 2.0]], [[2.0, 2.0], [2.0, 1.0], [1.5, 0.5]]]
)


def test_gains_by_hand() -> None:
    baseline_C, gain_IC = gains(HAND_ICT, 1.0)
    np.testing.assert_allclose(baseline_C, np.exp([1.5, 1.0]))
    # The second model's 2.0 at position 0 is no worse than the best before.
    absolute = [[math.exp(1.5) - math.e, 0], [0, math.e - math.exp(0.75)]]
    np.testing.assert_allclose(gain_IC, absolute, atol=1e-15)


def test_only_the_hardest_positions_count() -> None:
    baseline_C, gain_IC = gains(HAND_ICT, 0.5)
    # At context 1 position 0 is the hardest; at context 2 both are 1 and it is first.
    np.testing.assert_allclose(baseline_C, np.exp([2.0, 1.0]))
    absolute = [[math.exp(2.0) - math.e, 0.0], [0.0, 0.0]]
    np.testing.assert_allclose(gain_IC, absolute, atol=1e-15)
    b_T = np.array([0.5, 3.0, 1.0, 3.0, 2.0, 0.1, 0.2, 0.3, 0.4, 0.6])
    assert hardest(b_T, 0.5).tolist() == [1, 3, 4, 2, 9]
    assert hardest(b_T, 1.0).tolist() == [1, 3, 4, 2, 9, 0, 8, 7, 6, 5]
    assert hardest(b_T[:3], 0.1).tolist() == [1]


def lengths(
    nll_ICT: np.ndarray, contexts: list[int], ratio: float = 1.0
) -> list[tuple[int, bool]]:
    baseline_C, gain_IC = gains(nll_ICT, ratio)
    return [recl(gain_C, contexts) for gain_C in gain_IC / baseline_C]


def test_recl_is_the_first_context_without_a_gain() -> None:
    assert lengths(HAND_ICT, [100, 200, 300]) == [(200, True), (100, True)]
    # The second model's later gain, at 200, does not count.
    assert lengths(HAND_ICT[1:], [100, 200, 300]) == [(300, False)]


@pytest.mark.parametrize("nll, expected", [(1 - 0.0102, 200), (1 - 0.0098, 100)])
def test_the_threshold_is_on_the_relative_gain(nll: float, expected: int) -> None:
    # 1 - exp(-0.0102) is 1.01 %, 1 - exp(-0.0098) is 0.98 %.
    nll_ICT = np.array([[[1.0], [nll], [nll]]])
    assert lengths(nll_ICT, [100, 200, 300]) == [(expected, True)]
