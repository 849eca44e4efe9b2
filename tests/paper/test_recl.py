"""Losses are kept on disk, and only models of one text are compared.

Dims: T positions.
"""

import dataclasses
import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.support import tiny
from tests.support.refusal import refused
from tests.support.trained import Home, home
from txl_jax import config as configs
from txl_jax.data import vocab as vocabulary
from txl_jax.data.vocab import CharVocab
from txl_jax.evaluate.options import EvalConfig
from txl_jax.model.config import ModelConfig
from txl_jax.paper import recl
from txl_jax.paper.options import ReclConfig
from txl_jax.update.options import TrainConfig

__all__ = ["home"]  # the fixture


@pytest.fixture
def options(home: Home, tmp_path: Path) -> ReclConfig:
    """Returns options that compare the trained run with its copy, `other`."""
    workdirs = str(home.run), str(shutil.copytree(home.run, tmp_path / "other"))
    return ReclConfig(workdirs=workdirs, positions=7, contexts=(4, 12, 4))


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


def change(options: ReclConfig, **fields: Any) -> None:
    """Changes fields of `other`'s eval."""
    path = Path(options.workdirs[1]) / "config.json"
    saved = configs.load_json(path)
    saved.eval.update(fields)
    configs.save_json(configs.parse(saved), path)


def test_kept_losses(options: ReclConfig, tmp_path: Path, scored: list[int]) -> None:
    change(options, clamp_len=9)
    result = recl.run(options, tmp_path, {})
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
    kept = sorted(tmp_path.glob("losses/*/*.npz"))
    assert [path.name for path in kept] == ["12.npz", "4.npz", "8.npz"] * 2
    # As after a kill: one context is missing, one is damaged. Only they are read.
    kept[0].unlink()
    kept[4].write_bytes(kept[4].read_bytes()[:100])
    scored.clear()
    again = recl.run(options, tmp_path, {})
    assert sorted(scored) == [4, 12] and again["members"] == result["members"]
    # Another evaluation of the same models, or of other positions, is measured again.
    scored.clear()
    recl.run(options, tmp_path, {"eval.clamp_len": "2"})  # the same for both
    recl.run(dataclasses.replace(options, positions=3), tmp_path, {})
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
    change(options, clamp_len=9)
    monkeypatch.setattr(recl, "full_context", lambda c: 6 if c.eval.clamp_len else 0)
    a, b = recl.run(options, tmp_path, {})["members"]
    assert scored == [4, 8, 12, 4, 6]
    assert (a["full_context_tokens"], b["full_context_tokens"]) == (0, 6)
    assert b["ppl"][1] == b["ppl"][2] < b["ppl"][0]
    # It is worse than the other at any length, which has 12 tokens and more.
    assert (a["recl_tokens"]["1"], a["ended"]["1"]) == (12, False)
    assert (b["recl_tokens"]["1"], b["ended"]["1"]) == (4, True)
    alone = dataclasses.replace(options, workdirs=options.workdirs[1:])
    (b,) = recl.run(alone, tmp_path, {})["members"]
    assert (b["recl_tokens"]["1"], b["ended"]["1"]) == (6, True)


def test_refused_texts(options: ReclConfig, tmp_path: Path, scored: list[int]) -> None:
    with refused("test' has .* tokens, too few for the longest of .* = .1, 99999, 99"):
        recl.run(dataclasses.replace(options, contexts=(1, 99999, 99)), tmp_path, {})
    change(options, split="valid")
    with refused("score different tokens: give models of one corpus, vocabulary and"):
        recl.run(options, tmp_path, {})
    change(options, split="test")
    vocabulary.save(CharVocab("ab"), Path(options.workdirs[1]) / "vocab.json")
    with refused("the model has another vocabulary than the corpus"):
        recl.run(options, tmp_path, {})
