"""Scores and hidden states of texts of any lengths, by a loaded model."""

import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import numpy as np

from txl_jax.data.number import NumberVocab
from txl_jax.errors import UserError, prefixed, refuse
from txl_jax.evaluate.text_reader import Results, TextReader, join
from txl_jax.runtime.storage import to_utf8
from txl_jax.workdir.load import Loaded

TextOrTokens = str | np.ndarray | list[int]
# (texts, prefix_T) -> the results of each text, in parts.
ReadTexts = Callable[[Iterable[np.ndarray], np.ndarray], Iterator[Iterator[Results]]]


@functools.lru_cache(maxsize=4)
def cached_reader(compiled_for: tuple[Any, ...], *settings: Any) -> TextReader:
    """Returns a reader, kept for the latest models: a second call compiles nothing.

    compiled_for: the mesh and the dtypes of the parameters. settings: `TextReader`'s.
    """
    return TextReader(*settings)


def open_reader(loaded: Loaded, *names: str) -> ReadTexts:
    """Returns `TextReader.read` for the parameters; names: as for `TextReader`."""
    config, ids = loaded.config, loaded.ids
    compiled_for = loaded.mesh, *(x.dtype for x in jax.tree.leaves(loaded.params))
    reader = cached_reader(
        compiled_for, config.model, config.eval, names, ids.eval_reset
    )
    return functools.partial(reader.read, loaded.params)


def score(
    loaded: Loaded, texts: Iterable[TextOrTokens], prefix: TextOrTokens = ""
) -> list[np.ndarray]:
    """Returns nll_T of each text: the nats of each of its T tokens, float32.

    A text is a str, which `loaded.vocab` encodes, or its tokens. Texts have any
    lengths, and each is read as if it were alone: with an empty memory, which is
    carried through it, in the segments of `loaded.config.eval` (`tgt_len`, `mem_len`,
    ...). At most `eval.streams` of them are read side by side. The first token has no
    context and is NaN, unless an unscored `prefix` is read before every text. Raises
    UserError for tokens that the model lacks and for text that cannot be encoded, and
    BadNumbers for an nll that is not finite.
    """
    return _read(loaded, texts, prefix, "nll")


def hidden_states(
    loaded: Loaded, texts: Iterable[TextOrTokens], prefix: TextOrTokens = ""
) -> list[np.ndarray]:
    """Returns hidden_TD of each text: the last layer's output at each token, float32.

    Row t has read the tokens up to t. Texts are read, and errors raised, as by
    `txl_jax.score`; a prefix has no rows.
    """
    return _read(loaded, texts, prefix, "hidden")


def _read(
    loaded: Loaded, texts: Iterable[TextOrTokens], prefix: TextOrTokens, name: str
) -> list[np.ndarray]:
    refuse(isinstance(texts, str), "texts is one text: give a list of texts")
    prefix_T = encode_text(loaded, prefix, "prefix")
    encoded = (encode_text(loaded, text, f"texts[{n}]") for n, text in enumerate(texts))
    read = open_reader(loaded, name)
    return [join(parts)[name] for parts in read(encoded, prefix_T)]


def encode_text(loaded: Loaded, text: TextOrTokens, name: str) -> np.ndarray:
    """Returns the tokens of a text; raises UserError with its name."""
    if isinstance(text, str):
        is_number = text and loaded.vocab.kind == NumberVocab.kind
        refuse(is_number, f"{name}: the model reads numbers: give an array of them")
        to_utf8(text, name)
        with prefixed(name):
            return loaded.vocab.encode(text)
    try:
        tokens_T = np.asarray(text)
    except ValueError:  # nested lists of different lengths
        tokens_T = np.array(None)
    if tokens_T.shape == (0,):
        return np.zeros(0, np.int32)
    if tokens_T.ndim != 1 or not np.issubdtype(tokens_T.dtype, np.integer):
        raise UserError(
            f"{name} has the shape {tokens_T.shape} and the type {tokens_T.dtype}: "
            "give a text, or its tokens as whole numbers in one dimension"
        )
    size = loaded.config.model.vocab_size
    if tokens_T.min() < 0 or tokens_T.max() >= size:
        outside = tokens_T[(tokens_T < 0) | (tokens_T >= size)]
        raise UserError(
            f"{name} has the token {outside[0]}, but the model's are from 0 to "
            f"{size - 1}: encode it with loaded.vocab"
        )
    return tokens_T
