"""Subword vocabularies: tokenizers of other libraries (not in the paper).

The libraries are the extra `subword`, and are imported only for such a vocabulary.
"""

import base64
import importlib
import json
from collections.abc import Iterable, Iterator
from typing import Any, ClassVar

import numpy as np

from txl_jax.data import text as texts
from txl_jax.data.text import JsonObject, token_dtype
from txl_jax.errors import UserError

# Candidates for the end of a line, if a tokenizer has no token for a newline.
LINE_ENDS = ("<eos>", "</s>", "<|endoftext|>", "<|end_of_text|>", "[SEP]")


class _HuggingFace:
    """A tokenizer of Hugging Face's `tokenizers`; tokens that it lacks are -1."""

    package, file = "tokenizers", "tokenizer.json"

    def __init__(self, state: str) -> None:
        self.tokenizer = _import("tokenizers").Tokenizer.from_str(state)
        # Truncation and padding would change a stream.
        self.tokenizer.no_truncation()
        self.tokenizer.no_padding()
        # Token numbers may have gaps.
        self.size = max(self.tokenizer.get_vocab(with_added_tokens=True).values()) + 1
        name = self.to_json()["tokenizer"]["model"].get("unk_token")
        self.unknown = self._first_token([name] if isinstance(name, str) else [])
        ids = self.encode(["\n"])[0]
        exact = len(ids) == 1 and self.decode(ids) == "\n"
        self.line_end = ids[0] if exact else self._first_token(LINE_ENDS)

    def _first_token(self, names: Iterable[str]) -> int:
        tokens = map(self.tokenizer.token_to_id, names)
        return next((token for token in tokens if token is not None), -1)

    def encode(self, lines: list[str]) -> list[list[int]]:
        """Returns the tokens of each line, without special tokens."""
        batch = self.tokenizer.encode_batch_fast(lines, add_special_tokens=False)
        return [encoding.ids for encoding in batch]

    def decode(self, tokens: list[int]) -> str:
        return self.tokenizer.decode(tokens, skip_special_tokens=False)

    def to_json(self) -> JsonObject:
        return {"tokenizer": json.loads(self.tokenizer.to_str())}


class _SentencePiece:
    """A model of Google's `sentencepiece`, with the interface of `_HuggingFace`."""

    package, file = "sentencepiece", "SentencePiece model"

    def __init__(self, model: bytes) -> None:
        self.model = model
        self.processor = _import("sentencepiece").SentencePieceProcessor()
        self.processor.LoadFromSerializedProto(model)
        self.size = self.processor.get_piece_size()
        self.unknown = self.processor.unk_id()
        newline = self.processor.piece_to_id("<0x0A>")
        exact = newline != self.unknown
        self.line_end = newline if exact else self.processor.eos_id()

    def encode(self, lines: list[str]) -> list[list[int]]:
        return self.processor.encode(lines, num_threads=1)

    def decode(self, tokens: list[int]) -> str:
        return self.processor.decode(tokens)

    def to_json(self) -> JsonObject:
        return {"sentencepiece": base64.b64encode(self.model).decode()}


def _import(library: str) -> Any:  # the libraries have no types
    try:
        return importlib.import_module(library)
    except ImportError as error:
        raise UserError(
            f"data.vocab='subword' needs {library}, which is not installed: "
            "pip install 'txl_jax[subword]'"
        ) from error


class SubwordVocab:
    """A tokenizer applied to each line, followed by a token for its end.

    Decoding is exact for a BPE of `train`; other tokenizers may normalise a line.
    """

    kind: ClassVar[str] = "subword"

    def __init__(self, engine: _HuggingFace | _SentencePiece) -> None:
        self.engine = engine
        self.unknown = engine.unknown
        self.line_end = engine.line_end
        self.dtype = token_dtype(engine.size)  # of the token files
        if self.line_end < 0:
            raise UserError(
                "the tokenizer has no token for the end of a line: give it one of "
                f"{', '.join(LINE_ENDS)}"
            )

    @classmethod
    def read(cls, state: str | bytes, name: str) -> "SubwordVocab":
        """Reads a tokenizer.json's text or a SentencePiece model's bytes."""
        engine: Any = _HuggingFace if isinstance(state, str) else _SentencePiece
        try:
            return cls(engine(state))
        except UserError:
            raise
        except Exception as error:  # the libraries raise different types
            reason = str(error).partition("\n")[0]
            version = _import(engine.package).__version__
            raise UserError(
                f"{name} is not a {engine.file} that {engine.package} {version} can "
                f"read ({reason}): restore the file"
            ) from error

    @classmethod
    def train(cls, parts: Iterable[str], size: int) -> "SubwordVocab":
        """Learns byte-level BPE with `size` types, which include all 256 bytes."""
        library = _import("tokenizers")
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
        return cls(_HuggingFace(tokenizer.to_str()))

    def __len__(self) -> int:
        return self.engine.size

    def encode(self, text: str) -> np.ndarray:
        """Returns the tokens of a text."""
        lines = self.engine.encode(text.split("\n"))
        flat = [token for line in lines for token in (*line, self.line_end)]
        return np.array(flat[:-1], self.dtype)  # no end after the last line

    def stream(self, blocks: Iterable[bytes], name: str) -> Iterator[np.ndarray]:
        """Yields the tokens of a whole split."""
        yield from map(self.encode, texts.lines(blocks, name))

    def decode(self, tokens: Iterable[int]) -> str:
        """Returns the text of tokens."""
        lines: list[list[int]] = [[]]
        for token in np.asarray(tokens).tolist():
            if token == self.line_end:
                lines.append([])
            else:
                lines[-1].append(token)
        return "\n".join(map(self.engine.decode, lines))

    def to_json(self) -> JsonObject:
        """Returns the content of a vocabulary's file: the whole tokenizer."""
        return {"kind": self.kind, **self.engine.to_json()}

    @classmethod
    def from_json(cls, state: JsonObject) -> "SubwordVocab":
        """Returns the vocabulary of a JSON object that `to_json` returned."""
        name = "the saved vocabulary"
        if "sentencepiece" in state:
            return cls.read(base64.b64decode(state["sentencepiece"]), name)
        return cls.read(json.dumps(state["tokenizer"]), name)
