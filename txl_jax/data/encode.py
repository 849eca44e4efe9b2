"""Encodes a corpus into token files by a recipe, which determines the tokens.

The hash of a recipe is the name of the folder of the token files.
"""

import collections
import hashlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple, TypeVar

import numpy as np

from txl_jax.data import number
from txl_jax.data import text as texts
from txl_jax.data import vocab as vocabulary
from txl_jax.data.byte_ranges import checksum
from txl_jax.data.catalog import CORPORA, Corpus
from txl_jax.data.corpora import Text
from txl_jax.data.number import NumberVocab
from txl_jax.data.options import OWN, SPLITS, DataConfig
from txl_jax.data.subword import SubwordVocab
from txl_jax.data.vocab import ByteVocab, CharVocab, Vocab
from txl_jax.data.word import Lines, WordVocab
from txl_jax.errors import UserError, require_one_of
from txl_jax.report.progress import Progress
from txl_jax.runtime import storage
from txl_jax.runtime.storage import Json

CHUNK = 1 << 20  # tokens in memory at once
Part = TypeVar("Part")
BYTES = 256


class Convention(NamedTuple):
    """One way to read a corpus; published results differ in their convention."""

    kinds: tuple[str, ...]  # of vocabulary
    lines: Lines = Lines("")  # words: the marks of lines
    of_bytes: bool = False  # char: symbols are bytes
    drop_newlines: bool = False


CONVENTIONS = {
    # WikiText and PTB as in the paper, and other text as words.
    "lines": Convention(("word",), Lines("<eos>")),
    "text": Convention(("byte", "char", "subword")),  # unchanged
    # The paper's files have one symbol per byte and line, without byte 10.
    "newlines_deleted": Convention(("byte", "char"), Lines(""), True, True),
    "newlines_kept": Convention(("byte", "char"), of_bytes=True),
    # One Billion Word as for the published 21.8: `<S> <S>` between two sentences.
    "tensorflow": Convention(("word",), Lines("<S>", "<S>")),
    "words": Convention(("word",), Lines("</S>")),
    "numbers": Convention(("number",)),
}


@dataclass(frozen=True)
class Recipe:
    """How text becomes tokens: equal recipes give equal tokens."""

    kind: str
    convention: str
    lines: Lines  # how lines become words
    of_bytes: bool
    drop_newlines: bool
    vocab_size: int
    vocab_sha256: str  # of the vocabulary's file; "" = made from the corpus

    @property
    def folder(self) -> str:
        """The name of the folder: the kind of vocabulary and a hash."""
        state = json.dumps(asdict(self), sort_keys=True)
        return f"{self.kind}-{hashlib.sha256(state.encode()).hexdigest()[:16]}"


def resolve(
    config: DataConfig, corpus: Corpus, published: Path | None = None
) -> tuple[Recipe, Vocab | None]:
    """Returns the recipe, and the vocabulary if it is in a file.

    `published` is the corpus's vocabulary file, used for words unless the config
    changes them.
    """
    kind = corpus.vocab if config.vocab == OWN else config.vocab
    path = config.vocab_path
    if published and kind == "word" and not path and not config.vocab_size:
        path = str(published)
    vocab = _read_vocab(config, corpus, path) if path else None
    kind = vocab.kind if vocab else kind
    if (kind == NumberVocab.kind) != (corpus.vocab == NumberVocab.kind):
        raise UserError(
            f"the vocabulary of data.corpus={corpus.name!r} cannot be of kind "
            f"{kind!r}: set data.vocab={OWN!r}, and data.vocab_path to one of its own "
            "or to ''"
        )
    _refuse_idle(config, kind)
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
        vocab_sha256=checksum(_path(path)) if path else "",
    )
    return recipe, vocab


def drops_newlines(config: DataConfig, kind: str) -> bool:
    """Returns whether tokens of a kind of vocabulary omit byte 10 of the corpus."""
    corpus = CORPORA[config.corpus.partition(":")[0]]
    return _convention(config, corpus, kind)[1].drop_newlines


def _path(path: str) -> Path:
    if storage.is_remote(path):
        return storage.remote_path(path, "data.vocab_path")
    return Path(path).expanduser()


def _read_vocab(config: DataConfig, corpus: Corpus, path: str) -> Vocab:
    """Returns the vocabulary of a file, with the config's marks of lines."""
    if config.vocab_size:
        raise UserError(
            "data.vocab_path determines the words: leave data.vocab_size at 0"
        )

    def marked(words: list[str]) -> WordVocab:
        return WordVocab(words, _convention(config, corpus, "word")[1].lines)

    vocab = vocabulary.read(_path(path), marked)
    if config.vocab not in (OWN, vocab.kind):
        raise UserError(
            f"data.vocab_path={path!r} is a vocabulary of kind {vocab.kind!r}, "
            f"not data.vocab={config.vocab!r}: set data.vocab_path='', or "
            f"data.vocab={OWN!r}"
        )
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


def _refuse_idle(config: DataConfig, kind: str) -> None:
    """Raises UserError for fields that the kind of vocabulary does not use."""
    if config.vocab_size and kind not in ("word", "subword", "number"):
        raise UserError(
            f"data.vocab_size={config.vocab_size} is not used with data.vocab={kind!r}"
            ": leave it out, or set data.vocab='word'"
        )
    if kind == "subword" and not config.vocab_path and config.vocab_size < BYTES:
        raise UserError(
            f"data.vocab_size={config.vocab_size} must be at least {BYTES} for "
            "subwords (32000 is common), or set data.vocab_path to a tokenizer"
        )


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
            progress.update(len(block))

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

    def encode(self, vocab: Vocab | None, folder: Path) -> tuple[Vocab, Json]:
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
    ) -> Json:
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
