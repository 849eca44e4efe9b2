"""Reads texts of any lengths, each as if it were alone (section 4.1).

The memory starts empty and is carried through a text. A text is read as evaluation
reads a split with one stream, with the fields of EVAL_FIELDS.

Texts are read side by side, in streams of one text after the other. A text of at most
one segment is put into the current segment if it fits there whole; a longer text starts
with a segment, so that it is cut as if it were alone.

Dims: B streams, P tokens of a stream, L segment, T tokens of a text.
"""

import functools
import heapq
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import numpy as np
from jax import Array

from txl_jax.data.streams import OFF, Streams
from txl_jax.data.text import token_dtype
from txl_jax.errors import BadNumbers
from txl_jax.evaluate.options import EvalConfig, evaluation_model
from txl_jax.evaluate.reader import Reader, from_hidden
from txl_jax.kernels.sharded import replicate
from txl_jax.model.config import ModelConfig
from txl_jax.model.fixed import FixedTransformerXL
from txl_jax.model.modules import Params
from txl_jax.model.positions import SCHEMES
from txl_jax.model.segment import OneSegment, Segment

# The fields of EvalConfig that scores depend on.
EVAL_FIELDS = "tgt_len mem_len ext_len clamp_len same_length reset_memory_at".split()
BATCH_TOKENS = 2**16  # of the texts that are arranged together, or of one text

Places = Mapping[int, tuple[int, int]]  # the stream and first token of texts, by number
Results = dict[str, np.ndarray]  # by name, as in RESULTS
# The results after each token: (bound model, hidden_BLD, segment) -> array [B, L, ..].
RESULTS: dict[str, Callable[[FixedTransformerXL, Array, OneSegment], Array]] = {
    "nll": lambda model, x_BLD, segment: model.embedding.nll(x_BLD, segment.targets_BL),
    "hidden": lambda model, hidden_BLD, segment: hidden_BLD,
}


def arrange(
    sizes: Sequence[int], L: int, max_streams: int, share: bool
) -> Iterator[tuple[int, Places]]:
    """Yields (streams, places of texts) for texts of these sizes that are read at once.

    The number of streams is a power of two, so that few programs are compiled. share:
    several texts may share a stream. The longest come first, each in the stream that is
    shortest so far, in as many streams as take as long as the longest text. Apart from
    its end, less than half of a stream is padding.
    """
    order, B = sorted(range(len(sizes)), key=lambda n: -sizes[n]), 1
    segments = [-(-max(total, 1) // L) for total in (sum(sizes), max(sizes))]
    enough = segments[0] // segments[1] if share else len(sizes)
    while 2 * B <= min(max_streams, enough):
        B *= 2
    if not share:
        for at in range(0, len(order), B):
            yield B, {n: (b, 0) for b, n in enumerate(order[at : at + B])}
        return
    ends, places = [(0, b) for b in range(B)], {}
    for n in order:
        end, b = ends[0]
        room = -end % L
        begin = end if sizes[n] <= room else end + room
        places[n] = b, begin
        heapq.heapreplace(ends, (begin + sizes[n], b))
    yield B, places


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
            # Every process reads all results.
            return {x: replicate(RESULTS[x](model, hidden_BLD, segment)) for x in names}

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
        tokens, skip = 0, len(prefix_T)
        for text_T in texts:
            text_T = np.concatenate([prefix_T, text_T]) if skip else text_T
            if batch and tokens + len(text_T) >= BATCH_TOKENS:
                yield from self._read_batch(params, batch, skip)
                batch, tokens = [], 0
            batch.append(text_T)
            tokens += len(text_T) + 1  # there may be any number of empty texts
        if batch:
            yield from self._read_batch(params, batch, skip)

    def _read_batch(
        self, params: Params, texts: list[np.ndarray], skip: int
    ) -> Iterator[Iterator[Results]]:
        sizes = [len(text_T) for text_T in texts]
        if sizes[0] and len(texts) == 1:  # it may be long
            yield align(self._read_streams(params, texts, 1, {0: (0, 0)}), skip)
            return
        results: dict[int, Results] = {}
        L, max_streams = self.config.tgt_len, self.config.streams
        for B, places in arrange(sizes, L, max_streams, self.share):
            streams = join(self._read_streams(params, texts, B, places), axis=1)
            for n, (b, begin) in places.items():
                at = slice(begin, begin + sizes[n])
                results[n] = {name: x[b : b + 1, at] for name, x in streams.items()}
        for n in range(len(texts)):
            yield align([results.pop(n)], skip)

    def _read_streams(
        self, params: Params, texts: Sequence[np.ndarray], B: int, places: Places
    ) -> Iterator[Results]:
        """Yields the results after each token of B streams, [B, .., ..], in parts."""
        P = max(1, *(begin + len(texts[n]) for n, (_, begin) in places.items()))
        # The target of the last token is arbitrary and not scored.
        tokens = np.zeros(B * P + 1, token_dtype(self.model_config.vocab_size))
        starts_BP = np.zeros((B, P), bool)
        for n, (b, begin) in places.items():
            tokens[b * P + begin :][: len(texts[n])] = texts[n]
            starts_BP[b, begin : begin + 1] = True
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
        for outputs in reader.read(params, segments()):
            context, new = min(E, at), min(L * reader.n_segments, P - at)
            yield {name: x[:, context : context + new] for name, x in outputs.items()}
            at += new


def join(parts: Iterable[Results], axis: int = 0) -> Results:
    """Returns the results of consecutive parts as one."""
    parts = [*parts]
    return {name: np.concatenate([x[name] for x in parts], axis) for name in parts[0]}


def align(parts: Iterable[Results], skip: int) -> Iterator[Results]:
    """Yields the results of a text in one stream, without its first `skip` tokens.

    The nll after a token is that of the next one.
    """
    nll_before = np.float32(np.nan)  # the first token has no context
    for n, part in enumerate(parts):
        results = {name: x[0].astype(np.float32) for name, x in part.items()}
        if "nll" in results:
            nll_T = np.append(nll_before, results["nll"])
            if not np.isfinite(nll_T[n == 0 : -1]).all():
                raise BadNumbers(
                    "the loss is not finite, although every parameter is: a layer's "
                    "values overflow; try --config.model.dtype=float32"
                )
            results["nll"], nll_before = nll_T[:-1], nll_T[-1]
        yield {name: x_T[skip:] for name, x_T in results.items()}
        skip = max(skip - len(next(iter(results.values()))), 0)
