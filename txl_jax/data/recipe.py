"""Recipes: everything that determines the tokens of a corpus.

The hash of a recipe is the name of the folder of the token files.
"""

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

from txl_jax.data import vocab as vocabulary
from txl_jax.data.byte_ranges import checksum
from txl_jax.data.catalog import CORPORA, Corpus
from txl_jax.data.number import NumberVocab
from txl_jax.data.options import OWN, DataConfig
from txl_jax.data.word import Lines, WordVocab
from txl_jax.errors import UserError, require_one_of
from txl_jax.runtime import storage

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
) -> tuple[Recipe, vocabulary.Vocab | None]:
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


def _read_vocab(config: DataConfig, corpus: Corpus, path: str) -> vocabulary.Vocab:
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
