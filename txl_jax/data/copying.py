"""The copying task: a pattern, a delay of noise, and the pattern again.

    3 7 1 A C B D 5 0 ... 2 9 > a c b d 6 2 B ...

What the paper says of reach (section 3.2) is about what can be seen; this text shows
what is learned. Capitals are the pattern, digits the noise, ">" asks for the pattern,
and the same letters in lower case answer. The letter that the answer goes on with is
`distance` tokens back, and nowhere else. Before each pattern there is noise of a random
length, so that an episode may begin anywhere in a segment.

Dims: none.
"""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from txl_jax.data.pieces import SPLITS, Pieces, whole
from txl_jax.errors import UserError

NOISE = b"0123456789"
CUE = b">"
PATTERN = b"ABCDEFGHIJKLMNOPQRSTUVWXYZ"
ANSWER = PATTERN.lower()
FIRST_ANSWER = ANSWER[0]  # bytes from here on are answers, and all others are below
SIZES = {"train": 4_000_000, "valid": 100_000, "test": 100_000}  # bytes, about


@dataclass(frozen=True)
class Task:
    """One copying task; all zero where the corpus is another."""

    delay: int = 0  # bytes of noise between a pattern and its cue
    length: int = 0  # letters of a pattern
    symbols: int = 0  # letters to choose from
    seed: int = 0

    def check(self) -> None:
        """Refuses impossible sizes, naming the fields."""
        for name, most in (("delay", 10_000), ("length", 10_000), ("symbols", 26)):
            if not 0 < (given := getattr(self, name)) <= most:
                raise UserError(
                    f"data.copy_{name}={given} must be from 1 to {most} for "
                    "data.corpus='copying'"
                )

    @property
    def edition(self) -> str:
        """What tells this task's text from another's."""
        return f"{self.delay}-{self.length}-{self.symbols}-{self.seed}"

    @property
    def distance(self) -> int:
        """How far back from the token read last the letter is that comes next."""
        return self.length + self.delay

    def text(self, split: str) -> bytes:
        """Returns a split's text, the same on every machine: whole episodes."""
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
            need = 1 + self.length + self.length + self.delay
            # SHAKE-256 depends on no library's version, unlike random's methods.
            bits = hashlib.shake_256(key).digest(need)
            gap = bits[0] * (self.length + 1) // 256
            pattern = bytes(
                PATTERN[x * self.symbols // 256] for x in bits[1:][: self.length]
            )
            noise = bytes(NOISE[x * len(NOISE) // 256] for x in bits[1 + self.length :])
            before, delay = noise[:gap], noise[self.length :]
            yield before + pattern + delay + CUE + pattern.lower()
            number += 1

    def unpack(self, scratch: Path) -> dict[str, Pieces]:
        """Writes each split as a file in `scratch`."""
        splits: dict[str, Pieces] = {}
        for split in SPLITS:
            path = scratch / split
            path.write_bytes(self.text(split))
            splits[split] = (whole(path),)
        return splits
