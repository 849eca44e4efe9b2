"""Text to tokens and back."""

from pathlib import Path

import numpy as np
import pytest

from txl_jax.data import vocab
from txl_jax.data.vocab import ByteVocab
from txl_jax.errors import UserError


def test_bytes_come_back() -> None:
    every = bytes(range(256))
    tokens = ByteVocab().encode(every)
    assert tokens.dtype == np.uint8 == ByteVocab.dtype
    assert len(ByteVocab()) == 256
    assert tokens.tobytes() == every
    assert ByteVocab().decode(ByteVocab().encode("naïve 😀\n")) == "naïve 😀\n"


def test_text_is_utf8_and_odd_bytes_survive() -> None:
    assert ByteVocab().encode("é").tolist() == [0xC3, 0xA9]
    argument = b"caf\xe9".decode("utf-8", errors="surrogateescape")
    assert ByteVocab().encode(argument).tobytes() == b"caf\xe9"
    assert len(ByteVocab().encode("")) == 0


def test_decode_marks_what_is_no_utf8() -> None:
    assert ByteVocab().decode([0x61, 0xFF, 0x62]) == "a\ufffdb"
    assert ByteVocab().decode(np.array([104, 105], np.int32)) == "hi"
    assert ByteVocab().decode([]) == ""
    with pytest.raises(ValueError):
        ByteVocab().decode([256])


def test_save_and_load(tmp_path: Path) -> None:
    path = tmp_path / "vocab.json"
    vocab.save(ByteVocab(), path)
    assert path.read_text() == '{"kind": "byte"}\n'
    assert isinstance(vocab.load(path), ByteVocab)


def test_unknown_kind_lists_the_known(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="did you mean 'byte'.*known are: byte"):
        vocab.named("bytes")
    path = tmp_path / "vocab.json"
    path.write_text('{"kind": "klingon"}')
    with pytest.raises(UserError, match="'klingon' is unknown; known are: byte"):
        vocab.load(path)


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"kind":', "\x80"])
def test_other_files_are_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "vocab.json"
    with pytest.raises(UserError, match="is not a vocabulary"):
        vocab.load(path)
    path.write_bytes(content.encode("latin-1"))
    with pytest.raises(UserError, match="is not a vocabulary"):
        vocab.load(path)
