"""The nll of every token of the user's texts (section 4.1).

The memory starts empty and is carried through a document. A document is read as
evaluation reads a split with one stream, with the fields of LENGTHS.

Dims: B = 1 stream, L segment, D model, T tokens of a document.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import jax
import numpy as np
from jax import Array
from jax.sharding import Mesh

from txl_jax import metrics
from txl_jax.data.streams import OFF, Streams
from txl_jax.data.vocab import Vocab, spell
from txl_jax.errors import BadNumbers
from txl_jax.evaluate import reader
from txl_jax.evaluate.options import EvalConfig, evaluation_model
from txl_jax.evaluate.reader import Reader
from txl_jax.kernels.sharded import constrain
from txl_jax.model.config import ModelConfig
from txl_jax.model.initializers import Params
from txl_jax.model.segment import OneSegment
from txl_jax.model.txl import TransformerXL
from txl_jax.runtime.storage import Json
from txl_jax.sharding.rules import shards

# The fields of EvalConfig that scores depend on.
LENGTHS = tuple("tgt_len mem_len ext_len clamp_len same_length reset_memory_at".split())


class Document(NamedTuple):
    """A text to score."""

    name: str
    tokens_T: np.ndarray
    bytes: int  # of the original text


class Scores(NamedTuple):
    """The model's results for a document."""

    nll_T: np.ndarray  # in nats; NaN for a token without context
    hidden_TD: np.ndarray  # after each token; empty unless requested


# (tokens_T, prefix_T) -> Scores of the tokens, read after an unscored prefix.
Score = Callable[[np.ndarray, np.ndarray], Scores]


def make_score(
    model_config: ModelConfig,
    config: EvalConfig,
    params: Params,
    hidden: bool,
    mesh: Mesh | None = None,
    reset_memory_at: int = OFF,
) -> Score:
    """Returns score(tokens_T, prefix_T), compiled once for documents of any length.

    hidden: return hidden states. A long document is split over the segments of the mesh
    unless mesh.data or mesh.fsdp exceeds 1. reset_memory_at: as in `make_evaluate`.
    """
    model_config = evaluation_model(model_config, config)
    if mesh and shards(mesh, "B") > 1:
        mesh = None

    @reader.from_hidden
    def read_segment(
        model: TransformerXL, hidden_BLD: Array, segment: OneSegment
    ) -> tuple[Array, Array | tuple[()]]:
        nll_BL = model.embedding.nll(hidden_BLD, segment.targets_BL)
        # Every process reads all of them.
        nll_BL, hidden_BLD = constrain(nll_BL, ()), constrain(hidden_BLD, ())
        return nll_BL, hidden_BLD if hidden else ()

    D, L = model_config.d_model, config.ext_len + config.tgt_len
    make_reader = functools.partial(Reader, model_config, read_segment, 1, L)
    single = make_reader()
    several = make_reader(mesh, segments=config.segments_per_step)
    fixed, no_states = single.unstack(params), np.zeros((0, D), np.float32)

    def score(tokens_T: np.ndarray, prefix_T: np.ndarray) -> Scores:
        if not len(tokens_T):
            return Scores(np.zeros(0), no_states)
        # The last token is read for its hidden state; its target is arbitrary and not
        # scored.
        text_T = np.concatenate([prefix_T, tokens_T, tokens_T[-1:]])
        streams = Streams(
            text_T,
            1,
            config.tgt_len,
            ext_len=config.ext_len,
            reset_memory_at=reset_memory_at,
        )
        segments = [*streams.epoch()]
        new_X = np.concatenate([each.weights_SBL[0, 0] > 0 for each in segments])
        # A short document would be mostly padding.
        read = several if len(segments) > several.segments // 2 else single
        outputs = read.outputs(params if read.in_pieces else fixed, segments)
        nlls, hiddens = zip(*outputs, strict=True)

        def each_token(parts: Sequence[Array]) -> np.ndarray:
            """Returns what follows each token of prefix and text."""
            parts_Y = [part_BL[0] for part_BL in jax.device_get(parts)]
            return np.concatenate(parts_Y)[: len(new_X)][new_X]

        skip = len(prefix_T)
        nll_T = np.append(np.nan, each_token(nlls)[:-1])[skip:]
        if not np.isfinite(nll_T[0 if skip else 1 :]).all():
            raise BadNumbers(
                "the loss is not finite, although every parameter is: a layer's values "
                "overflow; try --config.model.dtype=float32"
            )
        states = each_token(hiddens)[skip:].astype(np.float32) if hidden else no_states
        return Scores(nll_T, states)

    return score


def totals(nll_T: np.ndarray) -> Json:
    """Returns the number of tokens, the number of scored tokens, and their nll."""
    scored = int(np.isfinite(nll_T).sum())
    nats = float(np.nansum(nll_T))
    return {
        "tokens": len(nll_T),
        "scored_tokens": scored,
        "total_nll_nats": nats,
        "nll": nats / scored if scored else None,
        "ppl": metrics.perplexity(nats / scored) if scored else None,
    }


def describe(nll_T: np.ndarray, size: int, unknown: int) -> Json:
    """Returns `totals` and the bits per byte of a text of `size` bytes."""
    counts = totals(nll_T)
    bits = metrics.bits(counts["total_nll_nats"])
    return {
        **counts,
        "bytes": size,
        "bits_per_byte": bits / size if size else None,
        "unknown_tokens": unknown,
    }


def split(
    per: str, document: Document, nll_T: np.ndarray, vocab: Vocab
) -> Iterator[Json]:
    """Yields a document's lines or tokens; the nll of one without context is None."""
    texts = spell(vocab.decode, document.tokens_T)
    start, line = 0, 1
    for at, (token, text) in enumerate(zip(document.tokens_T, texts, strict=True)):
        place = {"document": document.name, "line": line}
        if per == "token":
            nll = float(nll_T[at]) if np.isfinite(nll_T[at]) else None
            yield {**place, "index": at, "token": int(token), "text": text, "nll": nll}
        if "\n" in text or at + 1 == len(texts):
            if per == "line":
                words = "".join(texts[start : at + 1])
                yield {**place, "text": words, **totals(nll_T[start : at + 1])}
            start, line = at + 1, line + 1
