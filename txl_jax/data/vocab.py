"""Vocabularies: text to tokens and back (the paper's section 4.1 uses bytes and words).

Dims: none.
"""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from txl_jax.errors import UserError, nearest


class ByteVocab:
    """The 256 byte values: token i is byte i, so every text has tokens."""

    kind: ClassVar[str] = "byte"
    dtype: ClassVar[np.dtype] = np.dtype(np.uint8)

    def __len__(self) -> int:
        return 256

    def encode(self, text: str | bytes) -> np.ndarray:
        """Returns the tokens of a text; a str is taken as UTF-8."""
        if isinstance(text, str):
            # Bytes of a command line that are no UTF-8 arrive as surrogates.
            text = text.encode("utf-8", errors="surrogateescape")
        return np.frombuffer(text, self.dtype)

    def decode(self, tokens: Iterable[int]) -> str:
        """Returns the text of tokens, with U+FFFD for bytes that are no UTF-8.

        Raises ValueError for a token outside [0, 256).
        """
        return bytes(np.asarray(tokens).tolist()).decode("utf-8", errors="replace")

    def to_json(self) -> dict[str, Any]:
        """Returns what `from_json` needs."""
        return {"kind": self.kind}

    @classmethod
    def from_json(cls, _: dict[str, Any]) -> "ByteVocab":
        """Returns the vocabulary that `to_json` described."""
        return cls()


VOCABULARIES = {ByteVocab.kind: ByteVocab}


def named(kind: str) -> type[ByteVocab]:
    """Returns the class of a kind; raises UserError that lists the known kinds."""
    if kind not in VOCABULARIES:
        hint = nearest(kind, list(VOCABULARIES))
        known = ", ".join(VOCABULARIES)
        raise UserError(f"vocabulary {kind!r} is unknown{hint}; known are: {known}")
    return VOCABULARIES[kind]


def save(vocab: ByteVocab, path: Path) -> None:
    """Writes a vocabulary as JSON."""
    path.write_text(json.dumps(vocab.to_json(), ensure_ascii=False) + "\n", "utf-8")


def load(path: Path) -> ByteVocab:
    """Reads what `save` wrote; raises UserError if the file is missing or another's."""
    try:
        state = json.loads(path.read_text("utf-8"))
        kind = state["kind"]
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise UserError(
            f"{path} is not a vocabulary ({error}): delete its folder and prepare again"
        ) from error
    return named(kind).from_json(state)
