"""The curve after a cold start matches pieces that are read separately.

Dims: T tokens of a piece, L segment.
"""

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from tests.support import tiny
from tests.support.refusal import refused
from txl_jax.evaluate import cold_start
from txl_jax.evaluate.cold_start import plot_cold_start
from txl_jax.evaluate.options import EvalConfig
from txl_jax.evaluate.perplexity import ShowProgress
from txl_jax.model.modules import Params

T = 13
CONFIG = EvalConfig(streams=3, tgt_len=5, mem_len=20, sweep=f"cold_start={T}")
TOKENS = tiny.make_tokens(1, 4 * T + 9)[0].astype(np.uint8)


def measure(
    config: EvalConfig, params: Params, progress: ShowProgress
) -> tuple[np.ndarray, int]:
    mesh = tiny.one_device()
    return cold_start.measure(tiny.CONFIG, config, params, mesh, TOKENS, progress)


def test_the_curve_is_the_mean_over_pieces() -> None:
    params = tiny.make_params()
    reported: list[tuple[int, int]] = []
    nll_T, pieces = measure(CONFIG, params, lambda *x: reported.append(x))
    expected_PT = [
        tiny.cold_nll(tiny.config(mem_len=0), params, TOKENS[at : at + T + 1])
        for at in range(0, 4 * T, T)
    ]
    tiny.assert_close(nll_T, np.mean(expected_PT, axis=0))
    assert (pieces, reported) == (4, [(3 * T, 4 * T), (4 * T, 4 * T)])


def test_the_summary_adds_up(tmp_path: Path) -> None:
    nll_T = np.array([4.0, 3.0, 2.0, 2.5, 1.5, 1.0, 1.0, 1.0, 1.0])
    result = cold_start.summarize(nll_T, 7, CONFIG)
    assert (result["pieces"], result["settled_nll"]) == (7, 1.0)
    assert result["cost_nats"] == pytest.approx(3 + 2 + 1 + 1.5 + 0.5)
    spans = [(row["from_tokens_read"], row["to_tokens_read"]) for row in result["rows"]]
    assert spans == [(1, 1), (2, 2), (3, 4), (5, 8), (9, 9)]
    assert [row["nll"] for row in result["rows"]] == [4.0, 3.0, 2.25, 1.125, 1.0]
    plot_cold_start(nll_T, result, tmp_path / "cold_start.png")
    assert (tmp_path / "cold_start.png").read_bytes().startswith(b"\x89PNG")


def test_a_cold_start_longer_than_the_split_is_refused() -> None:
    longer = dataclasses.replace(CONFIG, sweep="cold_start=99")
    with refused("'cold_start=99' exceeds the 60 tokens"):
        measure(longer, tiny.make_params(), tiny.silent)
