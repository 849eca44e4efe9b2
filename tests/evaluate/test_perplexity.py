"""The nll of a split matches a plain loop over its tokens, one stream at a time.

Dims: B streams, L segment, M memory.
"""

import dataclasses
import math
from typing import Any

import jax
import numpy as np
import pytest

from tests import reference
from tests.reference import Params
from tests.support import tiny
from txl_jax.errors import UserError
from txl_jax.evaluate.options import EvalConfig, evaluation_model
from txl_jax.evaluate.perplexity import make_evaluate
from txl_jax.model.config import ModelConfig
from txl_jax.model.memory import Memory
from txl_jax.runtime.options import MeshConfig
from txl_jax.sharding import make_mesh

PARAMS = tiny.make_params()
MESH = make_mesh(MeshConfig(), jax.devices()[:1])
CONFIG = EvalConfig(tgt_len=5, mem_len=7)


def silent(done: int, total: int) -> None:
    """Shows no progress."""


def evaluate(tokens: np.ndarray, config: EvalConfig) -> dict[str, Any]:
    return make_evaluate(tiny.CONFIG, config, MESH)(PARAMS, tokens, silent)


def loop(tokens: np.ndarray, config: EvalConfig) -> float:
    """Returns the mean nll, with segments cut to their real tokens: no padding."""
    model_config = evaluation_model(tiny.CONFIG, config)
    pairs = len(tokens) - 1
    nll = 0.0
    for b in range(config.streams):
        begin, end = b * pairs // config.streams, (b + 1) * pairs // config.streams
        at = max(begin - config.mem_len, 0) if config.warm_start else begin
        memory = Memory.empty(model_config, 1)
        while at < end:
            stop = min(at + config.tgt_len, end)
            inputs_BL, targets_BL = (
                tokens[None, at:stop],
                tokens[None, at + 1 : stop + 1],
            )
            nll_BL, memory = tiny.apply(
                model_config, PARAMS, inputs_BL, targets_BL, memory, method="nll"
            )
            nll += np.asarray(nll_BL, np.float64)[0, max(begin - at, 0) :].sum()
            at = stop
    return nll / pairs


@pytest.mark.promise("Every token is scored once")
@pytest.mark.parametrize(
    "changes",
    [
        {"streams": 1},
        {"streams": 4},
        {"streams": 4, "clamp_len": 3, "same_length": True},
        {"streams": 4, "warm_start": True},
        {"streams": 4, "warm_start": True, "mem_len": 3, "tgt_len": 4},
    ],
    ids=str,
)
def test_nll_matches_a_plain_loop(changes: dict[str, Any]) -> None:
    config = dataclasses.replace(CONFIG, **changes)
    tokens = tiny.make_tokens(1, 55)[0]  # 54 pairs: no multiple of 4 streams or of 5
    nll = evaluate(tokens, config)["nll"]
    assert nll == pytest.approx(loop(tokens, config), rel=tiny.FLOAT32)


def windows(
    tokens: np.ndarray,
    config: EvalConfig,
    model_config: ModelConfig = tiny.CONFIG,
    params: Params = PARAMS,
) -> float:
    """Returns the mean nll of windows, each read by the oracle from a cold start."""
    settings = tiny.reference_settings(evaluation_model(model_config, config))
    pairs = len(tokens) - 1
    nll = 0.0
    for b in range(config.streams):
        begin, end = b * pairs // config.streams, (b + 1) * pairs // config.streams
        oldest = max(begin - config.ext_len, 0) if config.warm_start else begin
        for at in range(begin, end, config.tgt_len):
            low, stop = max(at - config.ext_len, oldest), min(at + config.tgt_len, end)
            nll_BL, _ = reference.nll(
                params,
                tokens[None, low:stop],
                tokens[None, low + 1 : stop + 1],
                reference.empty(tiny.N, 1, tiny.D),
                **settings,
            )
            nll += nll_BL[0, at - low :].sum()
    return nll / pairs


@pytest.mark.parametrize(
    "changes",
    [
        {"streams": 1, "ext_len": 6},
        {"streams": 4, "ext_len": 3, "clamp_len": 3},
        {"streams": 4, "ext_len": 6, "tgt_len": 1},
        {"streams": 4, "ext_len": 16, "warm_start": True},
    ],
    ids=str,
)
def test_without_memory_nll_matches_overlapping_windows(
    changes: dict[str, Any],
) -> None:
    config = dataclasses.replace(CONFIG, mem_len=0, **changes)
    tokens = tiny.make_tokens(1, 55)[0]
    nll = evaluate(tokens, config)["nll"]
    assert nll == pytest.approx(windows(tokens, config), rel=tiny.FLOAT32)
    without = dataclasses.replace(config, ext_len=0)
    assert nll != pytest.approx(windows(tokens, without), rel=1e-3)


@pytest.mark.parametrize("position", ["sinusoidal", "learned"])
def test_absolute_positions_count_from_the_start_of_a_window(position: str) -> None:
    config = dataclasses.replace(CONFIG, streams=4, mem_len=0, ext_len=6)
    places = config.ext_len + config.tgt_len if position == "learned" else 0
    model_config = tiny.config(mem_len=0, position=position, n_position=places)
    params = tiny.make_params(model_config)
    tokens = tiny.make_tokens(1, 55)[0]
    nll = make_evaluate(model_config, config, MESH)(params, tokens, silent)["nll"]
    expected = windows(tokens, config, model_config, params)
    assert nll == pytest.approx(expected, rel=tiny.FLOAT32)


@pytest.mark.parametrize("warm_start, cold_tokens", [(False, 4 * 6), (True, 6)])
def test_a_token_with_less_than_the_whole_context_is_cold(
    warm_start: bool, cold_tokens: int
) -> None:
    config = EvalConfig(
        streams=4, tgt_len=5, mem_len=0, ext_len=6, warm_start=warm_start
    )
    scores = evaluate(tiny.make_tokens(1, 55)[0], config)
    assert (scores["tokens"], scores["cold_tokens"]) == (54, cold_tokens)


def test_two_kinds_of_context_are_refused() -> None:
    with pytest.raises(UserError, match="eval.ext_len = 3 with eval.mem_len = 7"):
        dataclasses.replace(CONFIG, ext_len=3)


@pytest.mark.promise("Every token is scored once")
@pytest.mark.parametrize("count", [5, 22])
def test_a_ragged_tail_is_scored(count: int) -> None:
    config = dataclasses.replace(CONFIG, streams=4)
    tokens = tiny.make_tokens(1, count)[0]
    scores = evaluate(tokens, config)
    assert scores["tokens"] == count - 1
    assert scores["nll"] == pytest.approx(loop(tokens, config), rel=tiny.FLOAT32)


def test_the_result_has_all_scores_and_counts() -> None:
    tokens = tiny.make_tokens(1, 55)[0].astype(np.uint8)
    config = dataclasses.replace(CONFIG, streams=4)
    scores = evaluate(tokens, config)
    assert (scores["tokens"], scores["streams"]) == (54, 4)
    assert scores["cold_tokens"] == 4 * 7
    assert scores["ppl"] == pytest.approx(math.exp(scores["nll"]))
    assert scores["bpc"] == pytest.approx(scores["nll"] / math.log(2))
    rate = scores["tokens"] / scores["seconds"]
    assert scores["tokens_per_second"] == pytest.approx(rate)
    assert {type(value) for value in scores.values()} == {int, float}


def test_warm_memories_leave_only_the_first_stream_cold() -> None:
    config = dataclasses.replace(CONFIG, streams=4, warm_start=True)
    assert evaluate(tiny.make_tokens(1, 55)[0], config)["cold_tokens"] == 7


def test_evaluation_is_pure_and_repeatable() -> None:
    params = jax.device_put(PARAMS)
    run = make_evaluate(tiny.CONFIG, dataclasses.replace(CONFIG, streams=4), MESH)
    long, short = tiny.make_tokens(1, 55)[0], tiny.make_tokens(1, 30, seed=2)[0]
    first = run(params, long, silent)["nll"]
    assert run(params, short, silent)["nll"] != first
    assert run(params, long, silent)["nll"] == first
    tiny.assert_equal(params, PARAMS)


def test_progress_counts_the_segments() -> None:
    reported: list[tuple[int, int]] = []
    config = dataclasses.replace(CONFIG, streams=4)
    run = make_evaluate(tiny.CONFIG, config, MESH)
    run(PARAMS, tiny.make_tokens(1, 55)[0], lambda *numbers: reported.append(numbers))
    assert reported == [(1, 3), (2, 3), (3, 3)]


def test_evaluation_has_no_dropout() -> None:
    tokens = tiny.make_tokens(1, 30)[0]
    model_config = tiny.config(dropout=0.5, dropatt=0.5)
    run = make_evaluate(model_config, CONFIG, MESH)
    assert run(PARAMS, tokens, silent)["nll"] == evaluate(tokens, CONFIG)["nll"]
