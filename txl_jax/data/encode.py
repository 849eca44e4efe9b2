"""Encodes a corpus into token files."""

import hashlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from txl_jax.data import corpora
from txl_jax.data import text as texts
from txl_jax.data import vocab as vocabulary
from txl_jax.data.options import SPLITS
from txl_jax.data.recipe import Recipe
from txl_jax.data.subword import SubwordVocab
from txl_jax.data.vocab import ByteVocab, CharVocab, Vocab
from txl_jax.data.word import WordCounter
from txl_jax.errors import UserError
from txl_jax.report.progress import Progress

CHUNK = 1 << 20  # tokens in memory at once

Blocks = Callable[[str], Iterator[bytes]]  # by the name of the split


def split_file(folder: Path, name: str) -> Path:
    """Returns the token file of a split."""
    return folder / f"{name}.bin"


@dataclass(frozen=True)
class Encoder:
    """Encodes the splits of a corpus into a folder.

    `encode` and `count` return the vocabulary and the manifest's entry of each split.
    """

    source: corpora.Source
    recipe: Recipe
    folder: Path
    blocks: Blocks
    say: Callable[[str], None]

    def read(
        self, split: str, label: str, meter: texts.Meter | None = None
    ) -> Iterator[bytes]:
        """Yields the blocks of a split under the convention, and reports progress."""
        progress = Progress(f"data: {label} {split}", in_bytes=True, say=self.say)
        meter = meter or texts.Meter()
        for block in meter.read(self.blocks(split), self.recipe.drop_newlines):
            yield block
            progress.add(len(block))

    def name(self, split: str) -> str:
        """Returns the name of a split in errors."""
        return f"the {split} split of corpus {self.source.corpus.name!r}"

    def encode(self, vocab: Vocab | None) -> tuple[Vocab, dict[str, Any]]:
        """Encodes every split, after another pass if there is no vocabulary yet."""
        vocab = vocab or self._find_vocab()
        splits = {}
        for split in SPLITS:
            meter = texts.Meter()
            blocks = self.read(split, "encoding", meter)
            arrays = vocab.stream(blocks, self.name(split))
            splits[split] = self._write(split, arrays, vocab, meter)
        return vocab, splits

    def _find_vocab(self) -> Vocab:
        kind, of_bytes = self.recipe.kind, self.recipe.of_bytes
        if kind == CharVocab.kind:
            return CharVocab.count(
                (
                    vocabulary.code_points(
                        self.read(split, "counting"), self.name(split), of_bytes
                    )
                    for split in SPLITS
                ),
                of_bytes,
            )
        if kind == SubwordVocab.kind:
            # Only from train, since valid and test are held out.
            blocks = self.read("train", "learning from")
            lines = texts.lines(blocks, self.name("train"))
            return SubwordVocab.train(lines, self.recipe.vocab_size)
        return ByteVocab()

    def count(self) -> tuple[Vocab, dict[str, Any]]:
        """Counts and encodes words in one pass over the text.

        Provisional numbers are written to disk, and replaced by tokens once the counts
        are known. This is twice as fast as two passes and needs the memory of a block.
        """
        counter = WordCounter(self.recipe.lines)
        meters = {split: texts.Meter() for split in SPLITS}
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
                    block = tokens[numbers]
                    if block.min() < 0:
                        raise counter.missing(int(numbers[block < 0][0]))
                    yield block.astype(vocab.dtype)
            path.unlink()

        splits = {}
        for split, meter in meters.items():
            arrays = renumber(self._numbers(split))
            splits[split] = self._write(split, arrays, vocab, meter)
        return vocab, splits

    def _numbers(self, split: str) -> Path:
        return self.folder / f"{split}.numbers"

    def _write(
        self, split: str, arrays: Iterable[np.ndarray], vocab: Vocab, meter: texts.Meter
    ) -> dict[str, Any]:
        """Writes the tokens of a split; returns its entry in the manifest."""
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
                f"{self.name(split)} has {tokens} tokens and needs at least 2: add text"
            )
        return {
            "tokens": tokens,
            "unknowns": unknowns,
            "sha256": digest.hexdigest(),
            "bytes": meter.stream_bytes,
            "original_bytes": meter.original_bytes,
            "words": meter.words,
            "lines": meter.lines,
        }
