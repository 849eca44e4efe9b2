"""Vocabularies of other code bases: lists of words in pickles and text files."""

from pathlib import Path

from txl_jax.convert import pickle
from txl_jax.convert.pickle import Object, Value
from txl_jax.data import vocab as vocabulary
from txl_jax.data.options import OWN, DataConfig
from txl_jax.data.recipe import CONVENTIONS
from txl_jax.data.vocab import ByteVocab, CharVocab, Vocab
from txl_jax.data.word import Lines, WordVocab
from txl_jax.errors import UserError, prefixed

# The marks of lines in the published vocabularies.
MARKS = (Lines(), Lines(eos="<S>", bos="<S>"), Lines(eos="</S>"))
BYTES = {str(byte) for byte in range(256)}
ANY = DataConfig()  # of any kind of vocabulary
PICKLES = (".pkl", ".bin", ".pt")
DEPTH = 4  # a vocabulary in a corpus in a checkpoint


def from_words(
    words: list[str], lower_case: bool = False, data: DataConfig = ANY
) -> Vocab:
    """Returns the vocabulary of words in the order of their ids.

    Unless data.vocab states its kind, it may be characters, as in the paper's code:
    byte values in decimal for enwik8, and characters with _ for the space for text8.
    """
    if not words:
        raise UserError("the vocabulary has no words: give another")
    kind, is_bytes = data.vocab, BYTES.issuperset(words)
    is_letters = all(len(word) == 1 for word in words)
    is_text8 = is_letters and "_" in words and " " not in words
    if kind == OWN:
        kind = "char" if is_bytes or is_text8 else "word"
    if kind == "char" and is_letters and (is_text8 or data.vocab == kind):
        return CharVocab("".join(words).replace("_", " " if is_text8 else "_"))
    if kind == "char" and is_bytes:
        return CharVocab("".join(chr(int(word)) for word in words), of_bytes=True)
    if kind == "byte" and words == list(map(str, range(256))):
        return ByteVocab()
    if kind != "word":
        raise UserError(
            f"the vocabulary lists words, which are not data.vocab={kind!r}: leave "
            "data.vocab out, or set data.vocab='word'"
        )
    guessed = (marks for marks in MARKS if marks.eos in words)
    marks = next(guessed, Lines(""))  # without marks, ends of lines are white space
    if data.convention in CONVENTIONS:
        marks = CONVENTIONS[data.convention].lines
    lower_case |= data.lower_case
    return WordVocab(words, marks._replace(lower_case=lower_case))


def read(path: Path, data: DataConfig = ANY) -> Vocab:
    """Reads a vocabulary of any code base, as the options of the data describe it.

    The file is a pickled vocabulary or corpus, such as cache.pt, vocab.pkl and
    vocab.bin; a text file with one word per line; or any file that data.vocab_path
    supports.
    """
    if path.suffix in PICKLES:
        return from_pickle(pickle.read(path), path, data)
    return vocabulary.read(path, lambda words: from_words(words, data=data))


def from_pickle(value: Value, path: Path, data: DataConfig = ANY) -> Vocab:
    """Returns the vocabulary in a value of `pickle.read`, the content of `path`."""
    for _ in range(DEPTH):
        fields = value.state if isinstance(value, Object) else value
        if not isinstance(fields, dict):
            break
        # A tokenizer that was loaded and saved again lacks the list.
        words = fields.get("idx2sym") or _in_order(fields.get("sym2idx"))
        if isinstance(words, list) and all(isinstance(word, str) for word in words):
            with prefixed(path):
                return from_words(words, fields.get("lower_case") is True, data)
        value = fields.get("vocab")
    raise UserError(f"{path} contains no vocabulary: idx2sym is missing")


def _in_order(ids: Value) -> list[str] | None:
    """Returns the words of {word: id}; None unless the ids count from 0."""
    numbers = ids.values() if isinstance(ids, dict) else [None]
    if {*map(repr, numbers)} != {*map(repr, range(len(numbers)))}:
        return None
    return sorted(ids, key=ids.__getitem__)
