"""What the model makes of texts that are given: the nll of every token (section 4.1).

The memory is carried over a document and empty before each. Reading is evaluation's,
with eval.tgt_len, mem_len, ext_len, clamp_len and same_length, for one stream.

Dims: B = 1 stream, L segment, D model, T tokens of a document.
"""

import dataclasses
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from txl_jax import distributed, metrics
from txl_jax.data import files
from txl_jax.data.spelling import spell
from txl_jax.data.streams import Streams
from txl_jax.data.text import Meter
from txl_jax.data.vocab import Vocab
from txl_jax.errors import UserError, require_one_of
from txl_jax.evaluate.perplexity import EvalConfig, evaluation_model
from txl_jax.model.config import ModelConfig
from txl_jax.model.key_values import KeyValueMemory, unstack
from txl_jax.model.memory import Memory
from txl_jax.model.txl import TransformerXL
from txl_jax.report.writer import json_lines, say

STDIN = "-"
UNITS = ("document", "line", "token")
# Fields of EvalConfig that say how a text is read.
LENGTHS = ("tgt_len", "mem_len", "ext_len", "clamp_len", "same_length")


@dataclasses.dataclass(frozen=True)
class ScoreConfig:
    """Which texts to score, and what to write of them beside the totals."""

    path: str = STDIN  # a file, a folder or a glob, each file a document; - = stdin
    prefix: str = ""  # read before each document and not scored, such as a line end
    output: str = ""  # a file of JSON lines; "" = none
    per: str = "line"  # what has a line of output of its own: document, line or token
    hidden: str = ""  # a file (.npz) of each document's hidden states; "" = none

    def __post_init__(self) -> None:
        """Refuses impossible values, naming the field."""
        require_one_of(self.per, list(UNITS), "score.per")
        if self.hidden and not self.hidden.endswith(".npz"):
            raise UserError(
                f"score.hidden = {self.hidden!r} is written as .npz: end it so"
            )


class Document(NamedTuple):
    """A text to be scored."""

    name: str
    tokens_T: np.ndarray
    bytes: int  # of the text as it came


class Scores(NamedTuple):
    """What the model makes of a document."""

    nll_T: np.ndarray  # in nats; NaN where nothing precedes the token
    hidden_TD: np.ndarray  # the state after each token; empty unless asked for


# Of tokens, read after a prefix that is not scored.
Score = Callable[[np.ndarray, np.ndarray], Scores]


def read_documents(path: str, vocab: Vocab, drop_newlines: bool) -> Iterator[Document]:
    """Yields the documents of score.path, encoded as a split of the corpus is.

    drop_newlines: byte 10 is left out, as where the corpus's convention does so.
    """
    if path == STDIN:
        yield _encode("stdin", sys.stdin.buffer.read(), vocab, drop_newlines)
        return
    for file in files.text_files(path, "score.path"):
        yield _encode(str(file), files.read_text(file), vocab, drop_newlines)


def _encode(name: str, data: bytes, vocab: Vocab, drop_newlines: bool) -> Document:
    blocks = Meter().read([data], drop_newlines)
    parts = [np.zeros(0, vocab.dtype), *vocab.stream(blocks, name)]
    return Document(name, np.concatenate(parts), len(data))


def make_score(
    config: ModelConfig, how: EvalConfig, params: Any, hidden: bool
) -> Score:
    """Returns score(tokens_T, prefix_T), compiled once for documents of any length."""
    config = evaluation_model(config, how)
    model = TransformerXL(config, stacked=False)
    width = how.ext_len + how.tgt_len
    apart = jax.jit(unstack)(params)

    def start(params: Any) -> KeyValueMemory:
        return KeyValueMemory.of(config, params, Memory.empty(config, 1), width)

    def step(params: Any, memory: KeyValueMemory, segment: Any) -> tuple[Any, Any]:
        def read(model: TransformerXL) -> tuple[Any, Any]:
            hidden_BLD, after = model(
                segment.inputs_SBL[0],
                memory,
                first_BL=segment.first_SBL[0],
                length_B=segment.length_SB[0],
            )
            nll_BL = model.embedding.nll(hidden_BLD, segment.targets_SBL[0])
            return after, (nll_BL[0], hidden_BLD[0] if hidden else ())

        return model.apply({"params": params}, method=read)

    begin, go_on = jax.jit(start), jax.jit(step)

    def score(tokens_T: np.ndarray, prefix_T: np.ndarray) -> Scores:
        T, skip = len(tokens_T), len(prefix_T)
        nll_T = np.full(T, np.nan)
        hidden_TD = np.zeros((T if hidden else 0, config.d_model), np.float32)
        if not T:
            return Scores(nll_T, hidden_TD)
        # The last token of all is read as well, for its hidden state: what would
        # follow it is any token, and not scored.
        text_T = np.concatenate([prefix_T, tokens_T, tokens_T[-1:]])
        streams = Streams(text_T, 1, how.tgt_len, ext_len=how.ext_len)
        memory = begin(apart)
        parts = []
        for segment in streams.epoch():
            memory, found = go_on(apart, memory, segment)
            parts.append((segment.weights_SBL[0, 0] > 0, found))
        nll_P = np.concatenate([np.asarray(nll_L)[new] for new, (nll_L, _) in parts])
        nll_T[0 if skip else 1 :] = nll_P[max(skip - 1, 0) : -1]
        if hidden:
            rows = [np.asarray(h_LD, np.float32)[new] for new, (_, h_LD) in parts]
            hidden_TD = np.concatenate(rows)[skip:]
        return Scores(nll_T, hidden_TD)

    return score


def totals(nll_T: np.ndarray) -> dict[str, Any]:
    """Returns how many tokens a text has and how many are scored, and their nll."""
    scored = int(np.isfinite(nll_T).sum())
    nats = float(np.nansum(nll_T))
    return {
        "tokens": len(nll_T),
        "scored_tokens": scored,
        "total_nll_nats": nats,
        "nll": nats / scored if scored else None,
        "ppl": metrics.perplexity(nats / scored) if scored else None,
    }


def describe(nll_T: np.ndarray, size: int, unknown: int) -> dict[str, Any]:
    """Returns `totals`, and the bits for each of the text's `size` bytes."""
    found = totals(nll_T)
    bits = metrics.bits(found["total_nll_nats"])
    return {
        **found,
        "bytes": size,
        "bits_per_byte": bits / size if size else None,
        "unknown_tokens": unknown,
    }


def parts(
    per: str, document: Document, nll_T: np.ndarray, vocab: Vocab
) -> Iterator[dict[str, Any]]:
    """Yields a document's lines, or its tokens, with their nll in nats.

    That is None for a token that nothing precedes.
    """
    texts = spell(vocab.decode, document.tokens_T)
    begin, line = 0, 1
    for at, (token, text) in enumerate(zip(document.tokens_T, texts, strict=True)):
        place = {"document": document.name, "line": line}
        if per == "token":
            nll = float(nll_T[at]) if np.isfinite(nll_T[at]) else None
            yield {**place, "index": at, "token": int(token), "text": text, "nll": nll}
        if "\n" in text or at + 1 == len(texts):
            if per == "line":
                words = "".join(texts[begin : at + 1])
                yield {**place, "text": words, **totals(nll_T[begin : at + 1])}
            begin, line = at + 1, line + 1


def score_all(
    documents: Iterator[Document], score: Score, vocab: Vocab, what: ScoreConfig
) -> dict[str, Any]:
    """Scores the documents, writes what was asked for, and returns the totals."""
    prefix_T = vocab.encode(what.prefix)
    nlls, found = [], []
    hidden: dict[str, Any] = {}
    with json_lines(what.output, "score.output") as write:
        for document in documents:
            nll_T, hidden_TD = score(document.tokens_T, prefix_T)
            unknown = int(np.count_nonzero(document.tokens_T == vocab.unknown))
            described = describe(nll_T, document.bytes, unknown)
            found.append({"document": document.name, **described})
            nlls.append(nll_T)
            if what.hidden:
                hidden[f"document_{len(hidden)}"] = hidden_TD
            if what.per == "document":
                write(found[-1])
            elif what.output:
                for part in parts(what.per, document, nll_T, vocab):
                    write(part)
    if what.hidden and distributed.is_first():
        try:
            np.savez(Path(what.hidden).expanduser(), **hidden)
        except OSError as error:
            raise UserError(
                f"score.hidden = {what.hidden!r} cannot be written "
                f"({error.strerror}): give another"
            ) from error
    size, unknown = (
        sum(each[name] for each in found) for name in ("bytes", "unknown_tokens")
    )
    whole = describe(np.concatenate([np.zeros(0), *nlls]), size, unknown)
    return {**whole, **treat_unknown(vocab, unknown), "documents": found}


def treat_unknown(vocab: Vocab, unknown: int) -> dict[str, Any]:
    """Returns what the vocabulary makes of what it lacks; says so where it had to."""
    if vocab.unknown < 0:
        everything = vocab.kind == "byte"
        return {"unknown_is": "nothing is unknown" if everything else "refused"}
    word = vocab.decode([vocab.unknown]) or str(vocab.unknown)
    if unknown:
        say(
            f"{unknown} tokens are not in the vocabulary, or {word!r} itself, as which "
            "they were read"
        )
    return {"unknown_is": word}
