"""Checkpoints of NVIDIA's code: all that they say is taken, or they are refused."""

import pickle
from pathlib import Path
from typing import Any

import pytest

from tests.convert import recorded
from tests.convert.test_pickle import RECORDED, refusal
from tests.convert.test_pytorch import assert_equal, case
from txl_jax.convert import nvidia, words
from txl_jax.data.word import WordVocab
from txl_jax.model import config as models

PATH = RECORDED / "nvidia.pt"


def test_the_model_is_the_one_that_was_saved() -> None:
    config, params = case(recorded.NVIDIA)
    saved = nvidia.read(PATH)
    assert_equal(saved.params, params)
    assert saved.step == 40
    same = ("vocab_size", "n_layer", "d_model", "d_embed", "n_head", "d_head")
    also = ("d_inner", "cutoffs", "div_val", "tie_projs", "mem_len", "clamp_len")
    fields = {name: getattr(config, name) for name in (*same, *also)}
    expected = models.nvidia(**fields, same_length=True, dropout=0.0)
    assert saved.model == expected and expected.same_length_self


def test_the_vocabulary_is_in_it() -> None:
    vocab = words.from_pickle(nvidia.read(PATH).vocab, PATH)
    assert isinstance(vocab, WordVocab) and vocab.words == recorded.WORDS


def test_a_folder_means_its_best(tmp_path: Path) -> None:
    (tmp_path / "checkpoint_best.pt").write_bytes(PATH.read_bytes())
    assert nvidia.read(tmp_path).step == 40
    assert "checkpoint_last.pt" in refusal(nvidia.read, tmp_path / "checkpoint_last.pt")


@pytest.mark.parametrize(
    "saved, reason",
    [
        ([], "no model_state"),
        ({"model_state": {}}, "no model_config"),
        ({"model_state": {}, "model_config": {}}, "neither a state dict"),
    ],
)
def test_what_is_no_checkpoint(saved: Any, reason: str, tmp_path: Path) -> None:
    (path := tmp_path / "file.pt").write_bytes(pickle.dumps(saved))
    message = refusal(nvidia.read, path)
    assert str(path) in message and reason in message


@pytest.mark.parametrize(
    "changes, reason",
    [
        ({"n_layer": 3}, "n_layer = 3, the weights have 2"),
        ({"cutoffs": [9]}, "cutoffs = (9,)"),
        ({"cutoffs": "some"}, "incomplete"),
        ({"mem_len": None}, "incomplete"),
    ],
)
def test_a_config_that_does_not_fit(
    changes: dict[str, Any], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = nvidia.pickle.read(PATH)
    saved["model_config"] |= changes
    monkeypatch.setattr(nvidia.pickle, "read", lambda path: saved)
    message = refusal(nvidia.read, PATH)
    assert str(PATH) in message and reason in message
