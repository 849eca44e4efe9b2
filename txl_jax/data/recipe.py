"""What a run asks of its text, and what that means for a corpus.

A recipe says everything that decides which tokens a corpus becomes; its hash names the
folder of the token files.

Dims: none.
"""

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path

from txl_jax.data import corpora
from txl_jax.data import vocab as vocabulary
from txl_jax.data.copying import Task
from txl_jax.data.vocab import VOCABULARIES
from txl_jax.data.word import Lines, WordVocab
from txl_jax.errors import UserError, nearest, require, require_one_of

COPY = ("copy_delay", "copy_length", "copy_symbols", "copy_seed")
OWN = "corpus"  # data.vocab: the kind that the corpus's published results have
BYTES = 256


@dataclass(frozen=True)
class DataConfig:
    """Which text a run reads and how it is cut into tokens."""

    corpus: str = "stdlib"  # a name in corpora.CORPORA
    path: str = ""  # corpus "text" only: a file, a folder or a glob
    data_dir: str = ""  # where prepared data lies, also gs://; "" = TFDS's own default
    vocab: str = OWN  # byte, char, word or subword; "corpus" = as published
    convention: str = ""  # a name in CONVENTIONS; "" = the corpus's published one
    vocab_path: str = ""  # a tokenizer.json, .model, vocab.json or list of words
    vocab_size: int = 0  # at most so many words, or so many subwords; 0 = all words
    min_count: int = 0  # words seen less often are <unk>
    lower_case: bool = False  # words in lower case, also where the corpus's are not
    copy_delay: int = 0  # corpus "copying" only: bytes of noise before the answer
    copy_length: int = 0  # letters of a pattern
    copy_symbols: int = 0  # letters to choose from, 26 at most
    copy_seed: int = 0  # of the text

    def __post_init__(self) -> None:
        """Refuses impossible values, naming the field."""
        require(self, "data", 0, "vocab_size", "min_count", "copy_seed")
        given = [name for name in COPY if getattr(self, name)]
        if self.corpus != "copying" and given:
            raise UserError(
                f"data.{given[0]} = {getattr(self, given[0])} is for "
                f"data.corpus='copying': leave it out for {self.corpus!r}"
            )
        if self.vocab not in (OWN, *VOCABULARIES):
            known = [OWN, *VOCABULARIES]
            raise UserError(
                f"data.vocab={self.vocab!r}: vocabulary {self.vocab!r} is unknown"
                f"{nearest(self.vocab, known)}; known are: {', '.join(known)}"
            )

    @property
    def task(self) -> Task:
        """The copying task; all zero for another corpus."""
        return Task(
            self.copy_delay, self.copy_length, self.copy_symbols, self.copy_seed
        )


@dataclass(frozen=True)
class Convention:
    """One way to read a corpus, where the references disagree or a kind needs one."""

    kinds: tuple[str, ...]  # of vocabulary, that it is for
    eos: str = ""  # words: what ends a line
    bos: str = ""  # words: what begins a line
    of_bytes: bool = False  # char: symbols are bytes
    drop_newlines: bool = False


CONVENTIONS = {
    # WikiText and PTB as in the paper, and the text of words of whoever asks for them.
    "lines": Convention(("word",), eos="<eos>"),
    "text": Convention(("byte", "char", "subword")),  # every character as it stands
    # The paper's files held one symbol a byte, and byte 10 fell to the line splitting.
    "newlines_deleted": Convention(("byte", "char"), "", "", True, True),
    "newlines_kept": Convention(("byte", "char"), of_bytes=True),
    # One Billion Word behind the published 21.8: `<S> <S>` between two sentences.
    "tensorflow": Convention(("word",), eos="<S>", bos="<S>"),
    "words": Convention(("word",), eos="</S>"),
}


@dataclass(frozen=True)
class Recipe:
    """How the text of a corpus becomes tokens; equal recipes give equal tokens."""

    kind: str
    convention: str
    lines: Lines  # how lines become words
    of_bytes: bool
    drop_newlines: bool
    vocab_size: int
    min_count: int
    vocab_sha256: str  # of the given vocabulary's file; "" = made from the corpus

    @property
    def folder(self) -> str:
        """The name of the token files' folder: the kind and a hash of the rest."""
        state = json.dumps(asdict(self), sort_keys=True)
        return f"{self.kind}-{hashlib.sha256(state.encode()).hexdigest()[:16]}"


def resolve(
    config: DataConfig, corpus: corpora.Corpus, published: Path | None = None
) -> tuple[Recipe, vocabulary.Vocab | None]:
    """Returns the recipe, and the vocabulary where one is given.

    `published` is the corpus's own vocabulary file, taken for words unless the config
    has its own wishes. Raises UserError for settings that do not go together.
    """
    kind = corpus.vocab if config.vocab == OWN else config.vocab
    given = config.vocab_path
    wished = config.vocab_size or config.min_count or config.lower_case
    if published and kind == "word" and not given and not wished:
        given = str(published)
    vocab = _given(config, corpus, given) if given else None
    kind = vocab.kind if vocab else kind
    _refuse_idle(config, kind)
    name = _convention(config, corpus, kind)
    how = CONVENTIONS[name]
    lines = _lines(config, corpus, kind)
    if isinstance(vocab, WordVocab):
        lines = vocab.lines
        marks = {(each.eos, each.bos): name for name, each in CONVENTIONS.items()}
        name = marks.get((lines.eos, lines.bos), "vocabulary's own")
    recipe = Recipe(
        kind=kind,
        convention=name,
        lines=lines,
        of_bytes=how.of_bytes and kind == "char",
        drop_newlines=how.drop_newlines,
        vocab_size=config.vocab_size,
        min_count=config.min_count,
        vocab_sha256=_sha256(given) if given else "",
    )
    return recipe, vocab


def drops_newlines(config: DataConfig, kind: str) -> bool:
    """Returns whether the corpus's text loses byte 10 on its way to tokens of a kind.

    A text that is to be read like the corpus then has to lose it too.
    """
    name = config.corpus
    if name.startswith(corpora.TFDS_PREFIX):
        name = corpora.TFDS_PREFIX.rstrip(":")
    return CONVENTIONS[_convention(config, corpora.CORPORA[name], kind)].drop_newlines


def _given(config: DataConfig, corpus: corpora.Corpus, given: str) -> vocabulary.Vocab:
    """Returns the vocabulary of a file.

    Its own marks of a line stay, but for those that the config names.
    """
    if config.vocab_size or config.min_count:
        raise UserError(
            "data.vocab_path brings its own words: leave data.vocab_size and "
            "data.min_count at 0"
        )

    def lines() -> Lines:
        return _lines(config, corpus, "word")

    vocab = vocabulary.read(Path(given).expanduser(), lines)
    if config.vocab not in (OWN, vocab.kind):
        raise UserError(
            f"data.vocab_path={given!r} holds a vocabulary of kind {vocab.kind!r}, "
            f"not data.vocab={config.vocab!r}: leave data.vocab at {OWN!r}"
        )
    if isinstance(vocab, WordVocab) and (config.convention or config.lower_case):
        return WordVocab(vocab.words, lines())
    return vocab


def _sha256(path: str) -> str:
    return hashlib.sha256(Path(path).expanduser().read_bytes()).hexdigest()


def _lines(config: DataConfig, corpus: corpora.Corpus, kind: str) -> Lines:
    how = CONVENTIONS[_convention(config, corpus, kind)]
    lower = kind == "word" and (config.lower_case or corpus.lower)
    return Lines(how.eos, how.bos, lower)


def _convention(config: DataConfig, corpus: corpora.Corpus, kind: str) -> str:
    """Returns the convention's name; the published one is the first for its kind."""
    own = [name for name in corpus.conventions if kind in CONVENTIONS[name].kinds]
    known = own or ["lines" if kind == "word" else "text"]
    if not config.convention:
        return known[0]
    if config.convention in corpus.conventions and not own:
        kinds = " or ".join(map(repr, CONVENTIONS[config.convention].kinds))
        raise UserError(
            f"data.convention={config.convention!r} is for data.vocab={kinds}, not "
            f"{kind!r}: leave it empty, or change data.vocab"
        )
    require_one_of(config.convention, known, "data.convention")
    return config.convention


def _refuse_idle(config: DataConfig, kind: str) -> None:
    """Raises UserError for settings that the kind of vocabulary has no use for."""
    uses = {
        "word": ("vocab_size", "min_count", "lower_case"),
        "subword": ("vocab_size",),
    }
    for name in ("vocab_size", "min_count", "lower_case"):
        if getattr(config, name) and name not in uses.get(kind, ()):
            raise UserError(
                f"data.{name}={getattr(config, name)} has no meaning for "
                f"data.vocab={kind!r}: leave it out, or use data.vocab='word'"
            )
    if kind == "subword" and not config.vocab_path and config.vocab_size < BYTES:
        raise UserError(
            f"data.vocab_size={config.vocab_size} is too small for subwords: set it to "
            f"the number to learn, {BYTES} at least (32000 is common), or set "
            "data.vocab_path to a tokenizer"
        )
