"""Subword vocabularies: tokenizers of Hugging Face (not in the paper).

`tokenizers` is the extra `subword`, and is imported only for such a vocabulary.
"""

import codecs
import json
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any, ClassVar

import numpy as np

from txl_jax.data import text as texts
from txl_jax.data.text import token_dtype
from txl_jax.errors import UserError
from txl_jax.report.log import say
from txl_jax.runtime.storage import Json

# Candidates for the end of a line, if a tokenizer has no token for a newline.
LINE_ENDS = ("<eos>", "</s>", "<|endoftext|>", "<|end_of_text|>", "[SEP]")
FIX = "use a tokenizer with unk_token, byte_fallback or ByteLevel that deletes no text"


def _library() -> Any:  # the library has no types
    try:
        import tokenizers
    except ImportError as error:
        raise UserError(
            "data.vocab='subword' needs tokenizers, which is not installed: "
            "pip install 'txl_jax[subword]'"
        ) from error
    if not hasattr(tokenizers.Tokenizer, "encode_batch_fast"):
        raise UserError(
            "data.vocab='subword' needs tokenizers 0.20 or newer, not "
            f"{tokenizers.__version__}: pip install 'txl_jax[subword]'"
        )
    return tokenizers


def _bytes_of(names: Iterable[str], decoder: str) -> dict[str, bytes]:
    """Returns the bytes of tokens by name; empty if a decoder joins no bytes."""
    if "ByteFallback" in decoder:
        return {f"<0x{byte:02X}>": bytes([byte]) for byte in range(256)}
    if "ByteLevel" not in decoder:
        return {}
    # Letters above U+00FF stand for the bytes that are not printable, in order.
    letters = sorted(_library().pre_tokenizers.ByteLevel.alphabet())
    ordered = sorted(range(256), key=lambda byte: chr(byte) not in letters)
    byte_of = dict(zip(letters, ordered, strict=True))
    return {x: bytes(byte_of[y] for y in x) for x in names if {*x} <= byte_of.keys()}


def _visible(text: str) -> Counter[str]:
    """Counts the visible characters, without case, accents and marks of spaces."""
    counts = Counter(unicodedata.normalize("NFKD", text).casefold())
    kinds = ((x, unicodedata.category(x)[0]) for x in counts if x not in "▁\ufffd")
    return Counter({x: counts[x] for x, kind in kinds if kind in "LNPS"})


class SubwordVocab:
    """A tokenizer applied to each line, followed by a token for its end.

    Decoding is exact for a BPE of `train`; others may change characters, not omit them.
    """

    kind: ClassVar[str] = "subword"

    def __init__(self, state: str) -> None:
        self.tokenizer = _library().Tokenizer.from_str(state)
        # Truncation and padding would change a stream.
        self.tokenizer.no_truncation()
        self.tokenizer.no_padding()
        # Token numbers may have gaps.
        tokens = self.tokenizer.get_vocab(with_added_tokens=True)
        self.size = max(tokens.values()) + 1
        self.dtype = token_dtype(self.size)  # in token files
        parts = self.to_json()["tokenizer"]
        self.decoder = str(parts["decoder"])
        self.bytes_of = _bytes_of(tokens, self.decoder)
        self._changes = False  # whether a change of text has been reported
        model = parts["model"]
        marks = model.get("end_of_word_suffix"), model.get("continuing_subword_prefix")
        self._marks = [mark for mark in marks if mark]  # a decoder may leave them
        unk = model.get("unk_id", model.get("unk_token"))  # a Unigram has unk_id
        self.unknown = unk if isinstance(unk, int) else self._first_token([unk or ""])
        ids = self._encode_lines(["\n"])[0]
        exact = len(ids) == 1 and self._decode_line(ids) == "\n"
        self.line_end = ids[0] if exact else self._first_token(LINE_ENDS)
        if self.line_end < 0:
            raise UserError(
                "the tokenizer has no token for the end of a line: give it one of "
                f"{', '.join(LINE_ENDS)}"
            )

    @classmethod
    def parse(cls, state: str, name: str) -> "SubwordVocab":
        """Reads the text of a tokenizer.json; `name` is its name in errors."""
        try:
            return cls(state)
        except UserError:
            raise
        except Exception as error:  # the library raises bare exceptions
            raise UserError(
                f"{name} is not a tokenizer.json that tokenizers can read ({error}): "
                "restore the file"
            ) from error

    @classmethod
    def train(cls, parts: Iterable[str], size: int) -> "SubwordVocab":
        """Learns byte-level BPE with `size` types, which include all 256 bytes."""
        library = _library()
        byte_level = library.pre_tokenizers.ByteLevel
        tokenizer = library.Tokenizer(library.models.BPE())
        tokenizer.pre_tokenizer = byte_level(add_prefix_space=False)
        tokenizer.decoder = library.decoders.ByteLevel()
        trainer = library.trainers.BpeTrainer(
            vocab_size=size, initial_alphabet=byte_level.alphabet(), show_progress=False
        )
        # Lines are encoded without their ends.
        lines = (line for part in parts for line in part.split("\n"))
        tokenizer.train_from_iterator(lines, trainer)
        return cls(tokenizer.to_str())

    def __len__(self) -> int:
        return self.size

    def _first_token(self, names: Iterable[str]) -> int:
        tokens = map(self.tokenizer.token_to_id, names)
        return next((token for token in tokens if token is not None), -1)

    def _encode_lines(self, lines: list[str]) -> list[list[int]]:
        try:
            batch = self.tokenizer.encode_batch_fast(lines, add_special_tokens=False)
        except Exception as error:  # the library raises bare exceptions
            raise UserError(f"the tokenizer fails ({error}): {FIX}") from error
        return [encoding.ids for encoding in batch]

    def _decode_line(self, tokens: list[int], final: bool = True) -> str:
        if not self.bytes_of:
            return self.tokenizer.decode(tokens, skip_special_tokens=False)
        names = [self.tokenizer.id_to_token(token) or "" for token in tokens]
        decode = codecs.getincrementaldecoder("utf-8")("replace").decode
        parts = [decode(self.bytes_of.get(name, name.encode())) for name in names]
        join = "".join if "ByteLevel" in self.decoder else self.tokenizer.decoder.decode
        return join([*parts, decode(b"", final)])

    def _compare(self, text: str, decoded: str) -> None:
        """Refuses text that tokens omit, and reports the first text that changes."""
        for mark in self._marks:
            decoded = decoded.replace(mark, "")
        old, new = ("".join(x.split()) for x in (text, decoded))
        if old.casefold() != new.casefold() and _visible(new) < _visible(old):
            lost = _visible(old) - _visible(new)
            char = next(x for x in old if _visible(x) & lost)
            raise UserError(f"the tokenizer omits {char!r}: {FIX}")
        if old != new and not self._changes:
            self._changes = True
            at = next((i for i, x in enumerate(old) if new[i : i + 1] != x), len(old))
            say(f"the tokenizer reads {old[at : at + 20]!r} as {new[at : at + 20]!r}")

    def encode(self, text: str) -> np.ndarray:
        """Returns the tokens of a text; raises UserError if they omit some of it."""
        lines = text.split("\n")
        # A line with unknown text is not compared, but its characters are.
        parts = [*lines, *dict.fromkeys(text)] if self.unknown >= 0 else lines
        encoded = self._encode_lines(parts)
        decoded = self.tokenizer.decode_batch(encoded, skip_special_tokens=False)
        for part, tokens, again in zip(parts, encoded, decoded, strict=True):
            if again != part and self.unknown not in tokens:
                self._compare(part, again)
        flat = [x for line in encoded[: len(lines)] for x in (*line, self.line_end)]
        return np.array(flat[:-1], self.dtype)  # no end after the last line

    def stream(self, blocks: Iterable[bytes], name: str) -> Iterator[np.ndarray]:
        """Yields the tokens of a whole split."""
        yield from map(self.encode, texts.lines(blocks, name))

    def decode(self, tokens: Iterable[int], final: bool = True) -> str:
        """Returns the text of tokens."""
        lines: list[list[int]] = [[]]
        for token in np.asarray(tokens).tolist():
            if token == self.line_end:
                lines.append([])
            else:
                lines[-1].append(token)
        last = self._decode_line(lines.pop(), final)
        return "\n".join([*map(self._decode_line, lines), last])

    def to_json(self) -> Json:
        """Returns the content of a vocabulary's file: the whole tokenizer."""
        return {"kind": self.kind, "tokenizer": json.loads(self.tokenizer.to_str())}
