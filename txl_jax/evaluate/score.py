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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from jax import Array
from jax.sharding import Mesh

from txl_jax import metrics
from txl_jax.data.streams import OFF, Streams
from txl_jax.data.vocab import Vocab, spell
from txl_jax.errors import BadNumbers
from txl_jax.evaluate.options import EvalConfig, evaluation_model
from txl_jax.evaluate.reader import Reader, fetch, from_hidden
from txl_jax.kernels.sharded import constrain
from txl_jax.model.config import ModelConfig
from txl_jax.model.initializers import Params
from txl_jax.model.memory.kinds import choose_kind
from txl_jax.model.positions import SCHEMES
from txl_jax.model.segment import OneSegment, Segment
from txl_jax.model.txl import TransformerXL
from txl_jax.runtime.storage import Json
from txl_jax.sharding.rules import shards

# The fields of EvalConfig that scores depend on.
EVAL_FIELDS = "tgt_len mem_len ext_len clamp_len same_length reset_memory_at".split()
AT_ONCE = 2**16  # tokens to collect before reading, unless one text is longer

Results = dict[str, np.ndarray]  # by name, as in RESULTS
# The results after each token: (bound model, hidden_BLD, segment) -> array [B, L, ..].
RESULTS: dict[str, Callable[[TransformerXL, Array, OneSegment], Array]] = {
    "nll": lambda model, x_BLD, segment: model.embedding.nll(x_BLD, segment.targets_BL),
    "hidden": lambda model, hidden_BLD, segment: hidden_BLD,
}


class Document(NamedTuple):
    """A text to score."""

    name: str
    tokens_T: np.ndarray
    bytes: int  # the size of the original text


class Places(NamedTuple):
    """Where texts are read: the stream and the first token of each text's number."""

    batch_size: int
    stream_and_start: Mapping[int, tuple[int, int]]


def arrange(sizes: Sequence[int], L: int, most: int, share: bool) -> Iterator[Places]:
    """Yields the places of texts of these sizes, for all texts read at once.

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
            yield Places(B, {n: (b, 0) for b, n in enumerate(order[at : at + B])})
        return
    ends, found = [(0, b) for b in range(B)], {}
    for n in order:
        end, b = ends[0]
        room = -end % L
        start = end if sizes[n] <= room else end + room
        found[n] = b, start
        heapq.heapreplace(ends, (start + sizes[n], b))
    yield Places(B, found)


class TextReader:
    """Reads each text with an empty memory, and compiles few programs for all.

    names: of the results, as in RESULTS. Texts are split over the segments of the mesh
    unless mesh.data or mesh.fsdp exceeds 1. reset_memory_at: as in `make_evaluate`.
    """

    def __init__(
        self,
        model_config: ModelConfig,
        config: EvalConfig,
        names: tuple[str, ...] = ("nll",),
        mesh: Mesh | None = None,
        reset_memory_at: int = OFF,
    ) -> None:
        self.model_config, self.config = evaluation_model(model_config, config), config
        self.mesh = None if mesh and shards(mesh, "B") > 1 else mesh
        self.reset_memory_at = reset_memory_at

        @from_hidden
        def compute(
            model: TransformerXL, hidden_BLD: Array, segment: OneSegment
        ) -> dict[str, Array]:
            found = {name: RESULTS[name](model, hidden_BLD, segment) for name in names}
            # Every process reads all results.
            return {name: constrain(x, ()) for name, x in found.items()}

        L = config.ext_len + config.tgt_len
        self.make_reader = functools.cache(
            lambda B, n_segments: Reader(
                self.model_config,
                compute,
                B,
                L,
                self.mesh if n_segments != 1 else None,
                n_segments=n_segments,
            )
        )
        scheme = SCHEMES[model_config.position]
        # Whether a text may share a stream with others.
        self.share = choose_kind(self.model_config).restarts and not (
            config.ext_len or scheme.embeddings or scheme.inputs
        )
        self.make_reader(
            1, config.segments_per_step
        )  # raises the errors of later calls

    def read(
        self, params: Params, texts: Iterable[np.ndarray], prefix_T: np.ndarray
    ) -> Iterator[Results]:
        """Yields the results of each text, read after a prefix, in the order of texts.

        The nll of a token without context is NaN. Raises BadNumbers for another nll
        that is not finite.
        """
        batch, size = [], 0
        for tokens_T in texts:
            batch.append(np.concatenate([prefix_T, tokens_T]))
            size += len(batch[-1]) + 1  # there may be any number of empty texts
            if size >= AT_ONCE:
                yield from self._read_batch(params, batch, len(prefix_T))
                batch, size = [], 0
        if batch:
            yield from self._read_batch(params, batch, len(prefix_T))

    def _read_batch(
        self, params: Params, texts: list[np.ndarray], skip: int
    ) -> Iterator[Results]:
        found: dict[int, Results] = {}
        config, sizes = self.config, [len(text_T) for text_T in texts]
        for places in arrange(sizes, config.tgt_len, config.streams, self.share):
            parts = {n: texts[n] for n in places.stream_and_start}
            after_BP = self._read_places(params, parts, places)
            for n, (b, start) in places.stream_and_start.items():
                end = start + sizes[n]
                found[n] = {name: x[b, start:end] for name, x in after_BP.items()}
        for n in range(len(texts)):
            if "nll" in found[n]:
                nll_T = np.append(np.float32(np.nan), found[n]["nll"])[: sizes[n]]
                if not np.isfinite(nll_T[1:]).all():
                    raise BadNumbers(
                        "the loss is not finite, although every parameter is: a "
                        "layer's values overflow; try --config.model.dtype=float32"
                    )
                found[n]["nll"] = nll_T
            yield {name: x_T[skip:] for name, x_T in found.pop(n).items()}

    def _read_places(
        self, params: Params, texts: Mapping[int, np.ndarray], places: Places
    ) -> Results:
        """Returns the results after each token of the streams, [B, P, ..], float32."""
        B, where = places
        P = max(1, *(where[n][1] + len(text_T) for n, text_T in texts.items()))
        # The target of the last token is arbitrary and not scored.
        tokens, starts_BP = np.zeros(B * P + 1, np.int32), np.zeros((B, P), bool)
        for n, text_T in texts.items():
            b, start = where[n]
            tokens[b * P + start :][: len(text_T)] = text_T
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
        results: Results = {}
        at = 0
        for outputs in fetch(reader.read(params, segments())):
            context, new = min(E, at), min(L * reader.n_segments, P - at)
            for name, x in outputs.items():
                if name not in results:
                    results[name] = np.empty((B, P, *x.shape[2:]), np.float32)
                results[name][:, at : at + new] = x[:, context : context + new]
            at += new
        return results


def totals(nll_T: np.ndarray) -> Json:
    """Returns the number of tokens, the number of scored tokens, and their nll."""
    scored = int(np.isfinite(nll_T).sum())
    nats = float(np.nansum(nll_T, dtype=np.float64))
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
