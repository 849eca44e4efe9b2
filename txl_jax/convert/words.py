"""Vocabularies of other code bases: lists of words in pickles and text files."""

from pathlib import Path
from typing import Any

from txl_jax.convert import pickle
from txl_jax.convert.pickle import Object
from txl_jax.data import vocab as vocabulary
from txl_jax.data.vocab import CharVocab, Vocab
from txl_jax.data.word import Lines, WordVocab
from txl_jax.errors import UserError, prefixed

# The marks of lines in the published vocabularies.
MARKS = (Lines(), Lines(eos="<S>", bos="<S>"), Lines(eos="</S>"))
BYTES = {str(byte) for byte in range(256)}
DEPTH = 4  # a vocabulary in a corpus in a checkpoint


def read(path: Path) -> Vocab:
    """Reads a vocabulary of any code base.

    The file is a pickled vocabulary or corpus, such as cache.pt, vocab.pkl and
    vocab.bin; a text file with one word per line; or any file that data.vocab_path
    supports.
    """
    if path.suffix in (".json", ".model", ".txt"):
        return vocabulary.read(path, from_words)
    return from_pickle(pickle.read(path), path)


def from_pickle(value: Any, path: Path) -> Vocab:
    """Returns the vocabulary in a value of `pickle.read`."""
    for _ in range(DEPTH):
        fields = value.state if isinstance(value, Object) else value
        if not isinstance(fields, dict):
            break
        words = fields.get("idx2sym")
        if isinstance(words, list) and all(isinstance(word, str) for word in words):
            with prefixed(path):
                return from_words(words, fields.get("lower_case") is True)
        value = fields.get("vocab")
    raise UserError(f"{path} contains no vocabulary: idx2sym is missing")


def from_words(words: list[str], lower_case: bool = False) -> Vocab:
    """Returns the vocabulary of words in the order of their ids.

    The words may be characters, as in the paper's code: byte values in decimal for
    enwik8, and characters with _ for the space for text8.
    """
    if not words:
        raise UserError("the vocabulary has no words: give another")
    if BYTES.issuperset(words):
        return CharVocab("".join(chr(int(word)) for word in words), of_bytes=True)
    if all(len(word) == 1 for word in words) and "_" in words and " " not in words:
        return CharVocab("".join(words).replace("_", " "))
    marks = next((marks for marks in MARKS if marks.eos in words), MARKS[0])
    return WordVocab(words, marks._replace(lower_case=lower_case))
