"""Vocabularies: text to tokens and back (section 4.1 uses bytes and words)."""

import codecs
import functools
import json
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np

from txl_jax.data import text as texts
from txl_jax.data.byte_ranges import require_regular
from txl_jax.data.files import mark_size
from txl_jax.data.number import NumberVocab
from txl_jax.data.subword import SubwordVocab
from txl_jax.data.text import token_dtype
from txl_jax.data.word import Lines, WordVocab
from txl_jax.errors import UserError, prefixed
from txl_jax.report.log import say
from txl_jax.runtime.storage import DAMAGE, Json, to_utf8

# Number of earlier tokens on which a token's text may depend: a character has at most
# four bytes, and a word depends on whether it starts a line.
CONTEXT = 8


@dataclass(frozen=True)
class CharVocab:
    """The characters, or (`of_bytes`) the byte values, that occur in a corpus.

    The published enwik8 vocabulary has byte values, most frequent first; symbol U+00XX
    is byte XX.
    """

    symbols: str
    of_bytes: bool = False

    kind: ClassVar[str] = "char"
    unknown: ClassVar[int] = -1

    def __post_init__(self) -> None:
        """Raises ValueError if symbols are bytes, and one is above U+00FF."""
        if self.of_bytes:
            self.symbols.encode("latin-1")

    @classmethod
    def count(
        cls, splits: Iterable[Iterator[np.ndarray]], of_bytes: bool
    ) -> "CharVocab":
        """Returns the vocabulary of splits, each an iterator of `code_points`."""
        counts = np.zeros(256 if of_bytes else 0x110000, np.int64)
        order: list[int] = []  # by first occurrence
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
        """The dtype of the token files."""
        return token_dtype(len(self))

    def encode(self, text: str) -> np.ndarray:
        """Returns the tokens of a text; raises UserError for an unknown symbol."""
        if self.of_bytes:
            # Python decodes invalid bytes of a command line as surrogates.
            data = to_utf8(text, "the text", errors="surrogateescape")
            return self._look_up(np.frombuffer(data, np.uint8))
        return self._look_up(_points(text))

    def stream(self, blocks: Iterable[bytes], name: str) -> Iterator[np.ndarray]:
        """Yields the tokens of a whole split."""
        for points in code_points(blocks, name, self.of_bytes):
            with prefixed(name):
                tokens = self._look_up(points)
            yield tokens

    @functools.cached_property
    def _table(self) -> np.ndarray:
        table = np.full(256 if self.of_bytes else 0x110000, -1, np.int32)
        table[_points(self.symbols)] = np.arange(len(self))
        return table

    def _look_up(self, points: np.ndarray) -> np.ndarray:
        tokens = self._table[points]
        if len(tokens) and tokens.min() < 0:
            point = int(points[tokens < 0][0])
            symbol = f"byte {point}" if self.of_bytes else f"character {chr(point)!r}"
            raise texts.missing(symbol)
        return tokens.astype(self.dtype)

    def decode(self, tokens: Iterable[int], final: bool = True) -> str:
        """Returns the text of tokens; raises IndexError for an unknown token."""
        text = "".join(map(self.symbols.__getitem__, np.asarray(tokens).tolist()))
        if self.of_bytes:
            return codecs.utf_8_decode(text.encode("latin-1"), "replace", final)[0]
        return text

    def to_json(self) -> Json:
        """Returns the content of a vocabulary's file."""
        return {"kind": self.kind, "of_bytes": self.of_bytes, "symbols": self.symbols}


class ByteVocab(CharVocab):
    """The 256 byte values: token i is byte i, so any text can be encoded."""

    kind: ClassVar[str] = "byte"

    def __init__(self) -> None:
        super().__init__("".join(map(chr, range(256))), of_bytes=True)

    def to_json(self) -> Json:
        """Returns the content of a vocabulary's file."""
        return {"kind": self.kind}


def _points(text: str) -> np.ndarray:
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32)


def code_points(
    blocks: Iterable[bytes], name: str, of_bytes: bool
) -> Iterator[np.ndarray]:
    """Yields a split as the numbers of its characters, or of its bytes."""
    if of_bytes:
        return (np.frombuffer(block, np.uint8) for block in blocks)
    return map(_points, texts.characters(blocks, name))


# Every vocabulary has a length, a dtype of its token files, and `unknown`, the token of
# unknown text or -1. `stream` encodes a whole split from blocks of bytes. In `decode`,
# bytes that are not UTF-8 become U+FFFD, which may be a character of the text too, and
# unless the tokens are `final`, the bytes of an incomplete last character are omitted.
Vocab = CharVocab | WordVocab | SubwordVocab | NumberVocab
Decode = Callable[[Iterable[int], bool], str]  # of (tokens, final)
# Constructors of vocabularies from the results of `to_json`, by kind.
FROM_JSON: dict[str, Callable[[Json], Vocab]] = {
    "byte": lambda _: ByteVocab(),
    "char": lambda x: CharVocab("".join(x["symbols"]), x["of_bytes"]),
    "word": lambda x: WordVocab(
        [*map(sys.intern, x["words"])],  # raises TypeError for what is not a str
        Lines(*(x[y] for y in Lines._fields)),
    ),
    "subword": lambda x: SubwordVocab.parse(json.dumps(x["tokenizer"]), "tokenizer"),
    "number": lambda x: NumberVocab(len(range(x["size"]))),
}


def find_token(vocab: Vocab, text: str) -> int:
    r"""Returns the token of a text; raises UserError if it is not exactly one.

    A backslash and an n, which a shell may pass, are the end of a line too, like "\n",
    and a backslash and a t a tab.
    """
    text = text.replace(r"\n", "\n").replace(r"\t", "\t")
    if isinstance(vocab, WordVocab):
        tokens = vocab.look_up([vocab.lines.eos if text == "\n" else text])
    else:
        tokens = vocab.encode(text)
    if len(tokens) != 1 or tokens[0] == vocab.unknown:
        count = "unknown" if len(tokens) == 1 else f"{len(tokens)} tokens"
        raise UserError(f"{text!r} is {count} in this vocabulary: give one token")
    return int(tokens[0])


def spell(decode: Decode, tokens_T: np.ndarray, before: int = 0) -> Iterator[str]:
    """Yields the text that each token adds to the tokens before it.

    Joined, the results are the text, if that is valid UTF-8. All but the last byte of a
    character add "". The first `before` tokens are only context.
    """
    for at in range(before, len(tokens_T)):
        begin = max(at - CONTEXT, 0)
        shorter = decode(tokens_T[begin:at], False)
        longer = decode(tokens_T[begin : at + 1], False)
        yield longer[len(shorter) :]


def report_unknown(vocab: Vocab, field: str, text: str) -> None:
    """Reports the words of a text that are replaced by the token for unknown text."""
    mark = vocab.decode([vocab.unknown]) if vocab.unknown >= 0 else ""
    words = [x for x in text.split() if mark and vocab.unknown in vocab.encode(x)]
    if words := [x for x in words if x != mark]:
        names = " ".join(dict.fromkeys(words))[:200]
        say(f"{field} has {len(words)} unknown words, read as {mark!r}: {names}")


def dumps(vocab: Vocab) -> str:
    """Returns a vocabulary as JSON."""
    return json.dumps(vocab.to_json(), ensure_ascii=False)


def loads(text: str) -> Vocab:
    """Returns the vocabulary of `dumps`; raises an error of DAMAGE or UserError."""
    state = json.loads(text)
    return FROM_JSON[state["kind"]](state)


def save(vocab: Vocab, path: Path) -> None:
    """Writes a vocabulary to a file."""
    path.write_text(dumps(vocab) + "\n", "utf-8")


def load(path: Path) -> Vocab:
    """Reads a vocabulary that `save` wrote; raises UserError if it is damaged."""
    try:
        return loads(path.read_text("utf-8"))
    except (*DAMAGE, FileNotFoundError, UserError) as error:
        raise UserError(
            f"{path} is not a vocabulary ({error}): restore it from a backup, or train "
            "there again, which rewrites it"
        ) from error


def read_file(path: Path, from_words: Callable[[list[str]], Vocab]) -> Vocab:
    """Reads a user's vocabulary, whose kind depends on the file.

    Supported are files of `save`, a Hugging Face tokenizer.json and plain text with a
    word at the start of each line, for `from_words`.
    """
    field = f"data.vocab_path={str(path)!r}"
    require_regular(path, "data.vocab_path")
    try:
        data = path.read_bytes()
        text = data[mark_size(data, field) :].decode("utf-8")
        if path.suffix == ".json":
            state = json.loads(text)
            if "model" in state:
                return SubwordVocab.parse(text, field)
            return loads(text)
        # str.splitlines would split words that contain other line ends of Unicode.
        firsts = (line.split()[0] for line in text.split("\n") if line.strip())
        # One Billion Word's published list has <S> twice; the paper's code uses one.
        words = [*dict.fromkeys(firsts)]
    except (*DAMAGE, OSError) as error:
        raise UserError(
            f"{field} is not a vocabulary ({error}): give a tokenizer.json, the "
            "vocab.json of a run or a list of words"
        ) from error
    with prefixed(field):
        return from_words(words)
