"""The nll of a document is that of evaluation, with a memory that starts empty.

Dims: B = 1 stream, T tokens of a document, D model.
"""

import numpy as np
import pytest

from tests.support import tiny
from txl_jax.evaluate import score
from txl_jax.evaluate.options import EvalConfig
from txl_jax.evaluate.perplexity import make_evaluate
from txl_jax.evaluate.score import Score, Scores

PARAMS = tiny.make_params()
NOTHING_T = np.zeros(0, np.int32)
TOKENS_T = tiny.make_tokens(1, 23)[0]
MEMORY = EvalConfig(streams=1, tgt_len=5, mem_len=9)
WINDOW = EvalConfig(streams=1, tgt_len=3, mem_len=0, ext_len=4)


@pytest.fixture(scope="module")
def with_memory() -> Score:
    return score.make_score(tiny.CONFIG, MEMORY, PARAMS, hidden=True)


def compare(config: EvalConfig, scored: Scores) -> None:
    """Compares the scores with an evaluation of the same tokens."""
    evaluate = make_evaluate(tiny.CONFIG, config, tiny.one_device())
    expected = evaluate(PARAMS, TOKENS_T, tiny.silent)
    assert np.isnan(scored.nll_T[0]) and np.isfinite(scored.nll_T[1:]).all()
    assert expected["nll"] == pytest.approx(np.nanmean(scored.nll_T), rel=tiny.FLOAT32)


def test_nll_matches_evaluation(with_memory: Score) -> None:
    scored = with_memory(TOKENS_T, NOTHING_T)
    compare(MEMORY, scored)
    again = with_memory(TOKENS_T, NOTHING_T)
    np.testing.assert_array_equal(again.nll_T, scored.nll_T, "memory was empty again")


def test_a_model_without_memory_reads_windows() -> None:
    read = score.make_score(tiny.CONFIG, WINDOW, PARAMS, hidden=False)
    scored = read(TOKENS_T, NOTHING_T)
    compare(WINDOW, scored)
    assert scored.hidden_TD.shape == (0, tiny.D)


def test_hidden_states_match_a_plain_loop(with_memory: Score) -> None:
    config = tiny.config(mem_len=9)
    expected_BTD, _ = tiny.read(config, PARAMS, TOKENS_T[None], 5)
    tiny.assert_close(with_memory(TOKENS_T, NOTHING_T).hidden_TD, expected_BTD[0])


@pytest.mark.parametrize("skip", [1, 7])
def test_a_prefix_is_read_and_not_scored(with_memory: Score, skip: int) -> None:
    whole = with_memory(TOKENS_T, NOTHING_T)
    rest = with_memory(TOKENS_T[skip:], TOKENS_T[:skip])
    tiny.assert_close(rest.nll_T, whole.nll_T[skip:])
    tiny.assert_close(rest.hidden_TD, whole.hidden_TD[skip:])


def test_a_document_may_be_empty_or_one_token(with_memory: Score) -> None:
    empty = with_memory(NOTHING_T, NOTHING_T)
    assert (empty.nll_T.shape, empty.hidden_TD.shape) == ((0,), (0, tiny.D))
    one = with_memory(TOKENS_T[:1], NOTHING_T)
    assert np.isnan(one.nll_T).tolist() == [True]
    assert one.hidden_TD.shape == (1, tiny.D)
    assert np.isfinite(with_memory(NOTHING_T, TOKENS_T[:2]).nll_T).all()
