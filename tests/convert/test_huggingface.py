"""Folders of Hugging Face's port are read, and written so that the port reads them."""

import dataclasses
import importlib.util
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy

from tests.convert.test_pickle import RECORDED, refusal, tensor_of, zip_of
from tests.convert.test_pytorch import assert_equal, case
from tests.support import golden, tiny
from txl_jax.convert import huggingface, words
from txl_jax.data.vocab import ByteVocab, CharVocab
from txl_jax.data.word import WordVocab

VOCAB = WordVocab(["<eos>", "<unk>", *(f"w{i}" for i in range(35))])


def saved_case(name: str) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Returns what the port has of a case: the config's fields and the state dict."""
    with np.load(golden.FOLDER / f"{name}.npz") as saved:
        state = {
            key.removeprefix("state/"): saved[key].astype(np.float32)
            for key in saved
            if key.startswith("state/")
        }
        return json.loads(str(saved["config"])), state


@pytest.mark.parametrize("name", golden.CASES)
def test_out_and_in_again_is_the_same_model(name: str, tmp_path: Path) -> None:
    config, params = case(name)
    assert huggingface.save_pretrained(config, params, VOCAB, tmp_path) == []
    result, weights = huggingface.from_pretrained(tmp_path)
    assert result == config
    assert_equal(weights, params)


@pytest.mark.parametrize("name", golden.CASES)
def test_in_and_out_again_is_the_same_state(name: str, tmp_path: Path) -> None:
    _, state = saved_case(name)
    config, params = case(name)
    huggingface.save_pretrained(config, params, VOCAB, tmp_path)
    result = safetensors.numpy.load_file(tmp_path / "model.safetensors")
    # Tied ones are there once; one u for all layers is not under each layer's name.
    for key, array in result.items():
        if key != "transformer.pos_emb.inv_freq":
            assert array.tobytes() == state[key].tobytes(), key
    for key in state.keys() - result.keys():
        tied = key.startswith("crit.out_") or "_bias" in key
        assert tied, key


def folder_of(path: Path, **changes: Any) -> Path:
    """Returns a folder of the case with clusters, some config fields changed."""
    fields, state = saved_case("div_val_2")
    fields |= {"model_type": "transfo-xl"} | changes
    path.mkdir(exist_ok=True)
    text = json.dumps({name: x for name, x in fields.items() if x != "absent"})
    (path / "config.json").write_text(text)
    safetensors.numpy.save_file(state, path / "model.safetensors")
    return path


def test_weights_in_parts(tmp_path: Path) -> None:
    folder = folder_of(tmp_path)
    expected = huggingface.from_pretrained(folder)
    state = safetensors.numpy.load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    index = {name: f"part{len(name) % 2}.safetensors" for name in state}
    for part in set(index.values()):
        own = {name: x for name, x in state.items() if index[name] == part}
        safetensors.numpy.save_file(own, folder / part)
    text = json.dumps({"weight_map": index})
    (folder / "model.safetensors.index.json").write_text(text)
    result = huggingface.from_pretrained(folder)
    assert result[0] == expected[0]
    assert_equal(result[1], expected[1])
    (folder / "part1.safetensors").unlink()
    assert "part1.safetensors" in refusal(huggingface.from_pretrained, folder)
    (folder / "model.safetensors.index.json").write_text("{}")
    assert "not an index of weights" in refusal(huggingface.from_pretrained, folder)


def test_a_field_left_out_is_as_the_port_has_it(tmp_path: Path) -> None:
    names = ("mem_len", "clamp_len", "same_length", "tie_projs", "dropout")
    config, _ = huggingface.from_pretrained(
        folder_of(tmp_path, **dict.fromkeys(names, "absent"))
    )
    assert (config.mem_len, config.clamp_len, config.same_length) == (1600, 1000, True)
    assert config.tie_projs == (False, True, True, True)
    assert (config.dropout, config.initial_memory) == (0.1, "zeros")


def test_older_names_and_other_beginnings(tmp_path: Path) -> None:
    changes: dict[str, Any] = {"vocab_size": "absent", "n_token": 37, "clamp_len": -1}
    changes |= {"init": "uniform", "init_range": 0.25}
    config, _ = huggingface.from_pretrained(folder_of(tmp_path, **changes))
    assert (config.vocab_size, config.clamp_len, config.init_range) == (37, 0, 0.25)


MISTAKES: dict[str, tuple[dict[str, Any], str]] = {
    "another model": ({"model_type": "gpt2"}, "model_type = 'gpt2', not 'transfo-xl'"),
    "attn_type": ({"attn_type": 2}, "attn_type = 2"),
    "sampled softmax": ({"sample_softmax": 100}, "sample_softmax = 100"),
    "layers": ({"n_layer": 3}, "n_layer = 3, but the weights have 2"),
    "vocabulary": ({"n_token": 38, "vocab_size": "absent"}, "vocab_size = 38"),
    "d_embed": ({"d_embed": 10}, "d_embed = 10, but the weights have 12"),
    "div_val": ({"div_val": 4}, "div_val = 4, but the weights have 2"),
    "cutoffs": ({"cutoffs": [9, 17]}, "cutoffs = (9, 17)"),
    "type": ({"mem_len": "long"}, "wrong type"),
    "type of cutoffs": ({"cutoffs": 3}, "wrong type"),
    "shared r": ({"untie_r": False}, "r_w_bias, of shape"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_config_that_does_not_fit(name: str, tmp_path: Path) -> None:
    changes, reason = MISTAKES[name]
    message = refusal(huggingface.from_pretrained, folder_of(tmp_path, **changes))
    assert str(tmp_path) in message and reason in message


def test_ties_that_the_weights_do_not_have(tmp_path: Path) -> None:
    config, params = case("div_val_2")
    huggingface.save_pretrained(config, params, VOCAB, tmp_path)
    path = tmp_path / "config.json"
    fields = json.loads(path.read_text())
    path.write_text(json.dumps(fields | {"tie_projs": [False] * 4}))
    assert "does not tie" in refusal(huggingface.from_pretrained, tmp_path)
    path.write_text(json.dumps(fields | {"tie_word_embeddings": False}))
    assert "does not tie the tables" in refusal(huggingface.from_pretrained, tmp_path)


def test_folders_that_hold_no_model(tmp_path: Path) -> None:
    assert "config.json" in refusal(huggingface.from_pretrained, tmp_path)
    for text in ("", "[]", "{", "\x80"):
        (tmp_path / "config.json").write_bytes(text.encode("latin-1"))
        assert "is not valid JSON" in refusal(huggingface.from_pretrained, tmp_path)
    (tmp_path / "config.json").write_text("{}")
    assert "neither model.safetensors" in refusal(huggingface.from_pretrained, tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(zip_of(tensor_of(6), [("data/0", "")]))
    assert "pytorch_model.bin" in refusal(huggingface.from_pretrained, tmp_path)


@pytest.mark.parametrize("kept", [0, 7, 100, -1])
def test_cut_safetensors(kept: int, tmp_path: Path) -> None:
    path = folder_of(tmp_path) / "model.safetensors"
    path.write_bytes(path.read_bytes()[:kept])
    assert str(path) in refusal(huggingface.from_pretrained, tmp_path)


# What the port does not have


def test_positions_that_the_port_lacks(tmp_path: Path) -> None:
    config = tiny.config(position="none")
    message = refusal(
        huggingface.save_pretrained, config, tiny.make_params(config), VOCAB, tmp_path
    )
    assert '"none"' in message and not list(tmp_path.iterdir())


def test_one_key_more_is_one_slot_more(tmp_path: Path) -> None:
    config = tiny.config(
        same_length=True, same_length_self=True, initial_memory="zeros"
    )
    params = tiny.make_params(config)
    assert huggingface.save_pretrained(config, params, ByteVocab(), tmp_path) == []
    result, weights = huggingface.from_pretrained(tmp_path)
    assert (result.mem_len, result.same_length_self) == (config.mem_len + 1, False)
    assert_equal(weights, params)
    tokens_BL = np.random.default_rng(0).integers(0, tiny.V, (2, 9))
    scores = []
    for model, parameters in ((config, params), (result, weights)):
        memory = tiny.Memory.empty(model, 2)
        for part in (tokens_BL[:, :5], tokens_BL[:, 5:]):
            logits, memory = tiny.apply(
                model, parameters, part, memory, method="logits"
            )
            scores.append(logits)
    for ours, theirs in zip(scores[:2], scores[2:], strict=True):
        np.testing.assert_allclose(ours, theirs, atol=tiny.FLOAT32)


def test_what_the_port_will_do_otherwise_is_said(tmp_path: Path) -> None:
    config = tiny.config(variational=True)
    output = huggingface.save_pretrained(
        config, tiny.make_params(config), ByteVocab(), tmp_path
    )
    assert len(output) == 2
    assert "first 5 tokens" in output[0] and "model.variational" in output[1]


# Vocabularies


@pytest.mark.parametrize("name", ["vocab.pkl", "vocab.bin", "cache1.pkl", "cache2.pkl"])
def test_pickled_vocabularies(name: str) -> None:
    vocab = words.read(RECORDED / name)
    assert isinstance(vocab, WordVocab)
    assert vocab.words[:5] == ["<eos>", "<unk>", "the", "=", "café"]
    assert vocab.decode(vocab.encode("the café\n")) == "the café\n"


def test_lists_of_words(tmp_path: Path) -> None:
    def read(*lines: str) -> Any:
        (tmp_path / "vocab.txt").write_text("\n".join(lines), "utf-8")
        return words.read(tmp_path / "vocab.txt")

    vocab = read("<eos> 9", "a 3", "", "b", "a")
    assert (vocab.words, vocab.lines.eos) == (["<eos>", "a", "b"], "<eos>")
    assert read("<UNK>", "<S>", "a").lines == ("<S>", "<S>", False)
    assert read("</S>", "a").lines == ("</S>", "", False)
    published = read("101", "32", "7")
    assert published == CharVocab("e \a", of_bytes=True)
    assert published.encode("e e").tolist() == [0, 1, 0]
    assert read("_", "e", "a") == CharVocab(" ea")
    assert "<eos>" in refusal(read, "a", "b")
    assert "without words" in refusal(read, "")
    assert "no vocabulary file" in refusal(words.read, tmp_path / "none")
    (tmp_path / "vocab.txt").write_bytes(b"\xff")
    assert "UTF-8" in refusal(words.read, tmp_path / "vocab.txt")


def test_a_pickle_without_words() -> None:
    path = RECORDED / "plain.zip.pt"
    assert f"{path} contains no vocabulary" in refusal(words.read, path)


def test_the_words_are_written_too(tmp_path: Path) -> None:
    config = dataclasses.replace(tiny.CONFIG, vocab_size=len(VOCAB))
    params = tiny.make_params(config)
    huggingface.save_pretrained(config, params, VOCAB, tmp_path)
    for name in ("vocab.json", "vocab.txt"):
        result = words.read(tmp_path / name)
        assert result.to_json() == VOCAB.to_json()
    assert json.loads((tmp_path / "config.json").read_text())["eos_token_id"] == 0


# The port itself


@pytest.mark.filterwarnings("ignore")  # importing the port warns of much
@pytest.mark.parametrize("name", golden.CASES)
def test_the_port_reads_what_is_written(name: str, tmp_path: Path) -> None:
    for module in ("torch", "transformers"):
        if not importlib.util.find_spec(module):
            pytest.skip(f"{module} is not installed")
    import torch
    from transformers import TransfoXLLMHeadModel

    config, params = case(name)
    huggingface.save_pretrained(config, params, VOCAB, tmp_path)
    model, report = TransfoXLLMHeadModel.from_pretrained(
        tmp_path, output_loading_info=True
    )
    assert not any(report.values()), report
    with np.load(golden.FOLDER / f"{name}.npz") as saved:
        tokens_BT, nll_BT = saved["tokens"], saved["nll"]
    mems, nll = None, []
    with torch.no_grad():
        for begin in range(0, nll_BT.shape[1], golden.L):
            inputs_BL = tokens_BT[:, begin : begin + golden.L]
            targets_BL = tokens_BT[:, begin + 1 : begin + golden.L + 1]
            nll_BL, mems = golden.read(model.eval(), inputs_BL, targets_BL, mems)
            nll.append(nll_BL.numpy())
    # The same up to the order of its sums, which depends on where the weights lie.
    np.testing.assert_allclose(np.concatenate(nll, axis=1), nll_BT, atol=4e-6, rtol=0)
    # Both of its formats come back.
    for safe in (True, False):
        shutil.rmtree(tmp_path / "again", ignore_errors=True)
        model.save_pretrained(tmp_path / "again", safe_serialization=safe)
        result, weights = huggingface.from_pretrained(tmp_path / "again")
        assert result == config
        assert_equal(weights, params)
