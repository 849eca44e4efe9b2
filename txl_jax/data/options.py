"""Options of the data: the corpus and its vocabulary."""

from dataclasses import dataclass

from txl_jax.runtime.constraint import at_least, check, one_of

CORPORA = tuple(
    "stdlib text copying shakespeare enwik8 text8 wikitext103 wikitext2 lm1b ptb "
    "tfds".split()
)
CONVENTIONS = tuple(
    "lines text newlines_deleted newlines_kept tensorflow words".split()
)
SPLITS = ("train", "valid", "test")
VOCABULARIES = ("byte", "char", "word", "subword")
OWN = "corpus"  # the kind of vocabulary that the corpus's published results use
SLACK = 15  # a segment of varying length has at most tgt_len + SLACK tokens


@dataclass(frozen=True)
class DataConfig:
    """Which text a run reads and how it is cut into tokens."""

    # one of CORPORA; "tfds:NAME" for a dataset of TFDS; "copying:DELAY,LENGTH,SYMBOLS":
    # bytes of noise before each answer, letters of a pattern and of the alphabet
    corpus: str = "stdlib"
    path: str = ""  # corpus "text" only: a file, a folder or a glob
    data_dir: str = ""  # folder of prepared data, also gs://; "" = the default of TFDS
    # byte, char, word or subword; "corpus" = the kind in published results
    vocab: str = one_of((OWN, *VOCABULARIES), OWN)
    # one of CONVENTIONS; "" = the convention of published results
    convention: str = ""
    # a tokenizer.json, .model or vocab.json, or a list of words
    vocab_path: str = ""
    vocab_size: int = at_least(0, 0)  # most words, or number of subwords; 0 = all words
    lower_case: bool = False  # convert words to lower case

    def __post_init__(self) -> None:
        """Raises UserError for an impossible value."""
        check(self, "data")
