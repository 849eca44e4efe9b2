"""Rows of a table are compared over their seeds."""

import numpy as np
import pytest

from txl_jax.paper import comparison
from txl_jax.paper.comparison import RowResult


def made(*ppl: float, longer: float = 1.0) -> RowResult:
    """Returns a row with each seed's perplexity; 32 tokens have `longer` times it."""
    nlls = [{16: float(np.log(x)), 32: float(np.log(x * longer))} for x in ppl]
    return comparison.summarize(nlls, 16)


def test_the_best_length_is_the_shortest_that_reaches_the_best() -> None:
    nlls = [{16: np.log(30.0), 32: np.log(20.0), 48: np.log(19.999), 64: np.log(21.0)}]
    result = comparison.summarize(nlls, 16)
    assert result.best_attention_tokens == 32
    assert result.ppl_init.mean == pytest.approx(30)
    assert result.ppl_best.mean == pytest.approx(20)
    assert result.gain.mean == pytest.approx(10)


@pytest.mark.parametrize(
    ("shaw", "verdict"),
    [
        ((10.0, 10.5, 10.6), "no difference"),  # by 0, 0.3 and 0.2
        ((10.2, 10.4, 10.5), "as the paper"),  # by 0.2, 0.2 and 0.1
        ((9.8, 10.0, 10.2), "against the paper"),
        ((11.0,), "one seed, so no spread"),
    ],
)
def test_costs_beyond_the_spread_count(shaw: tuple[float, ...], verdict: str) -> None:
    """Runs of the same seed are compared, although seeds differ by 0.4."""
    ours = (10.0, 10.2, 10.4)[: len(shaw)]
    results = {"wt103_128m": made(*ours), "wt103_shaw": made(*shaw)}
    compared = comparison.compare("6", results)[0]
    assert compared.verdict == verdict
    assert compared.cost == pytest.approx(np.mean(shaw) - np.mean(ours))


def test_a_row_is_compared_with_its_nearest_ancestor() -> None:
    one, other = made(10.0, 10.1), made(12.0, 12.1)
    rows = {"wt103_no_recurrence": one, "wt103_vaswani": other}
    compared = comparison.compare("6", rows)
    assert compared[0].what == "`wt103_vaswani` instead of `wt103_no_recurrence`"
    assert compared[0].cost == pytest.approx(2.0)
    assert compared[0].paper == pytest.approx(30.97 - 29.02)


def test_longer_attention_is_compared_within_each_run() -> None:
    # The seeds differ by more than the 2 % that each gains.
    compared = comparison.compare("6", {"wt103_128m": made(10.0, 12.0, longer=0.98)})
    assert compared[0].cost == pytest.approx(-0.22)
    assert compared[0].spread == pytest.approx(0.04)
    assert compared[0].verdict == "as the paper"
    none = comparison.compare("6", {"wt103_128m": made(10.0, 12.0, longer=1.1)})
    assert none[0].verdict == "no difference"
