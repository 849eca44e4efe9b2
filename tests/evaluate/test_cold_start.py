"""The curve after a cold start is the nll of pieces that are read by themselves.

Dims: T tokens of a piece, L segment.
"""

import dataclasses
import json
from pathlib import Path

import jax
import numpy as np
import pytest

from tests import reference, tiny
from txl_jax.errors import UserError
from txl_jax.evaluate import cold_start
from txl_jax.evaluate.perplexity import EvalConfig, evaluation_model
from txl_jax.sharding import MeshConfig, make_mesh

pytestmark = pytest.mark.usefixtures("quick_compiler")

MESH = make_mesh(MeshConfig(), jax.devices()[:1])
T = 13
HOW = EvalConfig(streams=3, tgt_len=5, mem_len=20, cold_start=T)
TOKENS = tiny.make_tokens(1, 4 * T + 9)[0].astype(np.uint8)


def test_the_curve_is_the_mean_over_pieces_read_at_once() -> None:
    params = tiny.make_params()
    said: list[tuple[int, int]] = []
    nll_T, pieces = cold_start.measure(
        tiny.CONFIG, HOW, MESH, params, TOKENS, lambda *numbers: said.append(numbers)
    )
    config = evaluation_model(tiny.CONFIG, dataclasses.replace(HOW, mem_len=0))
    settings = tiny.reference_settings(config)
    expected_T = np.zeros(T)
    for piece in range(4):
        text_1T = TOKENS[None, piece * T : (piece + 1) * T + 1].astype(np.int32)
        nothing = reference.empty(tiny.N, 1, tiny.D)
        pair = text_1T[:, :-1], text_1T[:, 1:]
        expected_T += reference.nll(params, *pair, nothing, **settings)[0][0] / 4
    tiny.assert_close(nll_T, expected_T)
    assert (pieces, said) == (4, [(1, 2), (2, 2)])


def test_the_summary_adds_up(tmp_path: Path) -> None:
    nll_T = np.array([4.0, 3.0, 2.0, 2.5, 1.5, 1.0, 1.0, 1.0, 1.0])
    result = cold_start.keep(nll_T, 7, HOW, tmp_path)
    assert (result["pieces"], result["settled_nll"]) == (7, 1.0)
    assert result["cost_nats"] == pytest.approx(3 + 2 + 1 + 1.5 + 0.5)
    spans = [(row["from_tokens_read"], row["to_tokens_read"]) for row in result["rows"]]
    assert spans == [(1, 1), (2, 2), (3, 4), (5, 8), (9, 9)]
    assert [row["nll"] for row in result["rows"]] == [4.0, 3.0, 2.25, 1.125, 1.0]
    kept = json.loads((tmp_path / "cold_start.json").read_text())
    assert kept["nll_by_tokens_read"] == nll_T.tolist()
    assert (tmp_path / "cold_start.png").read_bytes().startswith(b"\x89PNG")


def test_impossible_cold_starts_are_refused() -> None:
    with pytest.raises(UserError, match="eval.cold_start = 99 is more than the 60"):
        cold_start.cut_pieces(TOKENS, 99)
    with pytest.raises(UserError, match="eval.cold_start = 13 is of a memory"):
        dataclasses.replace(HOW, sliding_window=5)
