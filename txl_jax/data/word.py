"""Word vocabularies, as for the paper's WikiText-103, PTB and One Billion Word."""

import collections
from collections.abc import Callable, Iterable, Iterator
from typing import Any, ClassVar, NamedTuple

import numpy as np

from txl_jax.data import text as texts
from txl_jax.data.text import UNKNOWN, token_dtype
from txl_jax.errors import UserError


class Lines(NamedTuple):
    """How a line becomes words: split at white space, with marks at both ends."""

    eos: str = "<eos>"  # after each line, blank ones too
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

    def stream(
        self,
        blocks: Iterable[bytes],
        name: str,
        look_up: Callable[[str], int],
    ) -> Iterator[np.ndarray]:
        """Yields the numbers of a split's words; the last line gets its mark too."""
        inside = False
        for part in texts.words(blocks, name):
            words = self.split(part, inside)
            yield np.fromiter(map(look_up, words), np.int32, len(words))
            inside = not part.endswith("\n")
        if inside:
            yield np.array([look_up(self.eos)], np.int32)


PAPER = Lines()  # of WikiText and PTB


class _Ids(dict[str, int]):
    """The token of each word; other words map to <unk> or raise UserError."""

    def __init__(self, words: Iterable[str]) -> None:
        super().__init__((word, token) for token, word in enumerate(words))
        self.unknown = next((self[mark] for mark in UNKNOWN if mark in self), -1)

    def __missing__(self, word: str) -> int:
        if self.unknown < 0:
            raise texts.missing(f"word {word[:80]!r}")
        return self.unknown


class WordVocab:
    """Words between white space; the ends of lines are words too.

    Decoding writes single spaces and newlines, so decoded text encodes to the same
    tokens.
    """

    kind: ClassVar[str] = "word"

    def __init__(self, words: list[str], lines: Lines = PAPER) -> None:
        self.words = words
        self.lines = lines
        self._ids = _Ids(words)
        if len(self._ids) < len(words):
            twice = next(w for i, w in enumerate(words) if self._ids[w] != i)
            raise UserError(f"the vocabulary has {twice!r} twice: remove one of them")
        for mark in lines.specials:
            if mark not in self._ids:
                raise UserError(
                    f"the vocabulary lacks {mark!r}, which marks each line: add it, or "
                    "set data.convention to one that matches its marks"
                )

    def __len__(self) -> int:
        return len(self.words)

    @property
    def dtype(self) -> np.dtype:
        """The dtype of the token files."""
        return token_dtype(len(self))

    @property
    def unknown(self) -> int:
        """The token of unknown words, or -1."""
        return self._ids.unknown

    def encode(self, text: str) -> np.ndarray:
        """Returns the tokens of a text, whose last line may be incomplete.

        Raises UserError for an unknown word if the vocabulary has no <unk>.
        """
        words = self.lines.split(text)
        return np.fromiter(
            map(self._ids.__getitem__, words), self.dtype, count=len(words)
        )

    def stream(self, blocks: Iterable[bytes], name: str) -> Iterator[np.ndarray]:
        """Yields the tokens of a whole split, whose last line gets its mark too."""
        for tokens in self.lines.stream(blocks, name, self._ids.__getitem__):
            yield tokens.astype(self.dtype)

    def decode(self, tokens: Iterable[int]) -> str:
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

    def to_json(self) -> dict[str, Any]:
        """Returns the JSON object that `from_json` accepts."""
        return {"kind": self.kind, **self.lines._asdict(), "words": self.words}

    @classmethod
    def from_json(cls, state: dict[str, Any]) -> "WordVocab":
        """Returns the vocabulary of a JSON object that `to_json` returned."""
        marks = Lines(state["eos"], state["bos"], state["lower_case"])
        return cls(list(map(str, state["words"])), marks)


class WordCounter:
    """Numbers and counts words in a single pass over the text.

    `stream` yields provisional numbers; `finish` returns the vocabulary and the token
    of each provisional number.
    """

    def __init__(self, lines: Lines) -> None:
        self.lines = lines
        self._numbers: dict[str, int] = collections.defaultdict()
        self._numbers.default_factory = self._numbers.__len__
        for mark in lines.specials:
            self._numbers[mark]
        self._counts = np.zeros(1 << 16, np.int64)

    def stream(
        self, blocks: Iterable[bytes], name: str, counted: bool
    ) -> Iterator[np.ndarray]:
        """Yields a split's provisional numbers, and counts them if `counted`."""
        for numbers in self.lines.stream(blocks, name, self._numbers.__getitem__):
            if len(self._numbers) > len(self._counts):
                self._counts = np.pad(self._counts, (0, len(self._numbers)))
            if counted:
                counts = np.bincount(numbers)
                self._counts[: len(counts)] += counts
            yield numbers

    def finish(
        self, min_count: int = 0, max_size: int = 0
    ) -> tuple[WordVocab, np.ndarray]:
        """Returns the vocabulary, and each provisional number's token or -1.

        The marks come first, then words by falling count and, if equal, by first
        occurrence. If min_count or max_size excludes words, the vocabulary has <unk>,
        in its place by count, or after the marks if it does not occur in the text.
        """
        words = list(self._numbers)
        marks = len(self.lines.specials)
        counts = self._counts[: len(words)].copy()
        counts[:marks] = 0
        order = np.argsort(-counts, kind="stable")
        order = order[counts[order] > 0]  # the rest only occur in uncounted splits
        most = max_size or marks + len(order)
        kept = order[counts[order] >= min_count][: max(most - marks, 0)]
        specials = self.lines.specials
        if len(kept) < len(order) and not {words[i] for i in kept} & set(UNKNOWN):
            specials.append(UNKNOWN[0])
            kept = kept[: max(most - len(specials), 0)]
        vocab = WordVocab([*specials, *(words[i] for i in kept)], self.lines)
        tokens = np.full(len(words), vocab.unknown, np.int32)
        tokens[kept] = np.arange(len(specials), len(vocab))
        tokens[:marks] = np.arange(marks)
        return vocab, tokens

    def missing(self, number: int) -> UserError:
        """Returns the error for a provisional number without a token."""
        return texts.missing(f"word {list(self._numbers)[number][:80]!r}")
