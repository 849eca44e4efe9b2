"""The losses of a model after contexts of exact lengths (Appendix C).

Dims: T positions, B windows, C context, L segment, D model.
"""

import functools
import itertools
from collections.abc import Callable, Iterator

import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh

from txl_jax.evaluate import reader
from txl_jax.evaluate.options import EvalConfig, evaluation_model
from txl_jax.evaluate.perplexity import ShowProgress
from txl_jax.evaluate.reader import Reader
from txl_jax.model.config import ModelConfig
from txl_jax.model.initializers import Params
from txl_jax.model.segment import OneSegment, Segment
from txl_jax.model.txl import TransformerXL
from txl_jax.sharding.rules import check_streams

# (tokens, positions_T, context, progress) -> nll_T in nats.
ContextNll = Callable[[np.ndarray, np.ndarray, int, ShowProgress], np.ndarray]


def spread(tokens: int, longest: int, count: int) -> np.ndarray:
    """Returns `count` even positions with `longest` tokens before them, 0 = all."""
    available = max(tokens - longest, 0)
    count = min(count or available, available)
    return longest + np.arange(count, dtype=np.int64) * available // max(count, 1)


@reader.from_hidden
def last_nll(model: TransformerXL, hidden_BLD: Array, segment: OneSegment) -> Array:
    """Returns the nll of each stream's last target, nll_B, of one segment."""
    length_B = segment.length_B
    last_B1D = reader.last(hidden_BLD, length_B)
    target_B1 = jnp.take_along_axis(segment.targets_BL, length_B[:, None] - 1, axis=1)
    return model.embedding.nll(last_B1D, target_B1)[:, 0]


def cut(window_BT: np.ndarray, L: int, count: int) -> Iterator[Segment]:
    """Yields windows [B, C + 1] as segments, to be read `count` at a time.

    A shorter first segment is padded. Several segments in a call cannot continue after
    padding, so there, windows start as documents after arbitrary tokens.
    """
    before = -(window_BT.shape[1] - 1) % (count * L) if count > 1 else 0
    window_BT = np.pad(window_BT, ((0, 0), (before, 0)))
    B, C = len(window_BT), window_BT.shape[1] - 1
    first_BT = np.zeros((B, C + L), bool)
    first_BT[:, before] = count > 1
    shorter = (C - 1) % L + 1
    for begin, end in itertools.pairwise([0, *range(shorter, C + 1, L)]):
        pad = ((0, 0), (0, L - (end - begin)))
        yield Segment(
            np.pad(window_BT[:, begin:end], pad)[None],
            np.pad(window_BT[:, begin + 1 : end + 1], pad)[None],
            np.ones((1, B, L), np.float32),
            first_BT[None, :, begin : begin + L],
            np.full((1, B), end - begin, np.int32),
        )


def make_context_nll(
    model_config: ModelConfig, config: EvalConfig, params: Params, mesh: Mesh
) -> ContextNll:
    """Returns the function that scores positions after a context of a given length.

    The token at each position is predicted from exactly the `context` tokens before it,
    config.streams positions in parallel. Every window is read from an empty memory: by
    a model with a memory in segments of tgt_len, of which the first may be shorter, by
    one without at once. progress counts positions.
    """
    check_streams(mesh, config.streams, "eval.streams")
    model_config, B = evaluation_model(model_config, config), config.streams

    @functools.cache
    def make_reader(L: int, segments: int) -> Reader:
        return Reader(
            model_config, last_nll, B, L, mesh, segments=segments, documents=True
        )

    fixed = make_reader(config.tgt_len, 1).unstack(params)

    def nll(
        tokens: np.ndarray,
        positions_T: np.ndarray,
        context: int,
        progress: ShowProgress,
    ) -> np.ndarray:
        L = config.tgt_len if model_config.has_memory else context
        T = len(positions_T)
        parts = []
        read = make_reader(L, config.segments_per_step)
        if context <= read.segments // 2 * L:  # most of a call would be padding
            read = make_reader(L, 1)
        for begin in range(0, T, B):  # the last batch repeats the last position
            index_B = np.minimum(np.arange(begin, begin + B), T - 1)
            place_BT = positions_T[index_B][:, None] - np.arange(context, -1, -1)
            segments = cut(tokens[place_BT].astype(np.int32), L, read.segments)
            own = params if read.in_pieces else fixed
            *_, nll_SB = read.outputs(own, segments)
            parts.append(np.asarray(nll_SB[0], np.float64)[: T - begin])
            progress(min(begin + B, T), T)
        return np.concatenate(parts)

    return nll
