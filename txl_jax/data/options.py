"""Options of the data: the corpus and its vocabulary."""

from dataclasses import dataclass

from txl_jax.fields import READING, TRAINING, at_least, check, field, one_of

CORPORA = tuple(
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
VOCABULARIES = ("byte", "char", "word", "subword", "number")
DTYPES = tuple("uint8 uint16 uint32 uint64 int8 int16 int32 int64".split())
OWN = "corpus"  # the kind of vocabulary that the corpus's published results use
SLACK = 15  # a segment of varying length has at most tgt_len + SLACK tokens


@dataclass(frozen=True)
class DataConfig:
    """Which text, or numbers, a run reads and how it is cut into tokens."""

    # The corpus, one of CORPORA. "tfds:NAME" is a dataset of TFDS.
    corpus: str = field("stdlib", modes=f"{TRAINING} {READING} prepare")
    # The files of the corpora "text" and "tokens": a file, a folder or a glob.
    path: str = field("", "local", "changeable")
    # The folder of prepared data, local or on gs://. Empty takes the default of TFDS.
    data_dir: str = field("", "local", "changeable")
    # The kind of vocabulary: byte, char, word or subword, and number for "tokens".
    # "corpus" takes that of published results.
    vocab: str = field(one_of((OWN, *VOCABULARIES), OWN), "inherited")
    # The convention by which the corpus is read, one of CONVENTIONS. Empty takes that
    # of published results.
    convention: str = field("", modes=f"{TRAINING} {READING} prepare")
    # The file of a vocabulary: a tokenizer.json or vocab.json, or a list of words.
    # Empty makes one from the corpus.
    vocab_path: str = field("", "inherited", "local")
    # The largest number of words, or the number of subwords, in a vocabulary made from
    # the corpus; of "tokens", one more than the largest number. 0 keeps all.
    vocab_size: int = field(at_least(0, 0), "inherited")
    lower_case: bool = field(False, "inherited")  # Converts words to lower case.
    # A line, or a number, that is added after each file of the corpus "text", or
    # "tokens", such as `<eod>`, which reset_memory_at can give. Empty adds none.
    document_end: str = ""
    # The type of the numbers in the .bin files of the corpus "tokens", one of DTYPES.
    # They are little-endian. Other files state their own.
    dtype: str = field(
        one_of(("", *DTYPES), ""),
        "local",
        "changeable",
        modes=f"{TRAINING} {READING} prepare",
    )

    def __post_init__(self) -> None:
        """Raises UserError for an impossible value."""
        check(self, "data")
