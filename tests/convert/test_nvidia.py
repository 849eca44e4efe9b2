"""Checkpoints of NVIDIA's code are read in full, or refused."""

import pickle
from pathlib import Path
from typing import Any

import pytest

from tests.convert import recorded
from tests.convert.test_pytorch import case
from tests.support.refusal import refusal
from tests.support.tiny import assert_equal
from txl_jax.convert import pickle as inert
from txl_jax.convert.formats import read_nvidia
from txl_jax.data.options import DataConfig
from txl_jax.data.word import WordVocab
from txl_jax.model import config as models

PATH = recorded.FOLDER / "nvidia.pt"


def test_a_checkpoint_is_read_in_full() -> None:
    config, params = case(recorded.NVIDIA)
    source = read_nvidia(str(PATH), DataConfig(), {})
    assert_equal(source.params, params)
    assert (source.step, source.files) == (40, [PATH])
    same = ("vocab_size", "n_layer", "d_model", "d_embed", "n_head", "d_head")
    also = ("d_inner", "cutoffs", "div_val", "tie_projs", "mem_len", "clamp_len")
    fields = {name: getattr(config, name) for name in (*same, *also)}
    expected = models.nvidia(**fields, same_length=True, dropout=0.0)
    assert source.model == expected and expected.same_length_self
    assert isinstance(source.vocab, WordVocab)
    assert source.vocab.words == recorded.WORDS


@pytest.mark.parametrize("saved", [[], {"model_state": {}}])
def test_other_files_are_refused(saved: Any, tmp_path: Path) -> None:
    path = tmp_path / "file.pt"
    path.write_bytes(pickle.dumps(saved))
    assert str(path) in refusal(read_nvidia, str(path), DataConfig(), {})


@pytest.mark.parametrize(
    "changes, reason",
    [
        ({"cutoffs": [9]}, "cutoffs = (9,)"),
        ({"cutoffs": [[9]]}, "NVIDIA's code"),  # a list may have far more items
        ({"mem_len": None}, "NVIDIA's code"),
    ],
)
def test_a_config_that_does_not_fit_is_refused(
    changes: dict[str, Any], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = inert.read_pickle(PATH)
    saved["model_config"] |= changes
    monkeypatch.setattr(inert, "read_pickle", lambda path: saved)
    message = refusal(read_nvidia, str(PATH), DataConfig(), {})
    assert str(PATH) in message and reason in message


@pytest.mark.parametrize("step", [None, [40], float("inf")])
def test_a_step_that_is_no_number_is_refused(
    step: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = inert.read_pickle(PATH) | {"train_step": step}
    monkeypatch.setattr(inert, "read_pickle", lambda path: saved)
    assert "NVIDIA's code" in refusal(read_nvidia, str(PATH), DataConfig(), {})
