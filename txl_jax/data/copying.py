"""The copying task: a pattern, a delay of noise, and the pattern again.

    3 7 1 A C B D 5 0 ... 2 9 > a c b d 6 2 B ...

The task shows which distances a model learns to use; section 3.2 of the paper derives
which distances it can see. Capitals are the pattern and digits the noise; ">" is the
cue, and the same letters in lower case are the answer. The next letter of an answer
occurs only `distance` tokens back. Noise of a random length precedes each pattern, so
that an episode may start anywhere in a segment.
"""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from txl_jax.data.byte_ranges import ByteRanges, whole
from txl_jax.data.options import SPLITS, DataConfig
from txl_jax.errors import UserError

NOISE = b"0123456789"
CUE = b">"
PATTERN = b"ABCDEFGHIJKLMNOPQRSTUVWXYZ"
ANSWER = PATTERN.lower()
FIRST_ANSWER = ANSWER[0]  # bytes from here on are answers
SIZES = {"train": 4_000_000, "valid": 100_000, "test": 100_000}  # bytes, about


@dataclass(frozen=True)
class Task:
    """One copying task; all fields are 0 for another corpus."""

    delay: int = 0  # bytes of noise between a pattern and its cue
    length: int = 0  # letters of a pattern
    symbols: int = 0  # letters to choose from

    @staticmethod
    def of(config: DataConfig) -> "Task":
        """Returns the task of a config; all fields are 0 for another corpus."""
        return Task(*config.copying)

    def check(self) -> None:
        """Raises UserError for sizes out of range."""
        for name, most in (("delay", 10_000), ("length", 10_000), ("symbols", 26)):
            if not 0 < (value := getattr(self, name)) <= most:
                raise UserError(
                    f"data.copying: {name} = {value} must be from 1 to {most} for "
                    "data.corpus='copying'"
                )

    @property
    def edition(self) -> str:
        """The name of the task's text."""
        return f"{self.delay}-{self.length}-{self.symbols}-0"

    @property
    def distance(self) -> int:
        """Tokens between the last input and the letter that it must recall."""
        return self.length + self.delay

    def text(self, split: str) -> bytes:
        """Returns a split's episodes, which are the same on every machine."""
        parts, made = [], 0
        for episode in self.episodes(split):
            parts.append(episode)
            made += len(episode)
            if made >= SIZES[split]:
                break
        return b"".join(parts)

    def episodes(self, split: str) -> Iterator[bytes]:
        """Yields noise of 0 to `length` bytes, pattern, delay, cue and answer."""
        number = 0
        while True:
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
            yield before + pattern + delay + CUE + pattern.lower()
            number += 1

    def unpack(self, scratch: Path) -> dict[str, ByteRanges]:
        """Writes each split as a file in `scratch`."""
        splits: dict[str, ByteRanges] = {}
        for split in SPLITS:
            path = scratch / split
            path.write_bytes(self.text(split))
            splits[split] = (whole(path),)
        return splits
