"""Encodes a corpus into token files."""

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from txl_jax.data import text as texts
from txl_jax.data import vocab as vocabulary
from txl_jax.data.catalog import Corpus
from txl_jax.data.options import SPLITS
from txl_jax.data.recipe import Recipe
from txl_jax.data.subword import SubwordVocab
from txl_jax.data.vocab import ByteVocab, CharVocab, Vocab
from txl_jax.data.word import WordVocab
from txl_jax.errors import UserError
from txl_jax.report.progress import Progress


@dataclass(frozen=True)
class Encoder:
    """Reads the splits of a corpus as its recipe says, and encodes them."""

    corpus: Corpus
    recipe: Recipe
    blocks: Callable[[str], Iterator[bytes]]  # by the name of the split
    say: Callable[[str], None]

    def read(self, split: str, label: str, meter: texts.Meter) -> Iterator[bytes]:
        """Yields the blocks of a split under the convention, and reports progress."""
        progress = Progress(f"data: {label} {split}", in_bytes=True, say=self.say)
        for block in meter.read(self.blocks(split), self.recipe.drop_newlines):
            yield block
            progress.add(len(block))

    def name(self, split: str) -> str:
        """Returns the name of a split in errors."""
        return f"the {split} split of corpus {self.corpus.name!r}"

    def make_vocab(self) -> Vocab:
        """Returns the vocabulary of the corpus, after reading the text if needed."""
        recipe = self.recipe

        def read(split: str, label: str = "counting") -> tuple[Iterator[bytes], str]:
            return self.read(split, label, texts.Meter()), self.name(split)

        if recipe.kind == CharVocab.kind:
            of_bytes = recipe.of_bytes
            points = (vocabulary.code_points(*read(name), of_bytes) for name in SPLITS)
            return CharVocab.count(points, of_bytes)
        if recipe.kind == WordVocab.kind:
            counted = self.corpus.vocab_splits
            words = (recipe.lines.stream(*read(name)) for name in counted)
            limits = recipe.min_count, recipe.vocab_size
            return WordVocab.count(words, recipe.lines, *limits)
        if recipe.kind == SubwordVocab.kind:
            # Only from train, since valid and test are held out.
            lines = texts.lines(*read("train", "learning from"))
            return SubwordVocab.train(lines, recipe.vocab_size)
        return ByteVocab()

    def encode(self, split: str, vocab: Vocab, folder: Path) -> dict[str, Any]:
        """Writes the tokens of a split; returns its entry in the manifest."""
        tokens = unknowns = 0
        digest, meter = hashlib.sha256(), texts.Meter()
        blocks = self.read(split, "encoding", meter)
        with (folder / f"{split}.bin").open("wb") as file:
            for array in vocab.stream(blocks, self.name(split)):
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
