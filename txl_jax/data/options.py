"""Options of the data: the corpus and its vocabulary."""

from dataclasses import dataclass

from txl_jax.fields import Role, Section, field, one_of

CORPUS_NAMES = tuple(
    "stdlib text tokens shakespeare enwik8 text8 wikitext103 wikitext2 lm1b ptb "
    "tfds".split()
)
CONVENTIONS = tuple(
    "lines text newlines_deleted newlines_kept tensorflow words numbers".split()
)
SPLITS = ("train", "valid", "test")
# Names of splits in other code bases' files and in TFDS.
SPLIT_NAMES = {split: split for split in SPLITS} | dict.fromkeys(
    ("val", "validation", "dev", "eval", "evaluation", "heldout"), "valid"
)
SPLIT_NAMES |= {"training": "train", "testing": "test"}
DTYPES = tuple("uint8 uint16 uint32 uint64 int8 int16 int32 int64".split())
FROM_CORPUS = "corpus"  # the kind of vocabulary in the corpus's published results
AGAIN = "delete it and prepare again"  # the advice for damaged data
CORPUS_MODES = (
    "train evaluate generate attention prepare import compile table speed recl"
)
STDIN = "-"  # a path of text
SLACK = 15  # a segment of varying length has at most tgt_len + SLACK tokens


@dataclass(frozen=True)
class DataConfig(Section, name="data", modes=CORPUS_MODES, roles=Role.IDENTITY):
    """The text or numbers that a run reads, and how they become tokens."""

    corpus: str = field(
        "stdlib",
        modes=f"{CORPUS_MODES} score",
        help=f'Corpus, one of {", ".join(CORPUS_NAMES)}. "tfds:NAME" is one of TFDS.',
    )
    path: str = field(
        "",
        roles=Role.LOCAL,
        help='Files of "text" or "tokens": a file, a folder or a glob.',
    )
    data_dir: str = field(
        "",
        roles=Role.LOCAL,
        help="Folder of prepared data, also gs://. Empty is TFDS's.",
    )
    vocab: str = field(
        FROM_CORPUS,
        one_of((FROM_CORPUS, "byte", "char", "word", "subword", "number")),
        roles=Role.IDENTITY | Role.INHERITED,
        help='Kind of vocabulary. "corpus" is the one of published results.',
    )
    convention: str = field(
        "",
        modes=f"{CORPUS_MODES} score",
        help=f"Way of reading the corpus, one of {', '.join(CONVENTIONS)}. "
        "Empty is the way of published results.",
    )
    vocab_path: str = field(
        "",
        roles=Role.IDENTITY | Role.INHERITED | Role.LOCAL,
        help="A tokenizer.json, vocab.json or word list. Empty makes one.",
    )
    vocab_size: int = field(
        0,
        roles=Role.IDENTITY | Role.INHERITED,
        help='Largest number of words, or number of subwords; for "tokens", one more '
        "than the largest number. 0 keeps all.",
    )
    document_end: str = field(
        "",
        help="Line, or number, added after each file, such as `<eod>`, for "
        "reset_memory_at.",
    )
    dtype: str = field(
        "",
        one_of(("", *DTYPES)),
        modes=f"{CORPUS_MODES} score",
        roles=Role.LOCAL,
        help='Type of little-endian numbers in .bin files of "tokens".',
    )
