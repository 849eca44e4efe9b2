"""Encodes a corpus into token files."""

import collections
import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np

from txl_jax.data import number
from txl_jax.data import text as texts
from txl_jax.data import vocab as vocabulary
from txl_jax.data.catalog import Corpus
from txl_jax.data.corpora import Text
from txl_jax.data.number import NumberVocab
from txl_jax.data.options import SPLITS
from txl_jax.data.recipe import Recipe
from txl_jax.data.subword import SubwordVocab
from txl_jax.data.vocab import ByteVocab, CharVocab, Vocab
from txl_jax.data.word import WordVocab
from txl_jax.errors import UserError
from txl_jax.report.progress import Progress

CHUNK = 1 << 20  # tokens in memory at once
Part = TypeVar("Part")


@dataclass(frozen=True)
class Encoder:
    """Encodes the splits of a corpus as its recipe says."""

    corpus: Corpus
    recipe: Recipe
    text: Text

    def read(self, split: str, label: str, meter: texts.Meter) -> Iterator[bytes]:
        """Yields the blocks of a split under the convention, and reports progress."""
        progress = Progress(f"data: {label} {split}", in_bytes=True)
        for block in meter.read(self.text.read(split), self.recipe.drop_newlines):
            yield block
            progress.add(len(block))

    def name(self, split: str) -> str:
        """Returns the name of a split in errors."""
        return f"the {split} split of corpus {self.corpus.name!r}"

    def locating(self, split: str, parts: Iterator[Part]) -> Iterator[Part]:
        """Yields the parts of a split; names the file that is not UTF-8."""
        try:
            yield from parts
        except texts.NotUTF8 as error:
            if not self.text.locate:
                raise
            raise texts.NotUTF8(*self.text.locate(split, error.offset)) from error

    def encode(
        self, vocab: Vocab | None, folder: Path
    ) -> tuple[Vocab, texts.JsonObject]:
        """Writes the tokens of all splits.

        Returns the vocabulary, made from the text unless it is given, and the splits'
        entries in the manifest.
        """
        meters = {split: texts.Meter() for split in SPLITS}
        if vocab is None and self.recipe.kind == WordVocab.kind:
            vocab, arrays = self._encode_words(meters, folder)
        else:
            vocab = made = vocab or self._make_vocab()
            arrays = {
                split: self.locating(
                    split,
                    made.stream(self.read(split, "encoding", meter), self.name(split)),
                )
                for split, meter in meters.items()
            }
        entries = {
            split: self._write(split, arrays[split], vocab, folder)
            | ({} if vocab.kind == NumberVocab.kind else meter.counts())
            for split, meter in meters.items()
        }
        for split, entry in entries.items():
            if entry["tokens"] < 2:
                raise UserError(
                    f"corpus {self.corpus.name!r} is too small: its {split} split has "
                    f"{entry['tokens']} tokens and needs at least 2; add text"
                )
        return vocab, entries

    def _make_vocab(self) -> Vocab:
        recipe = self.recipe

        def read(split: str, label: str = "counting") -> tuple[Iterator[bytes], str]:
            return self.read(split, label, texts.Meter()), self.name(split)

        if recipe.kind == CharVocab.kind:
            of_bytes = recipe.of_bytes
            points = (
                self.locating(name, vocabulary.code_points(*read(name), of_bytes))
                for name in SPLITS
            )
            return CharVocab.count(points, of_bytes)
        if recipe.kind == SubwordVocab.kind:
            # Only from train, since valid and test are held out.
            lines = self.locating("train", texts.lines(*read("train", "learning from")))
            return SubwordVocab.train(lines, recipe.vocab_size)
        if recipe.kind == NumberVocab.kind:
            numbers = (read(name)[0] for name in SPLITS)
            return NumberVocab(recipe.vocab_size or number.largest(numbers) + 1)
        return ByteVocab()

    def _encode_words(
        self, meters: dict[str, texts.Meter], folder: Path
    ) -> tuple[WordVocab, dict[str, Iterator[np.ndarray]]]:
        """Returns the vocabulary of all words and the tokens of each split.

        One pass over the text, which is twice as fast as two: words are numbered by
        first occurrence, on disk, and tokens replace the numbers once the counts are
        known.
        """
        lines = self.recipe.lines
        numbers: dict[str, int] = collections.defaultdict()
        numbers.default_factory = numbers.__len__  # type: ignore[attr-defined]
        total = np.zeros(0, np.int64)
        for split, meter in meters.items():
            blocks = self.read(split, "counting", meter)
            with (folder / f"{split}.numbers").open("wb") as file:
                for words in self.locating(
                    split, lines.stream(blocks, self.name(split))
                ):
                    of_words = map(numbers.__getitem__, words)
                    array = np.fromiter(of_words, np.int32, len(words))
                    file.write(array.data)
                    if split in self.corpus.vocab_splits:
                        counts = np.bincount(array, minlength=len(numbers))
                        counts[: len(total)] += total
                        total = counts
        occurring = {w: int(n) for w, n in zip(numbers, total, strict=False) if n}
        vocab = WordVocab.choose(occurring, lines, self.recipe.vocab_size)
        tokens = vocab.look_up(list(numbers))

        def renumber(path: Path) -> Iterator[np.ndarray]:
            with path.open("rb") as file:
                while len(chunk := np.fromfile(file, np.int32, CHUNK)):
                    yield tokens[chunk]
            path.unlink()

        return vocab, {split: renumber(folder / f"{split}.numbers") for split in meters}

    def _write(
        self, split: str, arrays: Iterable[np.ndarray], vocab: Vocab, folder: Path
    ) -> texts.JsonObject:
        tokens = unknowns = 0
        digest = hashlib.sha256()
        with (folder / f"{split}.bin").open("wb") as file:
            for array in arrays:
                file.write(array.data)
                digest.update(array.data)
                tokens += len(array)
                if vocab.unknown >= 0:
                    unknowns += int(np.count_nonzero(array == vocab.unknown))
        return {"tokens": tokens, "unknowns": unknowns, "sha256": digest.hexdigest()}
