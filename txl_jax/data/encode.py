"""Encodes a corpus into token files by a recipe, which determines the tokens.

The hash of a recipe is the name of the folder of the token files.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from txl_jax.data import number
from txl_jax.data import text as texts
from txl_jax.data import vocab as vocabulary
from txl_jax.data.byte_ranges import checksum
from txl_jax.data.catalog import CORPORA, Corpus
from txl_jax.data.corpora import SplitReader
from txl_jax.data.number import NumberVocab
from txl_jax.data.options import FROM_CORPUS, SPLITS, DataConfig
from txl_jax.data.subword import SubwordVocab
from txl_jax.data.vocab import ByteVocab, CharVocab, Vocab
from txl_jax.data.word import Lines, WordVocab
from txl_jax.errors import UserError, require_one_of
from txl_jax.report.progress import Progress
from txl_jax.runtime.storage import Json

BYTES = 256


class Convention(NamedTuple):
    """A way to read a corpus; published results differ in their convention."""

    kinds: tuple[str, ...]  # kinds of vocabulary
    lines: Lines = Lines("")  # for words: the marks of lines
    of_bytes: bool = False  # for characters: symbols are bytes
    drop_newlines: bool = False


CONVENTIONS = {
    # WikiText and PTB as in the paper, and other text as words.
    "lines": Convention(("word",), Lines("<eos>")),
    "text": Convention(("byte", "char", "subword")),  # unchanged
    # The paper's files have one symbol per byte and line, without byte 10.
    "newlines_deleted": Convention(("byte", "char"), of_bytes=True, drop_newlines=True),
    "newlines_kept": Convention(("byte", "char"), of_bytes=True),
    # One Billion Word as in the published 21.8: `<S> <S>` between two sentences.
    "tensorflow": Convention(("word",), Lines("<S>", "<S>")),
    "words": Convention(("word",), Lines("</S>")),
    "numbers": Convention(("number",)),
}


@dataclass(frozen=True)
class Recipe:
    """The way from text to tokens: equal recipes give equal tokens."""

    kind: str
    convention: str
    lines: Lines  # the words that mark lines
    of_bytes: bool
    drop_newlines: bool
    vocab_size: int
    vocab_sha256: str  # the vocabulary file's; "" = made from the corpus

    @property
    def folder(self) -> str:
        """The name of the folder: the kind of vocabulary and a hash."""
        state = json.dumps(asdict(self), sort_keys=True)
        return f"{self.kind}-{hashlib.sha256(state.encode()).hexdigest()[:16]}"


def resolve(
    config: DataConfig,
    corpus: Corpus,
    given: Path | None = None,
    published: Path | None = None,
) -> tuple[Recipe, Vocab | None]:
    """Returns the recipe, and the vocabulary if it is in a file.

    `given` is the file that the config names; `published` is the corpus's, used for
    words unless the config changes them.
    """
    kind = corpus.vocab if config.vocab == FROM_CORPUS else config.vocab
    as_published = kind == "word" and not config.vocab_size
    path = given or (published if as_published else None)
    vocab = _read_vocab(config, corpus, path) if path else None
    kind = vocab.kind if vocab else kind
    of_numbers = kind == NumberVocab.kind, corpus.vocab == NumberVocab.kind
    if config.vocab not in (FROM_CORPUS, kind) or len({*of_numbers}) > 1:
        raise UserError(
            f"data.corpus={corpus.name!r} and data.vocab={config.vocab!r} do not fit a "
            f"vocabulary of kind {kind!r}: set data.vocab={FROM_CORPUS!r}, and "
            "data.vocab_path to another one or to ''"
        )
    if config.vocab_size and (path or kind not in ("word", "subword", "number")):
        raise UserError(
            f"data.vocab_size={config.vocab_size} is not used with data.vocab={kind!r}"
            f" and data.vocab_path={config.vocab_path!r}: leave it out"
        )
    if kind == SubwordVocab.kind and not path and config.vocab_size < BYTES:
        raise UserError(
            f"data.vocab_size={config.vocab_size} must be at least {BYTES} for "
            "subwords (32000 is common), or set data.vocab_path to a tokenizer"
        )
    name, convention = _convention(config, corpus, kind)
    lines = convention.lines
    if isinstance(vocab, WordVocab):
        lines = vocab.lines
        names = {each.lines: name for name, each in CONVENTIONS.items()}
        name = names.get(lines._replace(lower_case=False), "vocabulary's own")
    recipe = Recipe(
        kind=kind,
        convention=name,
        lines=lines,
        of_bytes=convention.of_bytes and kind == "char",
        drop_newlines=convention.drop_newlines,
        vocab_size=config.vocab_size,
        vocab_sha256=checksum(path) if path else "",
    )
    return recipe, vocab


def drops_newlines(config: DataConfig, kind: str) -> bool:
    """Returns whether tokens of a kind of vocabulary omit byte 10 of the corpus."""
    corpus = CORPORA[config.corpus.partition(":")[0]]
    return _convention(config, corpus, kind)[1].drop_newlines


def _read_vocab(config: DataConfig, corpus: Corpus, path: Path) -> Vocab:
    """Returns the vocabulary of a file, with the config's marks of lines."""

    def marked(words: list[str]) -> WordVocab:
        return WordVocab(words, _convention(config, corpus, "word")[1].lines)

    vocab = vocabulary.read_file(path, marked)
    if isinstance(vocab, WordVocab) and config.convention:
        return marked(vocab.words)
    return vocab


def _convention(
    config: DataConfig, corpus: Corpus, kind: str
) -> tuple[str, Convention]:
    """Returns the name and the convention; the default is the first for the kind."""
    names = [name for name in corpus.conventions if kind in CONVENTIONS[name].kinds]
    known = names or ["lines" if kind == "word" else "text"]
    name = config.convention or known[0]
    require_one_of(name, known, "data.convention")
    convention = CONVENTIONS[name]
    lower = kind == "word" and corpus.lower
    return name, convention._replace(lines=convention.lines._replace(lower_case=lower))


@dataclass(frozen=True)
class Encoder:
    """Encodes the splits of a corpus by its recipe."""

    corpus: Corpus
    recipe: Recipe
    text: SplitReader

    def encode(self, vocab: Vocab | None, folder: Path) -> tuple[Vocab, Json]:
        """Writes the tokens of all splits.

        Returns the vocabulary, made from the text unless it is given, and the splits'
        entries in the manifest.
        """
        try:
            vocab = vocab or self._make_vocab()
            return vocab, {x: self._write(x, vocab, folder) for x in SPLITS}
        except texts.NotUTF8 as error:
            if not self.text.locate:
                raise
            split = next(split for split in SPLITS if self._name(split) == error.name)
            raise texts.NotUTF8(*self.text.locate(split, error.offset)) from error

    def _name(self, split: str) -> str:
        return f"the {split} split of corpus {self.corpus.name!r}"

    def _read(
        self, split: str, label: str = "counting", meter: texts.Meter | None = None
    ) -> Iterator[bytes]:
        """Yields the blocks of a split under the convention, and reports progress."""
        progress = Progress(f"data: {label} {split}", unit="bytes")
        meter = meter or texts.Meter()
        for block in meter.measure(self.text.read(split), self.recipe.drop_newlines):
            yield block
            progress.update(len(block))

    def _make_vocab(self) -> Vocab:
        recipe = self.recipe
        if recipe.kind == CharVocab.kind:
            points = (
                vocabulary.code_points(self._read(x), self._name(x), recipe.of_bytes)
                for x in SPLITS
            )
            return CharVocab.count(points, recipe.of_bytes)
        if recipe.kind == SubwordVocab.kind:
            # Only train, because valid and test are held out.
            blocks = self._read("train", "learning from")
            lines = texts.lines(blocks, self._name("train"))
            return SubwordVocab.train(lines, recipe.vocab_size)
        if recipe.kind == WordVocab.kind:
            counts: Counter[str] = Counter()
            for split in self.corpus.vocab_splits:
                blocks = self._read(split)
                for words in recipe.lines.stream(blocks, self._name(split)):
                    counts.update(words)
            return WordVocab.choose(counts, recipe.lines, recipe.vocab_size)
        if recipe.kind == NumberVocab.kind:
            size = recipe.vocab_size or number.largest(map(self._read, SPLITS)) + 1
            return NumberVocab(size)
        return ByteVocab()

    def _write(self, split: str, vocab: Vocab, folder: Path) -> Json:
        """Writes the tokens of a split; returns its entry in the manifest."""
        tokens = unknowns = 0
        digest, meter = hashlib.sha256(), texts.Meter()
        blocks = self._read(split, "encoding", meter)
        with (folder / f"{split}.bin").open("wb") as file:
            for array in vocab.stream(blocks, self._name(split)):
                file.write(array.data)
                digest.update(array.data)
                tokens += len(array)
                if vocab.unknown >= 0:
                    unknowns += int(np.count_nonzero(array == vocab.unknown))
        if tokens < 2:
            raise UserError(
                f"corpus {self.corpus.name!r} is too small: its {split} split has "
                f"{tokens} tokens and needs at least 2; add text"
            )
        counts = {} if vocab.kind == NumberVocab.kind else meter.counts()
        sums = {"tokens": tokens, "unknowns": unknowns, "sha256": digest.hexdigest()}
        return sums | counts
