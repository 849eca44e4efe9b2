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
from dataclasses import dataclass
from pathlib import Path

from txl_jax.data.byte_ranges import Splits, whole
from txl_jax.data.options import SPLITS
from txl_jax.errors import UserError

NOISE = b"0123456789"
CUE = b">"
PATTERN = b"ABCDEFGHIJKLMNOPQRSTUVWXYZ"
FIRST_ANSWER = ord("a")  # bytes from here on are answers
SIZES = {"train": 4_000_000, "valid": 100_000, "test": 100_000}  # bytes, about


@dataclass(frozen=True)
class Task:
    """One copying task."""

    delay: int  # bytes of noise between a pattern and its cue
    length: int  # letters of a pattern
    symbols: int  # letters to choose from

    @classmethod
    def parse(cls, corpus: str) -> "Task":
        """Returns the task of a value of data.corpus, or raises UserError."""
        match = re.fullmatch(r"copying:([1-9]\d{0,3}),([1-9]\d{0,3}),(\d+)", corpus)
        if not match or not 1 <= int(match[3]) <= len(PATTERN):
            raise UserError(
                f"data.corpus={corpus!r} must be copying:DELAY,LENGTH,SYMBOLS: bytes "
                "of noise and letters of a pattern, below 10,000 each, and letters of "
                f"the alphabet, at most {len(PATTERN)}"
            )
        delay, length, symbols = map(int, match.groups())
        return cls(delay, length, symbols)

    @property
    def edition(self) -> str:
        """The name of the task's text."""
        return f"{self.delay}-{self.length}-{self.symbols}-0"

    def text(self, split: str) -> bytes:
        """Returns a split's episodes, which are the same on every machine.

        An episode is noise of 0 to `length` bytes, pattern, delay, cue and answer.
        """
        text = bytearray()
        number = 0
        while len(text) < SIZES[split]:
            key = f"copying {self.edition} {split} {number}".encode()
            size = 1 + self.length + self.length + self.delay
            # Unlike methods of random, SHAKE-256 is the same in every version.
            bits = hashlib.shake_256(key).digest(size)
            gap = bits[0] * (self.length + 1) // 256
            pattern = bytes(
                PATTERN[x * self.symbols // 256] for x in bits[1:][: self.length]
            )
            noise = bytes(NOISE[x * len(NOISE) // 256] for x in bits[1 + self.length :])
            before, delay = noise[:gap], noise[self.length :]
            text += before + pattern + delay + CUE + pattern.lower()
            number += 1
        return bytes(text)

    def write(self, folder: Path) -> Splits:
        """Writes each split as a file in a folder."""
        for split in SPLITS:
            (folder / split).write_bytes(self.text(split))
        return {split: (whole(folder / split),) for split in SPLITS}
