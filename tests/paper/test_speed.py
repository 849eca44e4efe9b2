"""The speed table: its columns, its clock, its windows and its FLOPs.

Dims: B windows, W attention length, L segment.
"""

import dataclasses
import json
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import numpy as np
import pytest

from tests.support import tiny
from tests.support.refusal import refused
from txl_jax.config import Config
from txl_jax.evaluate.options import EvalConfig
from txl_jax.model.config import ModelConfig
from txl_jax.model.fixed import lay_out
from txl_jax.paper import speed
from txl_jax.paper.speed import (
    PAPER,
    count_flops,
    last_nll,
    make_ways,
    whole_nll,
    window_memory,
    window_model,
)
from txl_jax.report.provenance import describe_result
from txl_jax.update.state import abstract_params


def test_a_row_of_the_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PAPER, 6, 363)
    options = EvalConfig(tgt_len=4, streams=2, sweep="mem_len=6")
    model = tiny.config(n_layer=1)
    result = speed.measure_speed(Config(model=model, eval=options), tmp_path / "new")
    (row,) = result["rows"]
    ways = ("cached", "sliding", "fair")
    cached, sliding, fair = (row[f"{way}_seconds_per_token"] for way in ways)
    assert min(cached, sliding, fair) > 0
    assert (row["attention_len"], row["paper_ratio"]) == (6, 363)
    assert row["ratio"] == pytest.approx(sliding / cached)
    assert row["fair_ratio"] == pytest.approx(fair / cached)
    flops = count_flops(dataclasses.replace(model, mem_len=6), 2, 4, 6)
    assert row["predicted_fair_ratio"] == pytest.approx(flops["fair"] / flops["cached"])
    assert (result["segments_timed"], result["windows_timed"]) == (12, 6)
    kept = json.loads((tmp_path / "new" / "speed.json").read_text())
    assert kept["rows"] == result["rows"]
    assert describe_result().keys() == kept["provenance"].keys()
    assert (tmp_path / "new" / "speed.png").read_bytes().startswith(b"\x89PNG")


LARGE = ModelConfig(
    vocab_size=256, n_layer=3, d_model=128, n_head=2, d_head=64, d_inner=512, unroll=3
)


def test_the_clock_takes_the_median_per_token(monkeypatch: pytest.MonkeyPatch) -> None:
    now, calls = [0.0], []

    def takes(name: str, seconds: float) -> Any:
        def program() -> None:
            calls.append(name)
            now[0] += seconds * (9 if calls.count(name) == 1 else 1)

        return program

    monkeypatch.setattr(speed.time, "perf_counter", lambda: now[0])
    costs = {"cached": 8, "sliding": 6, "fair": 4}
    programs = {name: takes(name, seconds) for name, seconds in costs.items()}
    assert speed.measure(programs, 2, 4) == {"cached": 1, "sliding": 3, "fair": 2}
    assert calls[:6] == ["cached"] * 4 + ["sliding", "fair"]


def test_a_window_predicts_the_token_after_it() -> None:
    config = window_model(tiny.config(pre_lnorm=True, untie_r=True), 3)
    params, tokens_BT = tiny.make_params(config), tiny.make_tokens(3, 7)

    def predict(params: Any, tokens_BT: Any) -> Any:
        params = lay_out(params)
        memory = window_memory(config, params, 3, 6)
        return last_nll(config, params, memory, tokens_BT[:, :-1], tokens_BT[:, -1])

    expected_B = [tiny.cold_nll(config, params, text_T)[-1] for text_T in tokens_BT]
    tiny.assert_close(jax.jit(predict)(params, tokens_BT), expected_B)


def counted(function: Any, *arguments: Any) -> float:
    analysis: Any = jax.jit(function).lower(*arguments).compile().cost_analysis()
    return float(analysis["flops"])


@pytest.mark.parametrize("clamp_len", [0, 40])
def test_flops_of_windows_agree_with_the_compiler(clamp_len: int) -> None:
    B, W = 2, 192
    config = dataclasses.replace(window_model(LARGE, clamp_len), kernel="xla")
    params = nn.unbox(abstract_params(config))
    flops = speed.count_flops(dataclasses.replace(config, mem_len=W), B, 512, W)
    tokens_BW = jax.ShapeDtypeStruct((B, W), np.int32)
    whole = counted(lambda *args: whole_nll(config, *args), params, *[tokens_BW] * 2)
    assert B * flops["sliding"] == pytest.approx(whole, rel=0.04)

    own = jax.eval_shape(lay_out, params)
    memory = jax.eval_shape(lambda p: window_memory(config, p, B, W), own)
    window = tokens_BW, jax.ShapeDtypeStruct((B,), np.int32)
    last = counted(lambda *args: last_nll(config, *args), own, memory, *window)
    # This kernel computes the scores beyond the diagonal too.
    HA, R = 128, clamp_len + 1 if clamp_len else W
    keys = np.arange(1, W + 1)
    hidden = 2 * (W - keys).sum() + (R - np.minimum(keys, R)).sum()
    made = flops["fair"] + (LARGE.n_layer - 1) * 2 * HA * hidden
    # More elementwise work than in `whole`: the last token's fusions repeat it.
    assert B * made == pytest.approx(last, rel=0.05)
    assert flops["fair"] < flops["sliding"]


def test_flops_of_a_segment_by_hand() -> None:
    sizes = {"vocab_size": 10, "n_layer": 3, "d_model": 4, "n_head": 1, "d_head": 2}
    model = ModelConfig(**sizes, d_inner=5, mem_len=6, position="none")  # type: ignore[arg-type]
    # q, k, v, o: 4 x 2 x 4 x 2; feed-forward: 2 x 2 x 4 x 5; softmax: 2 x 4 x 10.
    # Scores and values, 2 x 2 x 2 each, of 7, 8, ..., 13 keys: 10 on average.
    assert speed.count_flops(model, 1, 7, 6)["cached"] == 3 * (64 + 80 + 80) + 80
    same = dataclasses.replace(model, same_length=True)
    assert speed.count_flops(same, 1, 7, 6)["cached"] == 3 * (64 + 80 + 48) + 80


def test_other_memories_are_refused() -> None:
    with refused("--mode=speed supports only the paper's memory"):
        config = tiny.config(**tiny.FAST)
        make_ways(config, EvalConfig(), {}, tiny.one_device())


def test_attention_lengths_are_those_of_the_sweep_or_of_table_9() -> None:
    assert speed.attention_lens("") == (800, 1800, 2800, 3800)
    assert speed.attention_lens("mem_len=9,6") == (6, 9)
    for sweep in ("mem_len=1,8", "tgt_len=8"):
        with refused(f"eval.sweep = '{sweep}' must be"):
            speed.attention_lens(sweep)
