"""Folders of Hugging Face's transfo-xl are imported and exported."""

import collections
import importlib.util
import json
import pickle
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy

from tests import reference
from tests.convert.test_pickle import RECORDED, tensor_of, zip_of
from tests.convert.test_pytorch import case, saved_case
from tests.support import golden, tiny
from tests.support.refusal import refusal
from tests.support.tiny import assert_equal
from txl_jax.convert import huggingface, words
from txl_jax.data.options import DataConfig
from txl_jax.data.vocab import ByteVocab, CharVocab
from txl_jax.data.word import WordVocab

VOCAB = WordVocab(["<eos>", "<unk>", *(f"w{i}" for i in range(35))])


@pytest.mark.parametrize("name", golden.CASES)
def test_export_and_import_keep_model_and_state(name: str, tmp_path: Path) -> None:
    config, params = case(name)
    assert huggingface.save_pretrained(config, params, VOCAB, tmp_path) == []
    result, weights = huggingface.from_pretrained(tmp_path)
    assert result == config
    assert_equal(weights, params)
    for file in ("vocab.json", "vocab.txt"):
        assert words.read(tmp_path / file).to_json() == VOCAB.to_json()
    assert json.loads((tmp_path / "config.json").read_text())["eos_token_id"] == 0

    state = saved_case(name)[1]
    exported = safetensors.numpy.load_file(tmp_path / "model.safetensors")
    for key, array in exported.items():
        if key != "transformer.pos_emb.inv_freq":
            assert array.tobytes() == state[key].tobytes(), key
    # Tied arrays are written once, and a u for all layers not once per layer.
    for key in state.keys() - exported.keys():
        assert key.startswith("crit.out_") or "_bias" in key, key


def folder_of(path: Path, **changes: Any) -> Path:
    """Writes a model with clusters into a folder, with some config fields changed."""
    fields, state = saved_case("div_val_2")
    fields |= {"model_type": "transfo-xl"} | changes
    path.mkdir(exist_ok=True)
    text = json.dumps({name: x for name, x in fields.items() if x != "absent"})
    (path / "config.json").write_text(text)
    safetensors.numpy.save_file(state, path / "model.safetensors")
    return path


def test_absent_fields_and_older_names(tmp_path: Path) -> None:
    """An absent field has the library's default."""
    names = ("mem_len", "clamp_len", "same_length", "tie_projs", "dropout")
    changes: dict[str, Any] = dict.fromkeys((*names, "vocab_size"), "absent")
    config, _ = huggingface.from_pretrained(folder_of(tmp_path, **changes, n_token=37))
    assert (config.mem_len, config.clamp_len, config.same_length) == (1600, 1000, True)
    assert config.tie_projs == (False, True, True, True)
    assert (config.dropout, config.initial_memory) == (0.1, "zeros")
    changes |= {"n_token": 38}
    message = refusal(huggingface.from_pretrained, folder_of(tmp_path, **changes))
    assert "vocab_size = 38" in message
    config, _ = huggingface.from_pretrained(folder_of(tmp_path, clamp_len=-1))
    assert config.clamp_len == 0


def test_weights_that_lack_what_the_config_does_not_tie_are_refused(
    tmp_path: Path,
) -> None:
    huggingface.save_pretrained(*case("div_val_2"), VOCAB, tmp_path)
    path = tmp_path / "config.json"
    fields = json.loads(path.read_text())
    for name, value in (("tie_projs", [False] * 4), ("tie_word_embeddings", False)):
        path.write_text(json.dumps({**fields, name: value}))
        assert "does not tie" in refusal(huggingface.from_pretrained, tmp_path)


def test_a_damaged_file_of_torch_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}", "utf-8-sig")
    (tmp_path / "pytorch_model.bin").write_bytes(zip_of(tensor_of(6), [("data/0", "")]))
    assert "pytorch_model.bin" in refusal(huggingface.from_pretrained, tmp_path)


# Features that the library lacks


def test_an_export_of_other_positions_is_refused(tmp_path: Path) -> None:
    config = tiny.config(position="none")
    message = refusal(
        huggingface.save_pretrained, config, tiny.make_params(config), VOCAB, tmp_path
    )
    assert "'none'" in message and not list(tmp_path.iterdir())


def test_same_length_self_is_exported_as_one_more_slot(tmp_path: Path) -> None:
    config = tiny.config(
        same_length=True, same_length_self=True, initial_memory="zeros"
    )
    params = tiny.make_params(config)
    assert huggingface.save_pretrained(config, params, ByteVocab(), tmp_path) == []
    result, weights = huggingface.from_pretrained(tmp_path)
    assert (result.mem_len, result.same_length_self) == (config.mem_len + 1, False)
    assert_equal(weights, params)
    tokens_BL, scores = tiny.make_tokens(2, 10), []
    for model in (config, result):
        memory = reference.zeros(model.n_layer, 2, model.d_model, model.mem_len)
        settings = tiny.reference_settings(model)
        for part in np.split(tokens_BL, 2, axis=1):
            logits, memory = reference.logits(weights, part, memory, **settings)
            scores.append(logits)
    np.testing.assert_allclose(scores[:2], scores[2:], atol=tiny.FLOAT32)


def test_differences_are_reported(tmp_path: Path) -> None:
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


def test_a_stated_kind_of_vocabulary_is_not_guessed(tmp_path: Path) -> None:
    def read(kind: str, *lines: str, **fields: Any) -> Any:
        (tmp_path / "vocab.txt").write_text("\n".join(lines), "utf-8")
        return words.read(tmp_path / "vocab.txt", DataConfig(vocab=kind, **fields))

    numbers = [str(number) for number in range(256)]
    assert read("word", *numbers).words == numbers
    assert read("char", *numbers).of_bytes and read("byte", *numbers) == ByteVocab()
    assert read("char", "1", "0") == CharVocab("10")
    assert read("corpus", "1", "0") == CharVocab("\1\0", of_bytes=True)
    assert read("word", "_", "a").words == ["_", "a"]
    assert read("word", "</S>", "<S>", convention="words").lines.eos == "</S>"
    assert read("word", "a", lower_case=True).lines.lower_case
    for kind in ("byte", "char", "subword"):
        assert "set data.vocab='word'" in refusal(read, kind, "one", "two")


def test_files_of_the_librarys_tokenizer(tmp_path: Path) -> None:
    """A tokenizer that was loaded and saved again has no list of its words."""
    path = tmp_path / "vocab.pkl"
    ids = collections.OrderedDict((word, i) for i, word in enumerate(VOCAB.words))
    ids.move_to_end("<eos>")
    state = {"idx2sym": [], "sym2idx": ids, "lower_case": True, "x": re.compile("x")}
    path.write_bytes(pickle.dumps(state))
    lower = VOCAB.lines._replace(lower_case=True)
    assert words.read(path).to_json() == WordVocab(VOCAB.words, lower).to_json()
    (tmp_path / "tokenizer_config.json").write_text('{"lower_case": false}')
    assert words.read(path).to_json() == VOCAB.to_json()
    added = {"blick": 38, "wug": 37, "<unk>": 1}
    (tmp_path / "added_tokens.json").write_text(json.dumps(added))
    assert words.read(path).words == [*VOCAB.words, "wug", "blick"]  # type: ignore
    assert words.read(path, rows=38).words == [*VOCAB.words, "wug"]  # type: ignore
    assert words.read(path, rows=30).to_json() == VOCAB.to_json()
    for wrong in (39, "37", [37]):
        added["wug"] = wrong  # type: ignore[assignment]
        (tmp_path / "added_tokens.json").write_text(json.dumps(added))
        assert "ids do not continue those of vocab.pkl" in refusal(words.read, path)
    for gap in ({"a": 0, "b": 2}, {"a": 0, "b": "1"}, ["a"]):
        path.write_bytes(pickle.dumps({"sym2idx": gap}))
        assert "contains no vocabulary" in refusal(words.read, path)


# The library itself


@pytest.mark.filterwarnings("ignore")  # importing the library warns
@pytest.mark.parametrize("name", golden.CASES)
def test_the_library_reads_an_export(name: str, tmp_path: Path) -> None:
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
    # The order of the library's sums depends on the alignment of its weights.
    np.testing.assert_allclose(np.concatenate(nll, axis=1), nll_BT, atol=4e-6, rtol=0)
    for safe in (True, False):
        shutil.rmtree(tmp_path / "again", ignore_errors=True)
        model.save_pretrained(tmp_path / "again", safe_serialization=safe)
        result, weights = huggingface.from_pretrained(tmp_path / "again")
        assert result == config
        assert_equal(weights, params)
