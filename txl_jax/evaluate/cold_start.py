"""The loss against the number of tokens read since a cold start (section 4.4).

A split is cut into pieces of T tokens, each read from an empty memory. The mean nll of
the t-th prediction over all pieces is the model's loss with t tokens of context. Where
the curve stops falling, more context does not help.

Dims: B pieces in parallel, P pieces in total, L segment, T tokens of a piece.
"""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh

from txl_jax import metrics
from txl_jax.data.streams import Segment
from txl_jax.errors import UserError
from txl_jax.evaluate import reader
from txl_jax.evaluate.options import EvalConfig, evaluation_model
from txl_jax.evaluate.reader import Reader, Traced, make_segment
from txl_jax.model.config import ModelConfig
from txl_jax.model.key_values import KeyValueMemory
from txl_jax.model.txl import TransformerXL
from txl_jax.sharding import host_rows


def cut_pieces(tokens: np.ndarray, T: int) -> np.ndarray:
    """Returns pieces of T + 1 tokens; consecutive pieces share one token.

    An incomplete last piece is dropped. Raises UserError if there is no complete one.
    """
    count = (len(tokens) - 1) // T
    if not count:
        raise UserError(
            f"eval.cold_start = {T} exceeds the {len(tokens) - 1} tokens to score: "
            "lower it"
        )
    start_P = T * np.arange(count)
    return np.asarray(tokens)[start_P[:, None] + np.arange(T + 1)].astype(np.int32)


def sum_streams(
    model: TransformerXL, memory: KeyValueMemory, segment: Traced
) -> tuple[KeyValueMemory, Array]:
    """Returns (memory, nll_L summed over the scored streams) of one segment."""
    memory, nll_BL = reader.nll(model, memory, segment)
    return memory, jnp.sum(nll_BL * segment.weights_SBL, axis=0)


def cut(piece_BT: np.ndarray, B: int, L: int, rows: slice) -> Iterator[Segment]:
    """Yields at most B pieces of T + 1 tokens as segments of B streams.

    rows: the streams of this process. Streams without a piece have weight 0. The last
    segment is padded at its right end, which does not affect earlier tokens.
    """
    P, T = piece_BT.shape[0], piece_BT.shape[1] - 1
    piece_BT = np.pad(piece_BT, ((0, B - P), (0, -T % L)), mode="edge")
    for at in range(0, T, L):
        pair = piece_BT[:, at : at + L], piece_BT[:, at + 1 : at + L + 1]
        segment = make_segment(*pair)
        segment.weights_SBL[:, P:] = 0
        yield Segment(*(x_SBL[:, rows] for x_SBL in segment))


def measure(
    model_config: ModelConfig,
    config: EvalConfig,
    mesh: Mesh,
    params: Any,
    tokens: np.ndarray,
    progress: Callable[[int, int], None],
) -> tuple[np.ndarray, int]:
    """Returns (nll_T in nats, the number of pieces): means over all pieces.

    nll_T[t] is the mean over predictions from exactly t + 1 tokens, or as many as the
    memory holds. config.streams pieces are read in parallel, in segments of
    config.tgt_len.
    """
    rows = host_rows(mesh, config.streams, "eval.streams")
    B, L, T = config.streams, config.tgt_len, config.cold_start
    piece_PT = cut_pieces(config.cut(tokens), T)
    P = len(piece_PT)
    model_config = evaluation_model(model_config, config)
    read = Reader(model_config, sum_streams, B, L, mesh)
    params = read.unstack(params)
    sum_T, batches = np.zeros(T), -(-P // B)
    for number in range(batches):
        segments = cut(piece_PT[number * B : (number + 1) * B], B, L, rows)
        nll_SL = np.concatenate(jax.device_get([*read.outputs(params, segments)]))
        sum_T += nll_SL.reshape(-1)[:T].astype(np.float64)
        progress(number + 1, batches)
    return sum_T / P, P


def bins(nll_T: np.ndarray) -> list[dict[str, Any]]:
    """Averages the curve over bins of 1, 2, 3 to 4, 5 to 8, ... tokens read."""
    ends = [1]
    while ends[-1] < len(nll_T):
        ends.append(2 * ends[-1])
    rows, low = [], 0
    for end in ends:
        high = min(end, len(nll_T))
        nll = float(nll_T[low:high].mean())
        row = {"from_tokens_read": low + 1, "to_tokens_read": high, "nll": nll}
        rows.append({**row, "bpc": metrics.bits(nll)})
        low = high
    return rows


def summarize(nll_T: np.ndarray, pieces: int, config: EvalConfig) -> dict[str, Any]:
    """Returns the curve in bins, its final level, and the cost of a cold start.

    settled_nll is the mean of the curve's last quarter. cost_nats is the sum of the
    curve's excess over it: the nll that one cold start adds to a text.
    """
    settled = float(nll_T[-max(len(nll_T) // 4, 1) :].mean())
    return {
        "cold_start": len(nll_T),
        "pieces": pieces,
        "settled_nll": settled,
        "settled_bpc": metrics.bits(settled),
        "cost_nats": float((nll_T - settled).sum()),
        "rows": bins(nll_T),
        "split": config.split,
        "tgt_len": config.tgt_len,
        "mem_len": config.mem_len,
    }
