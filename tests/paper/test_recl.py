"""RECL: saved losses, contexts of exact lengths, and gains computed by hand.

Dims: I models, C contexts, T positions, B windows.
"""

import dataclasses
import json
import math
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests import reference
from tests.support import tiny
from tests.support.refusal import refused
from tests.support.trained import Home, home
from txl_jax import config as configs
from txl_jax.data import vocab as vocabulary
from txl_jax.data.vocab import CharVocab
from txl_jax.evaluate.options import EvalConfig, evaluation_model
from txl_jax.model.config import ModelConfig
from txl_jax.paper import recl
from txl_jax.paper.options import ReclConfig
from txl_jax.paper.recl import gains, hardest, make_context_nll, spread
from txl_jax.update.options import TrainConfig

__all__ = ["home"]  # the fixture


@pytest.fixture
def options(home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ReclConfig:
    """Returns options that compare the trained run with its copy, `other`."""
    monkeypatch.setattr(recl, "POSITIONS", 7)
    workdirs = str(home.run), str(shutil.copytree(home.run, tmp_path / "other"))
    return ReclConfig(workdirs=workdirs, contexts=(4, 12, 4))


@pytest.fixture
def scored(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Replaces the losses by made-up ones; returns the contexts scored so far."""
    contexts: list[int] = []

    def make(config: ModelConfig, options: EvalConfig, *_: Any) -> Any:
        worse = 2 if options.clamp_len == 9 else 1  # as in `other`

        def nll(tokens: Any, at_T: np.ndarray, context: int, bar: Any) -> np.ndarray:
            contexts.append(context)
            return worse * (9.0 - 0.5 * context) + np.sin(at_T)

        return nll

    monkeypatch.setattr(recl, "make_context_nll", make)
    return contexts


def change(options: ReclConfig, name: str, value: Any) -> None:
    """Changes a field of the config of `other`."""
    path = Path(options.workdirs[1]) / "config.json"
    changed = configs.with_values(configs.load_json(path), {name: value})
    path.write_text(json.dumps(configs.to_json(changed)))


def test_saved_losses(
    options: ReclConfig,
    tmp_path: Path,
    scored: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    change(options, "eval.clamp_len", 9)
    result = recl.measure_recl(options, tmp_path, {})
    assert scored == [4, 8, 12] * 2
    assert [row["workdir"] for row in result["members"]] == list(options.workdirs)
    assert result["contexts_tokens"] == [4, 8, 12] and result["positions"] == 7
    a, b = result["members"]
    assert a["recl_tokens"] == {"1": 12, "0.5": 12, "0.1": 12}
    assert b["recl_tokens"] == {"1": 4, "0.5": 4, "0.1": 4}  # never the group's best
    assert (set(a["ended"].values()), set(b["ended"].values())) == ({False}, {True})
    assert len(a["ppl"]) == 3 and len(a["relative_gain"]["0.1"]) == 2
    assert (tmp_path / "recl.png").read_bytes().startswith(b"\x89PNG")
    saved = json.loads((tmp_path / "recl.json").read_text())
    assert saved == json.loads(json.dumps(result))
    saved_losses = sorted(tmp_path.glob("losses/*/*.json"))
    names = [path.name for path in saved_losses]
    assert names == ["12.json", "4.json", "8.json"] * 2
    # As after a kill, two contexts are missing. Only they are read.
    for path in (saved_losses[0], saved_losses[4]):
        path.unlink()
    scored.clear()
    again = recl.measure_recl(options, tmp_path, {})
    assert sorted(scored) == [4, 12] and again["members"] == result["members"]
    # Other evaluation settings or other positions are measured again.
    scored.clear()
    recl.measure_recl(options, tmp_path, {"eval.clamp_len": 2})  # the same for both
    monkeypatch.setattr(recl, "POSITIONS", 3)
    recl.measure_recl(options, tmp_path, {})
    assert scored == [4, 8, 12] * 3


def test_absolute_positions_read_no_more_than_their_window(
    options: ReclConfig,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    scored: list[int],
) -> None:
    config: Any = SimpleNamespace(model=tiny.CONFIG, train=TrainConfig(tgt_len=6))
    assert recl.full_context(config) == 0
    config.model = tiny.config(mem_len=0, position="sinusoidal")
    assert recl.full_context(config) == 6
    change(options, "eval.clamp_len", 9)
    monkeypatch.setattr(recl, "full_context", lambda c: 6 if c.eval.clamp_len else 0)
    a, b = recl.measure_recl(options, tmp_path, {})["members"]
    assert scored == [4, 8, 12, 4, 6]
    assert (a["full_context_tokens"], b["full_context_tokens"]) == (0, 6)
    assert b["ppl"][1] == b["ppl"][2] < b["ppl"][0]
    # The model is worse at any length than the other, which has 12 tokens and more.
    assert (a["recl_tokens"]["1"], a["ended"]["1"]) == (12, False)
    assert (b["recl_tokens"]["1"], b["ended"]["1"]) == (4, True)
    alone = dataclasses.replace(options, workdirs=options.workdirs[1:])
    (b,) = recl.measure_recl(alone, tmp_path, {})["members"]
    assert (b["recl_tokens"]["1"], b["ended"]["1"]) == (6, True)


def test_refused_texts(options: ReclConfig, tmp_path: Path, scored: list[int]) -> None:
    with refused("test' has .* tokens, too few for the longest of .* = .1, 99999, 99"):
        recl.measure_recl(
            dataclasses.replace(options, contexts=(1, 99999, 99)), tmp_path, {}
        )
    change(options, "eval.split", "valid")
    with refused("score different tokens: give models of one corpus, vocabulary and"):
        recl.measure_recl(options, tmp_path, {})
    change(options, "eval.split", "test")
    vocabulary.save(CharVocab("ab"), Path(options.workdirs[1]) / "vocab.json")
    with refused("the model has another vocabulary than the corpus"):
        recl.measure_recl(options, tmp_path, {})


PARAMS = tiny.make_params()
TEXT_T = tiny.make_tokens(1, 60)[0].astype(np.uint8)
POSITIONS = spread(60, 20, 7)


def oracle(config: ModelConfig, context: int, tgt_len: int) -> np.ndarray:
    """Returns the oracle's nll_T at POSITIONS, each read from a cold start."""
    settings = tiny.reference_settings(config)
    nlls = []
    for at in POSITIONS:
        memory = reference.empty(tiny.N, 1, tiny.D)
        low = at - context
        while low < at:
            high = at - (at - 1 - low) // tgt_len * tgt_len
            nll_BL, memory = reference.nll(
                PARAMS,
                TEXT_T[None, low:high].astype(int),
                TEXT_T[None, low + 1 : high + 1].astype(int),
                memory,
                **settings,
            )
            low = high
        nlls.append(nll_BL[0, -1])
    return np.array(nlls)


@pytest.mark.parametrize("mem_len, segments", [(7, 1), (7, 2), (0, 1)])
def test_losses_depend_on_the_exact_context(mem_len: int, segments: int) -> None:
    options = EvalConfig(
        tgt_len=5, mem_len=mem_len, streams=3, segments_per_step=segments
    )
    config = evaluation_model(tiny.CONFIG, options)
    nll = make_context_nll(tiny.CONFIG, options, PARAMS, tiny.one_device())
    reported: list[tuple[int, int]] = []
    for context in (3, 13) if mem_len else (9,):
        reported.clear()
        actual_T = nll(TEXT_T, POSITIONS, context, lambda *x: reported.append(x))
        tgt_len = options.tgt_len if mem_len else context
        tiny.assert_close(actual_T, oracle(config, context, tgt_len))
        assert reported == [(3, 7), (6, 7), (7, 7)]
        # No bit depends on anything before the context; but tokens inside it matter.
        before_T, inside_T = TEXT_T.copy(), TEXT_T.copy()
        before_T[: POSITIONS[0] - context] = 0
        inside_T[POSITIONS[0] - context] = (TEXT_T[POSITIONS[0] - context] + 1) % tiny.V
        first = POSITIONS[:1]
        whole = nll(TEXT_T, first, context, tiny.silent)
        assert nll(before_T, first, context, tiny.silent) == whole
        if context < 13:  # the first layer's memory has lost older tokens
            assert nll(inside_T, first, context, tiny.silent) != whole


def test_positions_are_spread_evenly_after_the_longest_context() -> None:
    assert POSITIONS.tolist() == [20, 25, 31, 37, 42, 48, 54]
    assert spread(60, 20, 99).tolist() == list(range(20, 60))
    assert spread(20, 20, 5).tolist() == []


# Two models, three contexts, two positions. b(c, t): [2, 1], [1, 1], [1, 0.5].
HAND_ICT = np.array(
    [[[3.0, 1.0], [1.0, 2.0], [1.0, 2.0]], [[2.0, 2.0], [2.0, 1.0], [1.5, 0.5]]]
)


def test_gains_by_hand() -> None:
    baseline_C, gain_IC = gains(HAND_ICT, 1.0)
    np.testing.assert_allclose(baseline_C, np.exp([1.5, 1.0]))
    # The second model's 2.0 at position 0 is no worse than the group's best.
    absolute = [[math.exp(1.5) - math.e, 0], [0, math.e - math.exp(0.75)]]
    np.testing.assert_allclose(gain_IC, absolute, atol=1e-15)


def test_only_the_hardest_positions_count() -> None:
    baseline_C, gain_IC = gains(HAND_ICT, 0.5)
    # At context 1 position 0 is the hardest; at context 2 both are 1, and 0 is first.
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
    return [recl.recl(gain_C, contexts) for gain_C in gain_IC / baseline_C]


@pytest.mark.parametrize("nll, expected", [(1 - 0.0102, 200), (1 - 0.0098, 100)])
def test_the_threshold_is_on_the_relative_gain(nll: float, expected: int) -> None:
    # 1 - exp(-0.0102) is 1.01 %, 1 - exp(-0.0098) is 0.98 %.
    nll_ICT = np.array([[[1.0], [nll], [nll]]])
    assert lengths(nll_ICT, [100, 200, 300]) == [(expected, True)]
