"""Checkpoints of NVIDIA's code are read in full, or refused."""

import pickle
from pathlib import Path
from typing import Any

import pytest

from tests.convert import recorded
from tests.convert.test_pickle import RECORDED, refusal
from tests.convert.test_pytorch import case
from tests.support.tiny import assert_equal
from txl_jax.convert import nvidia, words
from txl_jax.data.word import WordVocab
from txl_jax.model import config as models

PATH = RECORDED / "nvidia.pt"


def test_the_checkpoint_is_the_saved_model() -> None:
    config, params = case(recorded.NVIDIA)
    model, weights, pickled, step = nvidia.read(PATH)
    assert_equal(weights, params)
    assert step == 40
    same = ("vocab_size", "n_layer", "d_model", "d_embed", "n_head", "d_head")
    also = ("d_inner", "cutoffs", "div_val", "tie_projs", "mem_len", "clamp_len")
    fields = {name: getattr(config, name) for name in (*same, *also)}
    expected = models.nvidia(**fields, same_length=True, dropout=0.0)
    assert model == expected and expected.same_length_self
    vocab = words.from_pickle(pickled, PATH)
    assert isinstance(vocab, WordVocab) and vocab.words == recorded.WORDS


def test_other_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "file.pt"
    for saved, name in (([], "model_state"), ({"model_state": {}}, "model_config")):
        path.write_bytes(pickle.dumps(saved))
        assert f"{path} is not a checkpoint" in (message := refusal(nvidia.read, path))
        assert message.endswith(f"no {name}")


@pytest.mark.parametrize(
    "changes, reason",
    [
        ({"cutoffs": [9]}, "cutoffs = (9,)"),
        ({"cutoffs": "some"}, "incomplete"),
        ({"mem_len": None}, "incomplete"),
    ],
)
def test_a_config_that_does_not_fit_is_refused(
    changes: dict[str, Any], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = nvidia.pickle.read(PATH)
    saved["model_config"] |= changes
    monkeypatch.setattr(nvidia.pickle, "read", lambda path: saved)
    message = refusal(nvidia.read, PATH)
    assert str(PATH) in message and reason in message
