"""The nll of tokens after a context of a given length: l_i(c, t) of RECL.

Every token has its own window, read from an empty memory, and only the window's last
prediction counts. A model with a memory reads a window as evaluation reads a text, in
segments of eval.tgt_len with a memory of eval.mem_len; the first segment is shorter if
the window is not a multiple of tgt_len. A model without a memory reads the whole window
at once.

Dims: B windows, C context, L segment, T positions, D model.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh

from txl_jax.data.streams import Segment
from txl_jax.evaluate import reader
from txl_jax.evaluate.options import EvalConfig, evaluation_model
from txl_jax.evaluate.reader import Reader, Traced, make_segment
from txl_jax.model.config import ModelConfig
from txl_jax.model.key_values import KeyValueMemory
from txl_jax.model.txl import TransformerXL
from txl_jax.sharding import check_streams

# (tokens, positions_T, context, progress) -> nll_T in nats.
ContextNll = Callable[
    [np.ndarray, np.ndarray, int, Callable[[int, int], None]], np.ndarray
]


def spread(tokens: int, longest: int, count: int) -> np.ndarray:
    """Returns `count` evenly spaced positions with `longest` tokens before them.

    Returns all positions if count is 0 or exceeds their number.
    """
    available = max(tokens - longest, 0)
    count = min(count or available, available)
    return longest + np.arange(count, dtype=np.int64) * available // max(count, 1)


def last_nll(
    model: TransformerXL, memory: KeyValueMemory, segment: Traced
) -> tuple[KeyValueMemory, Array]:
    """Returns (memory, nll_B of each stream's last target) of one segment."""
    memory, hidden_BLD = reader.hidden(model, memory, segment)
    length_B = segment.length_SB
    last_B1D = reader.last(hidden_BLD, length_B)
    target_B1 = jnp.take_along_axis(segment.targets_SBL, length_B[:, None] - 1, axis=1)
    return memory, model.embedding.nll(last_B1D, target_B1)[:, 0]


def cut(window_BT: np.ndarray, L: int) -> Iterator[Segment]:
    """Yields windows [B, C + 1] as segments; a shorter first one is padded."""
    inputs_BC, targets_BC = window_BT[:, :-1], window_BT[:, 1:]
    C = inputs_BC.shape[1]
    first = (C - 1) % L + 1
    pad = ((0, 0), (0, L - first))
    yield make_segment(
        np.pad(inputs_BC[:, :first], pad), np.pad(targets_BC[:, :first], pad), first
    )
    for start in range(first, C, L):
        end = start + L
        yield make_segment(inputs_BC[:, start:end], targets_BC[:, start:end])


def make_context_nll(
    model_config: ModelConfig,
    config: EvalConfig,
    params: Any,
    batch_size: int,
    mesh: Mesh,
) -> ContextNll:
    """Returns nll(tokens, positions_T, context, progress) -> nll_T, in float64.

    The token at each position is predicted from exactly the `context` tokens before it.
    progress(done, total) counts positions.
    """
    check_streams(mesh, batch_size, "recl.batch_size")
    model_config, B = evaluation_model(model_config, config), batch_size

    @functools.cache
    def make_reader(L: int) -> Reader:
        return Reader(model_config, last_nll, B, L, mesh)

    params = make_reader(config.tgt_len).unstack(params)

    def nll(
        tokens: np.ndarray,
        positions_T: np.ndarray,
        context: int,
        progress: Callable[[int, int], None],
    ) -> np.ndarray:
        L, T = config.tgt_len if config.mem_len else context, len(positions_T)
        parts = []
        for begin in range(0, T, B):
            # The last batch repeats its last position.
            index_B = np.minimum(np.arange(begin, begin + B), T - 1)
            place_BT = positions_T[index_B][:, None] - np.arange(context, -1, -1)
            segments = cut(tokens[place_BT].astype(np.int32), L)
            *_, nll_SB = make_reader(L).outputs(params, segments)
            parts.append(np.asarray(nll_SB[0], np.float64)[: T - begin])
            progress(min(begin + B, T), T)
        return np.concatenate(parts)

    return nll
