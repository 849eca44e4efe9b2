"""From a corpus's blocks to token files: one pass over words, two over the rest.

Dims: none.
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from txl_jax.data import corpora
from txl_jax.data import text as texts
from txl_jax.data import vocab as vocabulary
from txl_jax.data.progress import Progress, Say
from txl_jax.data.recipe import Recipe
from txl_jax.data.subword import SubwordVocab
from txl_jax.data.vocab import ByteVocab, CharVocab, Vocab
from txl_jax.data.word import WordCounter
from txl_jax.errors import UserError

CHUNK = 1 << 20  # tokens worked on at once

Blocks = Callable[[str], Iterator[bytes]]  # of the split of a name


def split_file(folder: Path, name: str) -> Path:
    """Returns the token file of a split."""
    return folder / f"{name}.bin"


@dataclass(frozen=True)
class Encoder:
    """The splits of one corpus on their way into one folder.

    `encode` and `count` return the vocabulary and each split's entry in the manifest.
    """

    source: corpora.Source
    recipe: Recipe
    folder: Path
    blocks: Blocks
    say: Say

    def read(
        self, split: str, what: str, meter: texts.Meter | None = None
    ) -> Iterator[bytes]:
        """Yields a split's blocks as the convention has them, saying how far it is."""
        progress = Progress(self.say, f"{what} {split}", 0)
        meter = meter or texts.Meter()
        for block in meter.read(self.blocks(split), self.recipe.drop_newlines):
            yield block
            progress.add(len(block))

    def name(self, split: str) -> str:
        """Returns what an error calls a split."""
        return f"the {split} split of corpus {self.source.corpus.name!r}"

    def encode(self, vocab: Vocab | None) -> tuple[Vocab, dict[str, Any]]:
        """Encodes every split with a vocabulary that is given, or found in a pass."""
        vocab = vocab or self._find_vocab()
        splits = {}
        for split in corpora.SPLITS:
            meter = texts.Meter()
            blocks = self.read(split, "encoding", meter)
            arrays = vocab.stream(blocks, self.name(split))
            entry = self._write(split, arrays, vocab)
            splits[split] = entry | _measured(meter)
        return vocab, splits

    def _find_vocab(self) -> Vocab:
        kind, of_bytes = self.recipe.kind, self.recipe.of_bytes
        if kind == CharVocab.kind:
            return CharVocab.count(
                (
                    vocabulary.code_points(
                        self.read(split, "counting"), self.name(split), of_bytes
                    )
                    for split in corpora.SPLITS
                ),
                of_bytes,
            )
        if kind == SubwordVocab.kind:
            # From train alone: what valid and test say is not to be learned from.
            blocks = self.read("train", "learning from")
            lines = texts.lines(blocks, self.name("train"))
            return SubwordVocab.train(lines, self.recipe.vocab_size)
        return ByteVocab()

    def count(self) -> tuple[Vocab, dict[str, Any]]:
        """Counts and encodes words in one pass over the text.

        Provisional numbers go to disk, and become tokens once the counts are known:
        twice as fast as splitting the text twice, in the memory of one block.
        """
        counter = WordCounter(self.recipe.lines)
        meters = {split: texts.Meter() for split in corpora.SPLITS}
        for split, meter in meters.items():
            counted = split in self.source.corpus.vocab_splits
            blocks = self.read(split, "counting", meter)
            with self._numbers(split).open("wb") as file:
                for numbers in counter.stream(blocks, self.name(split), counted):
                    file.write(numbers.data)
        vocab, tokens = counter.finish(self.recipe.min_count, self.recipe.vocab_size)

        def renumber(path: Path) -> Iterator[np.ndarray]:
            with path.open("rb") as file:
                while len(numbers := np.fromfile(file, np.int32, CHUNK)):
                    found = tokens[numbers]
                    if found.min() < 0:
                        raise counter.missing(int(numbers[found < 0][0]))
                    yield found.astype(vocab.dtype)
            path.unlink()

        splits = {}
        for split, meter in meters.items():
            entry = self._write(split, renumber(self._numbers(split)), vocab)
            splits[split] = entry | _measured(meter)
        return vocab, splits

    def _numbers(self, split: str) -> Path:
        return self.folder / f"{split}.numbers"

    def _write(
        self, split: str, arrays: Iterable[np.ndarray], vocab: Vocab
    ) -> dict[str, Any]:
        """Writes the tokens of one split; returns its first entries in the manifest."""
        tokens = unknowns = 0
        digest = hashlib.sha256()
        with split_file(self.folder, split).open("wb") as file:
            for array in arrays:
                file.write(array.data)
                digest.update(array.data)
                tokens += len(array)
                if vocab.unknown >= 0:
                    unknowns += int(np.count_nonzero(array == vocab.unknown))
        if tokens < 2:
            raise UserError(
                f"{self.name(split)} has {tokens} tokens and needs at least 2 to score "
                "one: give it more text"
            )
        return {"tokens": tokens, "unknowns": unknowns, "sha256": digest.hexdigest()}


def _measured(meter: texts.Meter) -> dict[str, int]:
    return {
        "bytes": meter.stream_bytes,
        "original_bytes": meter.original_bytes,
        "words": meter.words,
        "lines": meter.lines,
    }
