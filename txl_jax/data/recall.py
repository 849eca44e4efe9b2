"""Associative recall: pairs of a key and a value, a delay, and each key again.

    5 2 H C A B 7 1 ... 4 > A b > H c

Capitals are the pairs and digits the noise; ">" and a key ask for the key's value, and
the answer is the value in lower case. Unlike in copying, no distance leads to an
answer: the keys differ, and they are asked for in another order.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from txl_jax.data.copying import CUE, PATTERN, Task, draw_letters, draw_noise


@dataclass(frozen=True)
class Recall(Task):
    """One task of associative recall; `length` counts pairs."""

    NAME: ClassVar[str] = "recall"
    ARGUMENTS: ClassVar[str] = "DELAY,PAIRS,SYMBOLS"
    MOST: ClassVar[int] = len(PATTERN)

    @property
    def distance(self) -> int:
        """As for copying: the first value is asked for last."""
        return self.delay + 5 * self.length - 2

    def episode(self, draw: Callable[[int], bytes]) -> bytes:
        """Returns noise of 0 to 2 PAIRS bytes, pairs, delay and questions."""
        pairs = self.length
        ranks = 2 * (len(PATTERN) + pairs)
        bits = draw(ranks + pairs + 1 + 2 * pairs + self.delay)
        rank = np.frombuffer(bits[:ranks], "<u2")
        keys = np.argsort(rank[: len(PATTERN)], kind="stable")[:pairs]
        asked = np.argsort(rank[len(PATTERN) :], kind="stable")
        values = draw_letters(bits[ranks:][:pairs], self.symbols)
        gap, noise = bits[ranks + pairs], draw_noise(bits[ranks + pairs + 1 :])
        made = [bytes((PATTERN[keys[i]], values[i])) for i in range(pairs)]
        before, delay = noise[: gap * (2 * pairs + 1) // 256], noise[2 * pairs :]
        questions = (CUE + made[i][:1] + made[i][1:].lower() for i in asked)
        return before + b"".join(made) + delay + b"".join(questions)
