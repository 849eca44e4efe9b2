"""The nll of a split matches a plain loop over its tokens, one stream at a time.

Dims: B streams, L segment, M memory.
"""

import dataclasses
import functools
import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import reference
from tests.support import tiny
from tests.support.reference_fast import Stream
from txl_jax.data.streams import OFF, Streams
from txl_jax.errors import UserError
from txl_jax.evaluate.options import EvalConfig, evaluation_model
from txl_jax.evaluate.perplexity import Evaluate, make_evaluate, make_reader
from txl_jax.evaluate.reader import Reader, run_calls
from txl_jax.model.config import ModelConfig
from txl_jax.model.key_values import KeyValueMemory
from txl_jax.model.segment import OneSegment

PARAMS = tiny.make_params()
CONFIG = EvalConfig(streams=4, tgt_len=5, mem_len=7)
# Evaluation ignores the dropout.
MODEL = tiny.config(dropout=0.5, dropatt=0.5)
TOKENS = tiny.make_tokens(1, 55)[0]  # 54 pairs: no multiple of 4 streams or of 5


@functools.cache
def compiled(
    config: EvalConfig = CONFIG, model_config: ModelConfig = MODEL, reset: int = OFF
) -> Evaluate:
    device = tiny.one_device()
    return make_evaluate(model_config, config, device, reset_memory_at=reset)


def bounds(tokens: np.ndarray, streams: int) -> Iterator[tuple[int, int]]:
    """Yields the first and the last pair of each stream."""
    pairs = len(tokens) - 1
    for b in range(streams):
        yield b * pairs // streams, (b + 1) * pairs // streams


def loop(tokens: np.ndarray, config: EvalConfig) -> float:
    """Returns the oracle's mean nll, with segments cut to their real tokens."""
    settings = tiny.reference_settings(evaluation_model(tiny.CONFIG, config))
    nll = 0.0
    for begin, end in bounds(tokens, config.streams):
        at = max(begin - config.mem_len, 0) if config.warm_start else begin
        memory = reference.empty(tiny.N, 1, tiny.D)
        while at < end:
            stop = min(at + config.tgt_len, end)
            pair = tokens[None, at:stop], tokens[None, at + 1 : stop + 1]
            nll_BL, memory = reference.nll(PARAMS, *pair, memory, **settings)
            nll += nll_BL[0, max(begin - at, 0) :].sum()
            at = stop
    return nll / (len(tokens) - 1)


@pytest.mark.promise("Every token is scored once")
@pytest.mark.parametrize(
    "changes, count, cold_tokens",
    [
        ({}, 55, 4 * 7),
        ({}, 22, 4 * 5 + 1),
        ({}, 5, 4),  # one token in each stream
        ({"streams": 3, "same_length": True, "clamp_len": 3}, 55, 3 * 7),
        ({"warm_start": True, "segments_per_step": 2}, 55, 7),
        ({"segments_per_step": 2, "mem_len": 30}, 55, 54),
        pytest.param({"streams": 1}, 55, 7, marks=pytest.mark.long),
        pytest.param(
            *({"warm_start": True, "mem_len": 3, "tgt_len": 4}, 55, 3),
            marks=pytest.mark.long,
        ),
    ],
    ids=str,
)
def test_nll_by_a_loop(changes: dict[str, Any], count: int, cold_tokens: int) -> None:
    config, tokens = dataclasses.replace(CONFIG, **changes), TOKENS[:count]
    scores = compiled(config)(PARAMS, tokens, tiny.silent)
    assert scores["nll"] == pytest.approx(loop(tokens, config), rel=tiny.FLOAT32)
    assert (scores["tokens"], scores["cold_tokens"]) == (count - 1, cold_tokens)


@pytest.mark.parametrize(
    "L, M, S, kernel",
    [
        (3, 2, 4, "xla"),
        (5, 30, 3, "xla"),
        (4, 9, 5, "chunked"),
        *(
            pytest.param(L, M, S, kernel, marks=pytest.mark.long)
            for L, M, S in ((1, 5, 8), (1, 1, 3), (7, 6, 2), (2, 20, 30), (30, 3, 2))
            for kernel in ("xla", "chunked")
        ),
    ],
)
def test_segments_per_call_change_nothing(L: int, M: int, S: int, kernel: str) -> None:
    """Documents start anywhere; streams differ in length and end in padding."""
    one = EvalConfig(streams=3, tgt_len=L, mem_len=M, segments_per_step=1)
    several = dataclasses.replace(one, segments_per_step=S)
    model_config = tiny.config(kernel=kernel)
    nll, expected = (
        compiled(config, model_config, 3)(PARAMS, TOKENS[:53], tiny.silent)["nll"]
        for config in (several, one)
    )
    assert nll == pytest.approx(expected, rel=tiny.FLOAT32)


def test_a_token_without_its_id_is_refused() -> None:
    config = dataclasses.replace(CONFIG, reset_memory_at="<eos>")
    with pytest.raises(UserError, match="'<eos>' needs the token's id"):
        compiled(config)


def test_segments_one_by_one_have_the_bits_of_plain_calls() -> None:
    config = dataclasses.replace(CONFIG, segments_per_step=1)
    reader = make_reader(MODEL, config, tiny.one_device())
    model, params = evaluation_model(MODEL, CONFIG), reader.lay_out(PARAMS)
    memory = KeyValueMemory.empty(model, params, 4, 5)
    segments = [*Streams(TOKENS, 4, 5).epoch()]
    read = functools.partial(tiny.apply, model, params, method="nll")
    for segment, total in zip(segments, reader.outputs(params, segments), strict=True):
        one = OneSegment(*(x[0] for x in segment))
        nll_BL, memory = read(
            one.inputs_BL,
            one.targets_BL,
            memory,
            first_BL=one.first_BL,
            length_B=one.length_B,
        )
        assert total == jax.jit(jnp.sum)(nll_BL * one.weights_BL)


def test_fast_weights_are_read_as_in_training() -> None:
    """The streams differ in length, so that some end in padding."""
    model_config = tiny.config(**tiny.FAST)
    params = tiny.make_params(model_config)
    config = evaluation_model(model_config, CONFIG)

    def read(text_T: np.ndarray) -> np.ndarray:
        oracle = Stream(params, **tiny.reference_settings(config))
        return oracle.read_text(text_T, CONFIG.tgt_len)

    parts = [TOKENS[low : high + 1] for low, high in bounds(TOKENS, CONFIG.streams)]
    expected = np.concatenate([*map(read, parts)]).mean()
    for S in (0, 3):  # segments of a call
        options = dataclasses.replace(CONFIG, segments_per_step=S)
        nll = compiled(options, model_config)(params, TOKENS, tiny.silent)["nll"]
        assert nll == pytest.approx(expected, rel=tiny.FLOAT32)


def windows(config: EvalConfig, model_config: ModelConfig, params: Any) -> float:
    """Returns the mean nll of windows, each read by the oracle from a cold start."""
    model_config = evaluation_model(model_config, config)
    nll = 0.0
    for begin, end in bounds(TOKENS, config.streams):
        oldest = max(begin - config.ext_len, 0) if config.warm_start else begin
        for at in range(begin, end, config.tgt_len):
            low, stop = max(at - config.ext_len, oldest), min(at + config.tgt_len, end)
            nll_T = tiny.cold_nll(model_config, params, TOKENS[low : stop + 1])
            nll += nll_T[at - low :].sum()
    return nll / (len(TOKENS) - 1)


SLIDING = {"ext_len": 5, "tgt_len": 1, "warm_start": True}
VARIANTS = {"pre_lnorm": True, "untie_r": True}


@pytest.mark.parametrize(
    "changes, model, cold_tokens",
    [
        ({"ext_len": 3, "clamp_len": 3}, {}, 4 * 3),
        ({"ext_len": 16, "warm_start": True}, VARIANTS, 16),
        (SLIDING, {"position": "learned", "n_position": 6}, 5),
        *(
            pytest.param(*row, marks=pytest.mark.long)
            for row in (
                (SLIDING, {}, 5),
                ({"ext_len": 6}, {"position": "learned", "n_position": 11}, 4 * 6),
                ({"ext_len": 6}, {"position": "sinusoidal"}, 4 * 6),
                ({"ext_len": 6, "tgt_len": 1, "streams": 1}, {}, 6),
            )
        ),
    ],
    ids=str,
)
def test_without_memory_nll_matches_overlapping_windows(
    changes: dict[str, Any], model: dict[str, Any], cold_tokens: int
) -> None:
    """Absolute positions count from the start of a window."""
    config = dataclasses.replace(CONFIG, mem_len=0, **changes)
    model_config = tiny.config(mem_len=0, **model)
    params = tiny.make_params(model_config)
    scores = compiled(config, model_config)(params, TOKENS, tiny.silent)
    expected = windows(config, model_config, params)
    assert scores["nll"] == pytest.approx(expected, rel=tiny.FLOAT32)
    shorter = dataclasses.replace(config, ext_len=config.ext_len - 1)
    shorter_nll = windows(shorter, model_config, params)
    assert scores["nll"] != pytest.approx(shorter_nll, rel=10 * tiny.FLOAT32)
    assert scores["cold_tokens"] == cold_tokens


def test_evaluation_is_pure_repeatable_and_reports_progress() -> None:
    params, short = jax.device_put(PARAMS), tiny.make_tokens(1, 30, seed=2)[0]
    reported: list[tuple[int, int]] = []
    first = compiled()(params, TOKENS, lambda *counts: reported.append(counts))
    count = len(TOKENS) - 1
    assert reported == [(count * done // 3, count) for done in (1, 2, 3)]
    assert compiled()(params, short, tiny.silent)["nll"] != first["nll"]
    scores = compiled()(params, TOKENS.astype(np.uint8), tiny.silent)
    assert scores["nll"] == first["nll"]
    tiny.assert_equal(params, PARAMS)
    assert scores["streams"] == 4
    assert scores["ppl"] == pytest.approx(math.exp(scores["nll"]))
    assert scores["bpc"] == pytest.approx(scores["nll"] / math.log(2))
    rate = scores["tokens"] / scores["seconds"]
    assert scores["tokens_per_second"] == pytest.approx(rate)


def test_the_host_is_at_most_two_calls_ahead() -> None:
    """The progress bar and the end after a signal are not later either."""
    calls: list[int] = []

    def call(carry: int, fixed: None, segment: int) -> tuple[int, int]:
        calls.append(segment)
        return carry + 1, segment

    program: Any = call
    segments: Any = range(6)
    for count, (carry, output) in enumerate(run_calls(program, 0, None, segments)):
        assert calls == [*range(carry)]
        assert (carry, output) == (min(count + 3, 6), count)


def test_the_seconds_leave_compilation_out(monkeypatch: pytest.MonkeyPatch) -> None:
    read, compiled = Reader.read, []

    def check(self: Reader, *args: Any) -> Any:
        compiled.append(len(self.step.compiled))
        return read(self, *args)

    monkeypatch.setattr(Reader, "read", check)
    evaluate = make_evaluate(MODEL, CONFIG, tiny.one_device())
    evaluate(PARAMS, TOKENS, tiny.silent)
    assert compiled == [1]
