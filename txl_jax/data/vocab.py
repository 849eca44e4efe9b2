"""Vocabularies: text to tokens and back (the paper's section 4.1 uses bytes and words).

Dims: none.
"""

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol

import numpy as np

from txl_jax.data import text as texts
from txl_jax.data.subword import SubwordVocab
from txl_jax.data.text import token_dtype
from txl_jax.data.word import Lines, WordVocab
from txl_jax.errors import UserError, nearest
from txl_jax.seal import DAMAGE, seal, unseal


class Vocab(Protocol):
    """What every kind of vocabulary is."""

    kind: ClassVar[str]

    def __len__(self) -> int: ...

    @property
    def dtype(self) -> np.dtype:
        """The type of a token in a token file."""

    @property
    def unknown(self) -> int:
        """The token of what has none, or -1."""

    def encode(self, text: str) -> np.ndarray:
        """Returns the tokens of a text; raises UserError for what has none."""

    def decode(self, tokens: Iterable[int]) -> str:
        """Returns the text of tokens."""

    def stream(self, blocks: Iterable[bytes], name: str) -> Iterator[np.ndarray]:
        """Yields the tokens of a whole split, given in blocks cut anywhere."""

    def to_json(self) -> dict[str, Any]:
        """Returns what `from_json` needs."""


class ByteVocab:
    """The 256 byte values: token i is byte i, so every text has tokens."""

    kind: ClassVar[str] = "byte"
    dtype: np.dtype = np.dtype(np.uint8)
    unknown: int = -1

    def __len__(self) -> int:
        return 256

    def encode(self, text: str | bytes) -> np.ndarray:
        """Returns the tokens of a text; a str is taken as UTF-8."""
        return np.frombuffer(_utf8(text) if isinstance(text, str) else text, np.uint8)

    def decode(self, tokens: Iterable[int]) -> str:
        """Returns the text of tokens, with U+FFFD for bytes that are no UTF-8.

        Raises ValueError for a token outside [0, 256).
        """
        return bytes(np.asarray(tokens).tolist()).decode("utf-8", errors="replace")

    def stream(self, blocks: Iterable[bytes], name: str) -> Iterator[np.ndarray]:
        """Yields the tokens of a split: its bytes."""
        yield from map(self.encode, blocks)

    def to_json(self) -> dict[str, Any]:
        """Returns what `from_json` needs."""
        return {"kind": self.kind}

    @classmethod
    def from_json(cls, _: dict[str, Any]) -> "ByteVocab":
        """Returns the vocabulary that `to_json` described."""
        return cls()


def _utf8(text: str) -> bytes:
    # Bytes of a command line that are no UTF-8 arrive as surrogates.
    return text.encode("utf-8", errors="surrogateescape")


@dataclass(frozen=True)
class CharVocab:
    """The characters that occur, or (`of_bytes`) the byte values that do.

    The published enwik8 pipeline has the byte values, most frequent first; symbol
    U+00XX then stands for byte XX.
    """

    symbols: str
    of_bytes: bool = False

    kind: ClassVar[str] = "char"
    unknown: ClassVar[int] = -1

    @classmethod
    def count(
        cls, splits: Iterable[Iterator[np.ndarray]], of_bytes: bool
    ) -> "CharVocab":
        """Returns the vocabulary of splits as code points: see `code_points`."""
        counts = np.zeros(256 if of_bytes else 0x110000, np.int64)
        order: list[int] = []  # by first appearance
        for split in splits:
            for points in split:
                new, first = np.unique(points, return_index=True)
                new = new[np.argsort(first)]
                order += new[counts[new] == 0].tolist()
                counts += np.bincount(points, minlength=len(counts))
        by_count = sorted(order, key=lambda point: -counts[point])
        return cls("".join(map(chr, by_count)), of_bytes)

    def __len__(self) -> int:
        return len(self.symbols)

    @property
    def dtype(self) -> np.dtype:
        """The type of a token in a token file."""
        return token_dtype(len(self))

    def encode(self, text: str) -> np.ndarray:
        """Returns the tokens of a text; raises UserError for an unknown symbol."""
        if self.of_bytes:
            return self._look_up(np.frombuffer(_utf8(text), np.uint8), self._table())
        return self._look_up(_points(text), self._table())

    def stream(self, blocks: Iterable[bytes], name: str) -> Iterator[np.ndarray]:
        """Yields the tokens of a whole split."""
        table = self._table()
        for points in code_points(blocks, name, self.of_bytes):
            yield self._look_up(points, table)

    def _table(self) -> np.ndarray:
        table = np.full(256 if self.of_bytes else 0x110000, -1, np.int32)
        table[_points(self.symbols)] = np.arange(len(self))
        return table

    def _look_up(self, points: np.ndarray, table: np.ndarray) -> np.ndarray:
        tokens = table[points]
        if len(tokens) and tokens.min() < 0:
            point = int(points[tokens < 0][0])
            what = f"byte {point}" if self.of_bytes else f"character {chr(point)!r}"
            raise texts.missing(what)
        return tokens.astype(self.dtype)

    def decode(self, tokens: Iterable[int]) -> str:
        """Returns the text of tokens; raises IndexError for a token that is none."""
        text = "".join(map(self.symbols.__getitem__, np.asarray(tokens).tolist()))
        if self.of_bytes:
            return text.encode("latin-1").decode("utf-8", errors="replace")
        return text

    def to_json(self) -> dict[str, Any]:
        """Returns what `from_json` needs."""
        return {"kind": self.kind, "of_bytes": self.of_bytes, "symbols": self.symbols}

    @classmethod
    def from_json(cls, state: dict[str, Any]) -> "CharVocab":
        """Returns the vocabulary that `to_json` described."""
        symbols, of_bytes = state["symbols"], state["of_bytes"]
        if not isinstance(symbols, str) or len(set(symbols)) < len(symbols):
            raise ValueError("its symbols are no text that has each of them once")
        if of_bytes and max(symbols, default="") > "\xff":
            raise ValueError("its symbols are no bytes")
        return cls(symbols, bool(of_bytes))


def _points(text: str) -> np.ndarray:
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32)


def code_points(
    blocks: Iterable[bytes], name: str, of_bytes: bool
) -> Iterator[np.ndarray]:
    """Yields a split as the numbers of its characters, or of its bytes."""
    if of_bytes:
        return (np.frombuffer(block, np.uint8) for block in blocks)
    return map(_points, texts.characters(blocks, name))


VOCABULARIES: dict[str, Any] = {
    vocab.kind: vocab for vocab in (ByteVocab, CharVocab, WordVocab, SubwordVocab)
}


def named(kind: str) -> Any:
    """Returns the class of a kind; raises UserError that lists the known kinds."""
    if kind not in VOCABULARIES:
        hint = nearest(kind, list(VOCABULARIES))
        known = ", ".join(VOCABULARIES)
        raise UserError(f"vocabulary {kind!r} is unknown{hint}; known are: {known}")
    return VOCABULARIES[kind]


def save(vocab: Vocab, path: Path) -> None:
    """Writes a vocabulary as JSON: all of it, of every kind."""
    state = json.dumps(seal(vocab.to_json()), ensure_ascii=False)
    path.write_text(state + "\n", "utf-8")


def load(path: Path, mend: str = "bring it back") -> Vocab:
    """Reads what `save` wrote.

    Raises UserError, which says how to mend it, if it is missing or another's.
    """
    try:
        vocab = _read_json(path.read_text("utf-8"))
        len(vocab)
        return vocab
    except (*DAMAGE, OSError, UserError) as error:
        raise UserError(f"{path} is not a vocabulary ({error}): {mend}") from error


def _read_json(text: str) -> Vocab:
    state = unseal(json.loads(text))
    return named(state["kind"]).from_json(state)


def read(path: Path, lines: Callable[[], Lines]) -> Vocab:
    """Reads a vocabulary that somebody else made, of the kind that the file shows.

    A file that `save` wrote; a Hugging Face tokenizer.json; a SentencePiece .model; or
    plain text whose lines begin with a word each: `lines` gives their marks. Raises
    UserError for a file that is none of these.
    """
    field = f"data.vocab_path={str(path)!r}"
    mend = "give a tokenizer.json, a SentencePiece .model, a vocab.json or a word list"
    try:
        data = path.read_bytes()
        if path.suffix == ".model":
            return SubwordVocab.from_sentencepiece(data, field)
        text = data.decode("utf-8")
        if path.suffix == ".json":
            if "model" in json.loads(text):
                return SubwordVocab.from_tokenizer(text, field)
            return _read_json(text)
        # Not splitlines: a word may hold one of Unicode's other line ends.
        firsts = (line.split()[0] for line in text.split("\n") if line.strip())
        # One Billion Word's published list has <S> twice; the paper's code takes one.
        words = [*dict.fromkeys(firsts)]
    except OSError as error:
        raise UserError(f"{field} cannot be read ({error.strerror}): {mend}") from None
    except DAMAGE as error:
        raise UserError(f"{field} is no vocabulary ({error}): {mend}") from error
    try:
        return WordVocab(words, lines())
    except UserError as error:
        raise UserError(f"{field}: {error}") from error
