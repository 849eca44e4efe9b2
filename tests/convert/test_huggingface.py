"""Folders of Hugging Face's transfo-xl are imported."""

import collections
import json
import pickle
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy

from tests.convert.test_pickle import RECORDED
from tests.convert.test_pytorch import case, saved_case
from tests.support import golden
from tests.support.refusal import refusal
from tests.support.tiny import assert_equal
from txl_jax.convert import formats, huggingface
from txl_jax.data import vocab as vocabulary
from txl_jax.data.options import DataConfig
from txl_jax.data.vocab import ByteVocab, CharVocab
from txl_jax.data.word import WordVocab

VOCAB = WordVocab(["<eos>", "<unk>", *(f"w{i}" for i in range(35))])


def folder_of(path: Path, **changes: Any) -> Path:
    """Writes `case("div_val_2")` into a folder, with some config fields changed."""
    fields, state = saved_case("div_val_2")
    fields |= {"model_type": "transfo-xl"} | changes
    path.mkdir(exist_ok=True)
    text = json.dumps({name: x for name, x in fields.items() if x != "absent"})
    (path / "config.json").write_text(text)
    (path / "vocab.txt").write_text("\n".join(VOCAB.words))
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


def test_weights_that_lack_what_the_config_does_not_tie_are_refused() -> None:
    fields, state = saved_case("div_val_2")
    lacking = {x: y for x, y in state.items() if "crit.out" not in x or y.ndim == 1}
    for name, value in (("tie_projs", [False] * 4), ("tie_word_embeddings", False)):
        changed = fields | {name: value}
        message = refusal(huggingface.from_state_dict, lacking, changed)
        assert "does not tie" in message


# Vocabularies


@pytest.mark.parametrize("name", ["vocab.pkl", "vocab.bin", "cache1.pkl", "cache2.pkl"])
def test_pickled_vocabularies(name: str) -> None:
    vocab = formats.read_vocab(RECORDED / name)
    assert isinstance(vocab, WordVocab)
    assert vocab.words[:5] == ["<eos>", "<unk>", "the", "=", "café"]
    assert vocab.decode(vocab.encode("the café\n")) == "the café\n"


def test_lists_of_words(tmp_path: Path) -> None:
    """A stated kind is used without guessing."""

    def read(*lines: str, **fields: Any) -> Any:
        (tmp_path / "vocab.txt").write_text("\n".join(lines), "utf-8")
        config = (DataConfig(**fields),) if fields else ()
        return formats.read_vocab(tmp_path / "vocab.txt", *config)

    vocab = read("<eos> 9", "a 3", "", "b", "a")
    assert (vocab.words, vocab.lines.eos) == (["<eos>", "a", "b"], "<eos>")
    assert read("<UNK>", "<S>", "a").lines == ("<S>", "<S>", False)
    assert read("</S>", "a").lines == ("</S>", "", False)
    published = read("101", "32", "7")
    assert published == CharVocab("e \a", of_bytes=True)
    assert published.encode("e e").tolist() == [0, 1, 0]
    assert read("_", "e", "a") == CharVocab(" ea")
    numbers = [str(number) for number in range(256)]
    assert read(*numbers, vocab="word").words == numbers
    assert read(*numbers, vocab="char").of_bytes
    assert read(*numbers, vocab="byte") == ByteVocab()
    assert read("1", "0", vocab="char") == CharVocab("10")
    assert read("1", "0", vocab="corpus") == CharVocab("\1\0", of_bytes=True)
    assert read("_", "a", vocab="word").words == ["_", "a"]
    marked = read("</S>", "<S>", vocab="word", convention="words")
    assert marked.lines.eos == "</S>"
    for kind in ("byte", "char", "subword"):
        message = refusal(lambda kind=kind: read("one", "two", vocab=kind))
        assert "set data.vocab='word'" in message


def test_files_of_the_librarys_tokenizer(tmp_path: Path) -> None:
    """A tokenizer that was loaded and saved again has no list of its words."""
    path = tmp_path / "vocab.pkl"
    ids = collections.OrderedDict((word, i) for i, word in enumerate(VOCAB.words))
    ids.move_to_end("<eos>")
    state = {"idx2sym": [], "sym2idx": ids, "lower_case": True, "x": re.compile("x")}
    path.write_bytes(pickle.dumps(state))
    lower = VOCAB.lines._replace(lower_case=True)
    assert formats.read_vocab(path).to_json() == WordVocab(VOCAB.words, lower).to_json()
    for gap in ({"a": 0, "b": 2}, {"a": 0, "b": "1"}, {"a": 0, "b": True}, ["a"]):
        path.write_bytes(pickle.dumps({"sym2idx": gap}))
        assert "contains no vocabulary" in refusal(formats.read_vocab, path)


def test_words_of_python_2_that_are_not_utf8_can_be_saved(tmp_path: Path) -> None:
    path = tmp_path / "vocab.pkl"
    words = b"(U\x05<eos>U\x02\xff\xfee"
    path.write_bytes(b"\x80\x02}U\x07idx2sym]" + words + b"s.")
    vocabulary.save(formats.read_vocab(path), tmp_path / "vocab.json")
    assert len(vocabulary.load(tmp_path / "vocab.json")) == 2


def test_other_values_of_a_pickle_are_not_vocabularies(tmp_path: Path) -> None:
    """A list may be in itself many times, so nothing prints or compares its items."""

    class Item:
        def __repr__(self) -> str:
            raise AssertionError("it was printed")

    for state in ({"idx2sym": np.zeros(3)}, {"sym2idx": {"a": [Item()]}}):
        message = refusal(formats.vocab_from_pickle, state, tmp_path)
        assert "contains no vocabulary" in message


# The library itself


@pytest.mark.filterwarnings("ignore")  # importing the library warns
@pytest.mark.parametrize("name", golden.CASES)
def test_a_folder_of_the_library_is_read(name: str, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    library = pytest.importorskip("transformers", reason="transformers is not there")
    fields, state = saved_case(name)
    model = library.TransfoXLLMHeadModel(library.TransfoXLConfig.from_dict(fields))
    model.load_state_dict({key: torch.tensor(x) for key, x in state.items()})
    config, params = case(name)
    for safe in (True, False):
        model.save_pretrained(tmp_path / str(safe), safe_serialization=safe)
        result, weights = huggingface.from_pretrained(tmp_path / str(safe))
        assert result == config
        assert_equal(weights, params)
