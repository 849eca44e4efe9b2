"""Published curves beside a run's validations."""

import math

import pytest

from txl_jax.errors import UserError
from txl_jax.report import curve

NVIDIA = "wt103_nvidia"


def test_published_points_are_met_and_those_between_interpolated() -> None:
    published = curve.load(NVIDIA)
    assert published.at(5_000) == pytest.approx((42.62, 0.27))
    assert published.at(40_000) == pytest.approx((22.93, 0.06))
    ppl, spread = published.at(20_000) or (0, 0)
    assert ppl == pytest.approx(math.sqrt(32.31 * 22.93))
    assert 0.06 < spread < 0.13
    assert published.at(4_999) is None
    assert published.at(40_001) is None
    large = curve.load("wt103_nvidia_large")  # has one spread
    assert large.at(10_000) == pytest.approx((32.63, 0.20))
    assert large.at(100_000) == pytest.approx((17.80, 0.0))
    assert (large.at(50_000) or (0, 1))[1] == 0


@pytest.mark.parametrize(
    ("ppl", "far"), [(42.6, False), (46.8, False), (47.0, True), (38.0, True)]
)
def test_a_validation_is_reported_beside_the_curve(
    ppl: float, far: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    curve.load(NVIDIA).report(5_000, math.log(ppl))
    first, *rest = capsys.readouterr().err.splitlines()
    assert first.endswith(f"valid perplexity {ppl:.2f}, expected 42.62 ± 0.27 here")
    assert len(rest) == far


def test_a_run_without_a_curve_reports_nothing(
    capsys: pytest.CaptureFixture[str],
) -> None:
    curve.load("").report(5_000, 3.0)
    assert not capsys.readouterr().err


def test_an_unknown_name_is_refused_with_the_known_ones() -> None:
    with pytest.raises(UserError, match="did you mean 'wt103_nvidia'"):
        curve.load("wt103_nvida")
