"""The copying task: a pattern, a delay of noise, and the pattern again.

    3 7 1 A C B D 5 0 ... 2 9 > a c b d 6 2 B ...

The task shows which distances a model learns to use; section 3.2 of the paper derives
which distances it can see. Capitals are the pattern and digits the noise; ">" is the
cue, and the same letters in lower case are the answer. The next letter of an answer
occurs only `distance` tokens back. Noise of a random length precedes each pattern, so
that an episode may start anywhere in a segment.
"""

import hashlib
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Self

from txl_jax.data.byte_ranges import Splits, whole
from txl_jax.data.options import SPLITS
from txl_jax.errors import UserError

NOISE = b"0123456789"
CUE = b">"
PATTERN = b"ABCDEFGHIJKLMNOPQRSTUVWXYZ"
FIRST_ANSWER = ord("a")  # bytes from here on are answers
SIZES = {"train": 4_000_000, "valid": 100_000, "test": 100_000}  # bytes, about


def draw_letters(bits: bytes, symbols: int) -> bytes:
    """Returns a letter, one of so many, for each byte."""
    return bytes(PATTERN[x * symbols // 256] for x in bits)


def draw_noise(bits: bytes) -> bytes:
    """Returns a digit for each byte."""
    return bytes(NOISE[x * len(NOISE) // 256] for x in bits)


@dataclass(frozen=True)
class Task:
    """One copying task."""

    NAME: ClassVar[str] = "copying"
    ARGUMENTS: ClassVar[str] = "DELAY,LENGTH,SYMBOLS"
    MOST: ClassVar[int] = 9999  # letters of a pattern

    delay: int  # bytes of noise between a pattern and its cue
    length: int  # letters of a pattern
    symbols: int  # letters to choose from

    @classmethod
    def parse(cls, corpus: str) -> Self:
        """Returns the task of a value of data.corpus, or raises UserError."""
        number = r"([1-9]\d{0,3})"
        match = re.fullmatch(rf"{cls.NAME}:{number},{number},(\d+)", corpus)
        if (
            not match
            or int(match[2]) > cls.MOST
            or not 1 <= int(match[3]) <= len(PATTERN)
        ):
            _, second, _ = cls.ARGUMENTS.split(",")
            raise UserError(
                f"data.corpus={corpus!r} must be {cls.NAME}:{cls.ARGUMENTS}: DELAY is "
                f"at most 9,999 bytes of noise, {second} at most {cls.MOST:,} and "
                f"SYMBOLS, letters of the alphabet, at most {len(PATTERN)}"
            )
        delay, length, symbols = map(int, match.groups())
        return cls(delay, length, symbols)

    @property
    def edition(self) -> str:
        """The name of the task's text."""
        return f"{self.delay}-{self.length}-{self.symbols}-0"

    @property
    def distance(self) -> int:
        """The largest number of tokens between an answer and the letter it repeats."""
        return self.length + self.delay

    def text(self, split: str) -> bytes:
        """Returns a split's episodes, which are the same on every machine."""
        text = bytearray()
        number = 0
        while len(text) < SIZES[split]:
            # Unlike methods of random, SHAKE-256 is the same in every version.
            key = f"{self.NAME} {self.edition} {split} {number}".encode()
            text += self.episode(hashlib.shake_256(key).digest)
            number += 1
        return bytes(text)

    def episode(self, draw: Callable[[int], bytes]) -> bytes:
        """Returns noise of 0 to `length` bytes, pattern, delay, cue and answer.

        draw: returns so many random bytes.
        """
        bits = draw(1 + self.length + self.length + self.delay)
        gap = bits[0] * (self.length + 1) // 256
        pattern = draw_letters(bits[1:][: self.length], self.symbols)
        noise = draw_noise(bits[1 + self.length :])
        before, delay = noise[:gap], noise[self.length :]
        return before + pattern + delay + CUE + pattern.lower()

    def write(self, folder: Path) -> Splits:
        """Writes each split as a file in a folder."""
        for split in SPLITS:
            (folder / split).write_bytes(self.text(split))
        return {split: (whole(folder / split),) for split in SPLITS}
