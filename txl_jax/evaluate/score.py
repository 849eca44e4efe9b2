"""Scores texts of any lengths, each as if it were alone (section 4.1).

The memory starts empty and is carried through a text. A text is read as evaluation
reads a split with one stream, with the fields of EVAL_FIELDS.

Texts are read side by side, in streams of one text after the other. A text that fits
into one segment starts wherever all of it fits; a longer text starts with a segment, so
that it is cut as if it were alone.

Dims: B streams, P tokens of a stream, L segment, T tokens of a text.
"""

import functools
import heapq
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from jax import Array

from txl_jax import metrics
from txl_jax.data.streams import OFF, Streams
from txl_jax.data.text import token_dtype
from txl_jax.data.vocab import CONTEXT, Vocab, spell
from txl_jax.errors import BadNumbers
from txl_jax.evaluate.options import EvalConfig, evaluation_model
from txl_jax.evaluate.reader import Reader, fetch, from_hidden
from txl_jax.kernels.sharded import replicate
from txl_jax.model.config import ModelConfig
from txl_jax.model.fixed import FixedTransformerXL
from txl_jax.model.initializers import Params
from txl_jax.model.positions import SCHEMES
from txl_jax.model.segment import OneSegment, Segment
from txl_jax.runtime.storage import Json

# The fields of EvalConfig that scores depend on.
EVAL_FIELDS = "tgt_len mem_len ext_len clamp_len same_length reset_memory_at".split()
AT_ONCE = 2**16  # tokens to collect before reading, unless one text is longer

Where = Mapping[int, tuple[int, int]]  # the stream and first token of texts, by number
Results = dict[str, np.ndarray]  # by name, as in RESULTS
# The results after each token: (bound model, hidden_BLD, segment) -> array [B, L, ..].
RESULTS: dict[str, Callable[[FixedTransformerXL, Array, OneSegment], Array]] = {
    "nll": lambda model, x_BLD, segment: model.embedding.nll(x_BLD, segment.targets_BL),
    "hidden": lambda model, hidden_BLD, segment: hidden_BLD,
}


class Document(NamedTuple):
    """A text to score."""

    name: str
    tokens_T: np.ndarray
    bytes: int  # the size of the original text


def arrange(
    sizes: Sequence[int], L: int, most: int, share: bool
) -> Iterator[tuple[int, Where]]:
    """Yields (streams, places of texts) for texts of these sizes that are read at once.

    There are at most `most` streams, a power of two, so that few programs are compiled.
    share: several texts may share a stream. The longest come first, each in the stream
    that is shortest so far, in as many streams as take as long as the longest text.
    Apart from its end, less than half of a stream is padding.
    """
    order, B = sorted(range(len(sizes)), key=lambda n: -sizes[n]), 1
    segments = [-(-max(total, 1) // L) for total in (sum(sizes), max(sizes))]
    enough = segments[0] // segments[1] if share else len(sizes)
    while 2 * B <= min(most, enough):
        B *= 2
    if not share:
        for at in range(0, len(order), B):
            yield B, {n: (b, 0) for b, n in enumerate(order[at : at + B])}
        return
    ends, found = [(0, b) for b in range(B)], {}
    for n in order:
        end, b = ends[0]
        room = -end % L
        start = end if sizes[n] <= room else end + room
        found[n] = b, start
        heapq.heapreplace(ends, (start + sizes[n], b))
    yield B, found


class TextReader:
    """Reads each text with an empty memory, and compiles few programs for all.

    names: of the results, as in RESULTS. reset_memory_at: as in `make_evaluate`.
    """

    def __init__(
        self,
        model_config: ModelConfig,
        config: EvalConfig,
        names: tuple[str, ...] = ("nll",),
        reset_memory_at: int = OFF,
    ) -> None:
        self.model_config, self.config = evaluation_model(model_config, config), config
        self.reset_memory_at = reset_memory_at

        @from_hidden
        def compute(
            model: FixedTransformerXL, hidden_BLD: Array, segment: OneSegment
        ) -> dict[str, Array]:
            found = {name: RESULTS[name](model, hidden_BLD, segment) for name in names}
            # Every process reads all results.
            return {name: replicate(x) for name, x in found.items()}

        L = config.ext_len + config.tgt_len
        self.make_reader = functools.cache(
            lambda B, n_segments: Reader(
                self.model_config, compute, B, L, n_segments=n_segments
            )
        )
        scheme = SCHEMES[model_config.position]
        # Whether a text may share a stream with others.
        self.share = self.model_config.initial_memory == "empty" and not (
            config.ext_len or scheme.embeddings or scheme.inputs
        )
        # Raises the errors of later calls.
        self.make_reader(1, config.segments_per_step)

    def read(
        self, params: Params, texts: Iterable[np.ndarray], prefix_T: np.ndarray
    ) -> Iterator[Iterator[Results]]:
        """Yields the results of each text, read after a prefix, in the order of texts.

        They come in parts (`join`), those of a long text as they are computed: read all
        before the next text's. The nll of a token without context is NaN. Raises
        BadNumbers for another nll that is not finite.
        """
        batch: list[np.ndarray] = []
        size, skip = 0, len(prefix_T)
        for text_T in texts:
            text_T = np.concatenate([prefix_T, text_T]) if skip else text_T
            if batch and size + len(text_T) >= AT_ONCE:
                yield from self._read_batch(params, batch, skip)
                batch, size = [], 0
            batch.append(text_T)
            size += len(text_T) + 1  # there may be any number of empty texts
        if batch:
            yield from self._read_batch(params, batch, skip)

    def _read_batch(
        self, params: Params, texts: list[np.ndarray], skip: int
    ) -> Iterator[Iterator[Results]]:
        found: dict[int, Iterator[Results]] = {}
        config, sizes = self.config, [len(text_T) for text_T in texts]
        for B, where in arrange(sizes, config.tgt_len, config.streams, self.share):
            parts: Iterable[Results] = self._read_places(params, texts, B, where)
            parts = parts if sizes[0] >= AT_ONCE else [join(parts, axis=1)]
            for n, (b, start) in where.items():
                found[n] = align(parts, b, slice(start, start + sizes[n]), skip)
        yield from map(found.pop, range(len(texts)))

    def _read_places(
        self, params: Params, texts: Sequence[np.ndarray], B: int, where: Where
    ) -> Iterator[Results]:
        """Yields the results after each token of B streams, [B, .., ..], in parts."""
        P = max(1, *(start + len(texts[n]) for n, (_, start) in where.items()))
        # The target of the last token is arbitrary and not scored.
        tokens = np.zeros(B * P + 1, token_dtype(self.model_config.vocab_size))
        starts_BP = np.zeros((B, P), bool)
        for n, (b, start) in where.items():
            tokens[b * P + start :][: len(texts[n])] = texts[n]
            starts_BP[b, start : start + 1] = True
        L, E = self.config.tgt_len, self.config.ext_len
        streams = Streams(tokens, B, L, ext_len=E, reset_memory_at=self.reset_memory_at)

        def segments() -> Iterator[Segment]:
            for n, segment in enumerate(streams.epoch()):
                starts_BL = starts_BP[:, n * L :][:, :L]
                segment.first_SBL[0, :, : starts_BL.shape[1]] |= starts_BL
                yield segment

        several = self.make_reader(B, self.config.segments_per_step)
        # A short text would be mostly padding.
        is_short = streams.segments_per_epoch <= several.n_segments // 2
        reader = self.make_reader(B, 1) if is_short else several
        at = 0
        for outputs in fetch(reader.read(params, segments())):
            context, new = min(E, at), min(L * reader.n_segments, P - at)
            yield {name: x[:, context : context + new] for name, x in outputs.items()}
            at += new


def join(parts: Iterable[Results], axis: int = 0) -> Results:
    """Returns the results of consecutive parts as one."""
    parts = [*parts]
    return {name: np.concatenate([x[name] for x in parts], axis) for name in parts[0]}


def align(parts: Iterable[Results], b: int, at: slice, skip: int) -> Iterator[Results]:
    """Yields the results of the text at a place in stream b, without `skip` tokens.

    The nll after a token is that of the next one.
    """
    before = np.nan
    for n, part in enumerate(parts):
        part = {name: x[b, at].astype(np.float32) for name, x in part.items()}
        if "nll" in part:
            nll_T = np.append(np.float32(before), part["nll"])
            if not np.isfinite(nll_T[n == 0 : -1]).all():
                raise BadNumbers(
                    "the loss is not finite, although every parameter is: a layer's "
                    "values overflow; try --config.model.dtype=float32"
                )
            part, before = part | {"nll": nll_T[:-1]}, nll_T[-1]
        yield {name: x_T[skip:] for name, x_T in part.items()}
        skip = max(skip - len(next(iter(part.values()))), 0)


def count(nll_T: np.ndarray) -> np.ndarray:
    """Returns the number of tokens, the number of scored tokens, and their nll."""
    nats = np.nansum(nll_T, dtype=np.float64)
    return np.array([len(nll_T), np.isfinite(nll_T).sum(), nats])


def totals(counts: np.ndarray) -> Json:
    """Returns results of `count`, or their sum, as JSON with the means."""
    scored, nats = int(counts[1]), float(counts[2])
    return {
        "tokens": int(counts[0]),
        "scored_tokens": scored,
        "total_nll_nats": nats,
        "nll": nats / scored if scored else None,
        "ppl": metrics.perplexity(nats / scored) if scored else None,
    }


def describe(counts: np.ndarray) -> Json:
    """Returns `totals` of `count`, bytes and unknown tokens, and the bits per byte."""
    size, unknown = map(int, counts[3:])
    return {
        **totals(counts),
        "bytes": size,
        "bits_per_byte": metrics.bits(counts[2]) / size if size else None,
        "unknown_tokens": unknown,
    }


def split(
    per: str, document: Document, nlls: Iterable[np.ndarray], vocab: Vocab
) -> Iterator[Json]:
    """Yields a document's lines or tokens, or else nothing, as it reads all of nlls."""
    at, line, words, kept = 0, 1, [], array("f")
    for nll_T in nlls:
        if per not in ("line", "token"):
            continue
        before = min(at, CONTEXT)
        tokens_T = document.tokens_T[at - before : at + len(nll_T)]
        texts = spell(vocab.decode, tokens_T, before)
        for token, text, nll in zip(tokens_T[before:], texts, nll_T, strict=True):
            place = {"document": document.name, "line": line}
            if per == "token":
                scores = {"token": int(token), "text": text, "nll": float(nll)}
                yield {**place, "index": at, **scores}
            words.append(text)
            kept.append(nll)
            at += 1
            if "\n" in text or at == len(document.tokens_T):
                if per == "line":
                    scores = totals(count(np.array(kept)))
                    yield {**place, "text": "".join(words), **scores}
                line, words, kept = line + 1, [], array("f")
