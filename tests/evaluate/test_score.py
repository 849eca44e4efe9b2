"""The nll of a document equals the oracle's, with a memory that starts empty.

Dims: B = 1 stream, T tokens of a document, D model.
"""

import dataclasses

import jax
import numpy as np
import pytest

from tests import reference
from tests.support import tiny
from tests.support.reference_compressive import Stream
from tests.support.reference_tokens import Stream as TokenStream
from tests.support.refusal import refused
from txl_jax.evaluate import score
from txl_jax.evaluate.options import EvalConfig, evaluation_model
from txl_jax.evaluate.score import Score
from txl_jax.sharding.mesh import make_mesh
from txl_jax.sharding.options import MeshConfig
from txl_jax.sharding.rules import sharding

PARAMS = tiny.make_params()
NOTHING_T = np.zeros(0, np.int32)
TOKENS_T = tiny.make_tokens(1, 23)[0]
MEMORY = EvalConfig(streams=1, tgt_len=5, mem_len=9)
WINDOW = EvalConfig(streams=1, tgt_len=3, mem_len=0, ext_len=4)


@pytest.fixture(scope="module", params=[1, 2])
def with_memory(request: pytest.FixtureRequest) -> Score:
    config = dataclasses.replace(MEMORY, segments_per_step=request.param)
    return score.make_score(tiny.CONFIG, config, PARAMS, hidden=True)


def test_scores_and_hidden_states_match_the_oracle(with_memory: Score) -> None:
    settings = tiny.reference_settings(evaluation_model(tiny.CONFIG, MEMORY))
    memory, nlls, hiddens = reference.empty(tiny.N, 1, tiny.D), [], []
    for at in range(0, 23, 5):
        text_BL, target_BL = (
            TOKENS_T[None, at : at + 5],
            TOKENS_T[None, at + 1 : at + 6],
        )
        known_BL = text_BL[:, : target_BL.shape[1]]
        nlls.append(reference.nll(PARAMS, known_BL, target_BL, memory, **settings)[0])
        hidden, memory = reference.forward(PARAMS, text_BL, memory, **settings)
        hiddens.append(hidden)
    for _ in range(2):  # the memory is empty again
        scored = with_memory(TOKENS_T, NOTHING_T)
        assert np.isnan(scored.nll_T[0])
        tiny.assert_close(scored.nll_T[1:], np.concatenate(nlls, axis=1)[0])
        tiny.assert_close(scored.hidden_TD, np.concatenate(hiddens, axis=1)[0])


def test_a_model_without_memory_reads_windows() -> None:
    read = score.make_score(tiny.CONFIG, WINDOW, PARAMS, hidden=False)
    scored, expected = read(TOKENS_T, NOTHING_T), []
    for at in range(0, 22, 3):
        low = max(at - 4, 0)
        nll_T = tiny.cold_nll(tiny.config(mem_len=0), PARAMS, TOKENS_T[low : at + 4])
        expected += nll_T[at - low :].tolist()
    tiny.assert_close(scored.nll_T[1:], np.array(expected))
    assert scored.hidden_TD.shape == (0, tiny.D)


def test_other_memories_read_a_document() -> None:
    for kind in (tiny.COMPRESSED | {"compression": "max"}, tiny.TOKENS):
        config = tiny.config(mem_len=9, **kind)
        params = tiny.make_params(config)
        read = score.make_score(config, MEMORY, params, hidden=False)
        if config.memory_tokens:
            oracle = TokenStream(params, **tiny.reference_settings(config))
            expected_T = oracle.read_text(TOKENS_T, 5)
        else:
            expected_T = Stream(params, config).nll(TOKENS_T, 5)
        tiny.assert_close(read(TOKENS_T, NOTHING_T).nll_T[1:], expected_T)


def test_a_long_document_is_split_over_devices() -> None:
    """So are its hidden states; each device reads a short document."""
    mesh = make_mesh(MeshConfig(data=1, segments=4), jax.devices()[:4])
    config = dataclasses.replace(MEMORY, segments_per_step=8)
    params = jax.device_put(PARAMS, sharding(mesh, ""))
    split = score.make_score(tiny.CONFIG, config, params, True, mesh=mesh)
    whole = score.make_score(tiny.CONFIG, config, PARAMS, True)
    for T in (23, 12):
        actual, expected = (read(TOKENS_T[:T], NOTHING_T) for read in (split, whole))
        tiny.assert_close(actual.nll_T[1:], expected.nll_T[1:])
        tiny.assert_close(actual.hidden_TD, expected.hidden_TD)
    config = dataclasses.replace(MEMORY, segments_per_step=6)
    with refused("segments_per_step. to a multiple of 8"):
        score.make_score(tiny.CONFIG, config, params, True, mesh=mesh)


@pytest.mark.parametrize("skip", [1, 7])
def test_a_prefix_is_read_and_not_scored(with_memory: Score, skip: int) -> None:
    whole = with_memory(TOKENS_T, NOTHING_T)
    rest = with_memory(TOKENS_T[skip:], TOKENS_T[:skip])
    tiny.assert_close(rest.nll_T, whole.nll_T[skip:])
    tiny.assert_close(rest.hidden_TD, whole.hidden_TD[skip:])


def test_documents_are_independent(with_memory: Score) -> None:
    """The old document predicts a delimiter; the new one sees only the delimiter."""
    at = 10  # a segment starts here, so that both are cut alike
    text_T = np.where(TOKENS_T == (end := tiny.V - 1), 0, TOKENS_T)
    text_T[at] = end
    config = dataclasses.replace(MEMORY, segments_per_step=3)
    read = score.make_score(tiny.CONFIG, config, PARAMS, False, reset_memory_at=end)
    nll_T = read(text_T, NOTHING_T)[0]
    tiny.assert_close(nll_T[1 : at + 1], with_memory(text_T, NOTHING_T)[0][1 : at + 1])
    tiny.assert_close(nll_T[at + 1 :], with_memory(text_T[at:], NOTHING_T)[0][1:])


def test_a_document_may_be_empty_or_one_token(with_memory: Score) -> None:
    empty = with_memory(NOTHING_T, NOTHING_T)
    assert (empty.nll_T.shape, empty.hidden_TD.shape) == ((0,), (0, tiny.D))
    one = with_memory(TOKENS_T[:1], NOTHING_T)
    assert np.isnan(one.nll_T).tolist() == [True] and one.hidden_TD.shape == (1, tiny.D)
