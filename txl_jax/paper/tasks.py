"""Texts of tasks that need a memory: copying and associative recall (not in the paper).

They show which distances a model learns to use; section 3.2 of the paper derives which
distances it can see. Capitals are to be remembered, digits are noise, ">" is the cue
and lower-case letters are answers, the only tokens to score. Noise of a random length
precedes each episode, so episodes may start anywhere in a segment.

Dims: B streams, L segment, D model, V vocabulary, T tokens of a text.
"""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import jax.numpy as jnp
import numpy as np
from jax import Array

from txl_jax.data.options import SPLITS
from txl_jax.data.streams import Streams
from txl_jax.evaluate import reader
from txl_jax.evaluate.options import evaluation_model
from txl_jax.model.fixed import FixedTransformerXL
from txl_jax.model.segment import OneSegment
from txl_jax.runtime.storage import Json, write_atomically
from txl_jax.workdir.load import Loaded

NOISE = b"0123456789"
CUE = b">"
PATTERN = b"ABCDEFGHIJKLMNOPQRSTUVWXYZ"
FIRST_ANSWER = ord("a")  # bytes from here on are answers
SIZES = {"train": 4_000_000, "valid": 100_000, "test": 100_000}  # approximate bytes


def draw_letters(bits: bytes, symbols: int) -> bytes:
    """Returns one of the first `symbols` letters for each byte."""
    return bytes(PATTERN[x * symbols // 256] for x in bits)


def draw_noise(bits: bytes) -> bytes:
    """Returns a digit for each byte."""
    return bytes(NOISE[x * len(NOISE) // 256] for x in bits)


@dataclass(frozen=True)
class Copying:
    """A pattern, a delay of noise, and the pattern again.

        3 7 1 A C B D 5 0 ... 2 9 > a c b d 6 2 B ...

    The next letter of an answer occurs only `distance` tokens back.
    """

    kind: ClassVar[str] = "copying"

    delay: int  # bytes of noise between a pattern and its cue
    length: int  # letters in a pattern
    symbols: int  # letters to choose from, at most 26

    @property
    def name(self) -> str:
        """The name of the text's folder."""
        return f"{self.kind}-{self.delay}-{self.length}-{self.symbols}"

    @property
    def distance(self) -> int:
        """The largest number of tokens between an answer and the letter it repeats."""
        return self.length + self.delay

    def text(self, split: str) -> bytes:
        """Returns a split's episodes, which are the same on every machine."""
        text = bytearray()
        number = 0
        while len(text) < SIZES[split]:
            # Unlike functions of `random`, SHAKE-256 is the same in every version.
            key = f"{self.kind} {self.name.partition('-')[2]}-0 {split} {number}"
            text += self.episode(hashlib.shake_256(key.encode()).digest)
            number += 1
        return bytes(text)

    def episode(self, draw: Callable[[int], bytes]) -> bytes:
        """Returns noise of 0 to `length` bytes, pattern, delay, cue and answer.

        draw: returns a given number of random bytes.
        """
        bits = draw(1 + self.length + self.length + self.delay)
        gap = bits[0] * (self.length + 1) // 256
        pattern = draw_letters(bits[1:][: self.length], self.symbols)
        noise = draw_noise(bits[1 + self.length :])
        before, delay = noise[:gap], noise[self.length :]
        return before + pattern + delay + CUE + pattern.lower()

    def write(self, parent: Path) -> Path:
        """Returns the folder `name` in `parent`, with a file for each split, made once.

        The corpus "text" reads it; with train.score_from = 97 only answers are scored.
        """
        folder = parent / self.name
        folder.mkdir(parents=True, exist_ok=True)
        for split in SPLITS:
            if not (path := folder / f"{split}.txt").exists():
                write_atomically(path, self.text(split))
        return folder


@dataclass(frozen=True)
class Recall(Copying):
    """Pairs of a key and a value, a delay, and each key again.

        5 2 H C A B 7 1 ... 4 > A b > H c

    ">" and a key ask for the key's value. Unlike in copying, no distance leads to an
    answer: the keys differ, and they are asked for in another order.
    """

    kind: ClassVar[str] = "recall"  # `length` counts pairs, at most as many as keys
    keys: ClassVar[bytes] = PATTERN

    @property
    def distance(self) -> int:
        """The largest distance of an answer: the first value may be asked for last."""
        return self.delay + 5 * self.length - 2

    def episode(self, draw: Callable[[int], bytes]) -> bytes:
        """Returns noise of 0 to 2 `length` bytes, pairs, delay and questions."""
        pairs = self.length
        ranks = 2 * (len(self.keys) + pairs)
        bits = draw(ranks + pairs + 1 + 2 * pairs + self.delay)
        rank = np.frombuffer(bits[:ranks], "<u2")
        keys = np.argsort(rank[: len(self.keys)], kind="stable")[:pairs]
        asked = np.argsort(rank[len(self.keys) :], kind="stable")
        values = draw_letters(bits[ranks:][:pairs], self.symbols)
        gap, noise = bits[ranks + pairs], draw_noise(bits[ranks + pairs + 1 :])
        made = [bytes((self.keys[keys[i]], values[i])) for i in range(pairs)]
        before, delay = noise[: gap * (2 * pairs + 1) // 256], noise[2 * pairs :]
        questions = (CUE + made[i][:1] + made[i][1:].lower() for i in asked)
        return before + b"".join(made) + delay + b"".join(questions)


@dataclass(frozen=True)
class MultiQuery(Recall):
    """Recall whose keys and values have 13 letters each (Arora et al. 2024, MQAR)."""

    kind: ClassVar[str] = "multi_query"
    keys: ClassVar[bytes] = PATTERN[13:]


TEXTS = {task.kind: task for task in (Copying, Recall, MultiQuery)}


@reader.from_hidden
def count_segment(
    model: FixedTransformerXL, hidden_BLD: Array, segment: OneSegment
) -> Array:
    """Returns [answers, right answers, their nll in nats] of one segment."""
    log_probs_BLV = model.embedding.log_probs(hidden_BLD)
    targets_BL, weights_BL = segment.targets_BL, segment.weights_BL
    nll_BL = -jnp.take_along_axis(log_probs_BLV, targets_BL[..., None], -1)[..., 0]
    right_BL = jnp.argmax(log_probs_BLV, axis=-1) == targets_BL
    return jnp.stack([jnp.sum(weights_BL * x_BL) for x_BL in (1, right_BL, nll_BL)])


def count_answers(loaded: Loaded, text_T: np.ndarray) -> Json:
    """Returns the number of answers, the share of right ones, and their mean nll.

    An answer is right if it is the likeliest token, given the letters before it.
    """
    options = loaded.config.eval
    B, L = options.streams, options.tgt_len
    model = evaluation_model(loaded.model.config, options)
    read = reader.Reader(model, count_segment, B, L, loaded.mesh)
    streams = Streams(text_T, B, L, score_from=FIRST_ANSWER)
    sums = [*read.read(loaded.params, streams.epoch())]
    answers, right, nll = np.asarray(sums, np.float64).sum(axis=0).tolist()
    share, nats = right / answers, nll / answers
    return {"answers": int(answers), "accuracy": share, "nll_nats": nats}
