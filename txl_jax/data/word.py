"""Word vocabularies, as for the paper's WikiText-103, PTB and One Billion Word."""

import itertools
from collections.abc import Iterable, Iterator, Mapping
from typing import ClassVar, NamedTuple

import numpy as np

from txl_jax.data import text as texts
from txl_jax.data.text import UNKNOWN, token_dtype
from txl_jax.errors import UserError, prefixed
from txl_jax.runtime.storage import Json


class Lines(NamedTuple):
    """The words that mark the ends of lines; other words are split at white space."""

    eos: str = "<eos>"  # after each line, blank ones too; "" = none
    bos: str = ""  # before each line; "" = none
    lower_case: bool = False

    @property
    def specials(self) -> list[str]:
        """The distinct marks."""
        return [*dict.fromkeys(mark for mark in (self.eos, self.bos) if mark)]

    def split(self, text: str, inside: bool = False) -> list[str]:
        """Returns the words; `inside` = the text continues a line."""
        if self.lower_case:
            text = text.lower()
        words = text.replace("\n", f" {self.eos} {self.bos} ").split()
        if self.bos and text:
            if not inside:
                words.insert(0, self.bos)
            if text.endswith("\n"):
                words.pop()  # the next line has not begun
        return words

    def stream(self, blocks: Iterable[bytes], name: str) -> Iterator[list[str]]:
        """Yields the words of a split; the last line gets its mark too."""
        inside = False
        for part in texts.words(blocks, name):
            yield self.split(part, inside)
            inside = not part.endswith("\n")
        if inside and self.eos:
            yield [self.eos]


PAPER = Lines()  # for WikiText and PTB


class WordVocab:
    """Words between white space; the ends of lines are words too.

    Decoding writes single spaces and newlines, so decoded text encodes to the same
    tokens.
    """

    kind: ClassVar[str] = "word"

    def __init__(self, words: list[str], lines: Lines = PAPER) -> None:
        self.words = words
        self.lines = lines
        self.dtype = token_dtype(len(words))  # in token files
        self._ids = {word: token for token, word in enumerate(words)}
        # The token of unknown words, or -1.
        self.unknown = next((self._ids[x] for x in UNKNOWN if x in self._ids), -1)
        if len(self._ids) < len(words):
            twice = next(w for i, w in enumerate(words) if self._ids[w] != i)
            raise UserError(f"the vocabulary has {twice!r} twice: remove one of them")
        for mark in lines.specials:
            if mark not in self._ids:
                raise UserError(
                    f"the vocabulary lacks {mark!r}, which marks each line: add it"
                )

    @classmethod
    def choose(
        cls, counts: Mapping[str, int], lines: Lines = PAPER, max_size: int = 0
    ) -> "WordVocab":
        """Returns the vocabulary of words with their counts, by first occurrence.

        The marks come first, then words by falling count, and words of equal count by
        first occurrence. If max_size excludes words, the vocabulary has <unk>, in its
        place by count, or after the marks if it does not occur in the text.
        """
        specials = lines.specials
        by_count = sorted(counts, key=counts.__getitem__, reverse=True)  # stable
        ordered = [word for word in by_count if word not in specials]
        size = max_size or len(specials) + len(ordered)
        chosen = ordered[: max(size - len(specials), 0)]
        if len(chosen) < len(ordered) and not {*UNKNOWN} & {*chosen}:
            specials = [*specials, UNKNOWN[0]]
            chosen = chosen[: max(size - len(specials), 0)]
        return cls([*specials, *chosen], lines)

    def __len__(self) -> int:
        return len(self.words)

    def encode(self, text: str) -> np.ndarray:
        """Returns the tokens of a text, whose last line may be incomplete."""
        return self.look_up(self.lines.split(text))

    def stream(self, blocks: Iterable[bytes], name: str) -> Iterator[np.ndarray]:
        """Yields the tokens of a whole split, whose last line gets its mark too."""
        for words in self.lines.stream(blocks, name):
            with prefixed(name):
                tokens = self.look_up(words)
            yield tokens

    def look_up(self, words: list[str]) -> np.ndarray:
        """Returns the tokens of words; raises UserError if one has no token."""
        ids = map(self._ids.get, words, itertools.repeat(self.unknown))
        tokens = np.fromiter(ids, np.int32, len(words))
        if self.unknown < 0 and len(without := np.flatnonzero(tokens < 0)):
            raise texts.missing(f"word {words[without[0]][:80]!r}")
        return tokens.astype(self.dtype, copy=False)

    def decode(self, tokens: Iterable[int], final: bool = True) -> str:
        """Returns the words, separated by spaces and newlines."""
        parts: list[str] = []
        start = True
        marked = False  # after a line's first mark, which may equal the last one
        for word in map(self.words.__getitem__, np.asarray(tokens).tolist()):
            if start and not marked and word == self.lines.bos:
                marked = True
            elif word == self.lines.eos:
                parts.append("\n")
                start, marked = True, False
            else:
                parts += [word] if start else [" ", word]
                start = False
        return "".join(parts)

    def to_json(self) -> Json:
        """Returns the content of a vocabulary's file."""
        return {"kind": self.kind, **self.lines._asdict(), "words": self.words}
