"""The loss against the number of tokens read since a cold start (section 4.4).

A split is cut into pieces of T tokens, each read from an empty memory. The mean nll of
the t-th prediction over all pieces is the model's loss with t tokens of context. Where
the curve stops falling, more context does not help.

Dims: B streams, P pieces, S segments of a piece, L segment, T tokens of a piece.
"""

import itertools
import math
from collections.abc import Iterator
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh

from txl_jax import metrics
from txl_jax.data.streams import Streams
from txl_jax.errors import UserError
from txl_jax.evaluate.options import EvalConfig, evaluation_model
from txl_jax.evaluate.perplexity import ShowProgress
from txl_jax.evaluate.reader import Reader, from_hidden
from txl_jax.model.config import ModelConfig
from txl_jax.model.fixed import FixedTransformerXL
from txl_jax.model.modules import Params
from txl_jax.model.segment import OneSegment
from txl_jax.report.plots import empty, save
from txl_jax.runtime.storage import Json
from txl_jax.sharding.rules import host_rows


@from_hidden
def sum_streams(
    model: FixedTransformerXL, hidden_BLD: Array, segment: OneSegment
) -> Array:
    """Returns nll_L, summed over the scored streams, of one segment."""
    nll_BL = model.embedding.nll(hidden_BLD, segment.targets_BL)
    return jnp.sum(nll_BL * segment.weights_BL, axis=0)


def measure(
    model_config: ModelConfig,
    config: EvalConfig,
    params: Params,
    mesh: Mesh,
    tokens: np.ndarray,
    progress: ShowProgress,
) -> tuple[np.ndarray, int]:
    """Returns (nll_T in nats, the number of pieces): means over all pieces.

    nll_T[t] is the mean over predictions from exactly t + 1 tokens, or as many as the
    memory holds. An incomplete last piece is dropped.
    """
    rows = host_rows(mesh, config.streams, "eval.streams")
    B, L, T = config.streams, config.tgt_len, config.cold_start
    scored = len(config.cut(tokens)) - 1
    P = scored // T
    if not P:
        raise UserError(
            f"eval.sweep = {config.sweep!r} exceeds the {scored} tokens to score: "
            "lower it"
        )
    model, S = evaluation_model(model_config, config), config.segments_per_step
    reader = Reader(model, sum_streams, B, L, mesh, n_segments=S)
    params = reader.lay_out(params)
    sum_T = np.zeros(T)
    for first in range(0, P, B):
        end = min(first + B, P)
        text = tokens[first * T : end * T + 1]
        padded = np.pad(text, (0, B * T + 1 - len(text)), mode="edge")
        streams = Streams(padded, B, L, rows=rows)
        segments = [*streams.epoch()]
        for segment in segments:
            segment.weights_SBL[:, streams.stream_B >= end - first] = 0
        nll_X = np.concatenate([*reader.outputs(params, segments)])
        sum_T += nll_X[:T].astype(np.float64)
        progress(end * T, P * T)
    return sum_T / P, P


def bins(nll_T: np.ndarray) -> Iterator[Json]:
    """Averages the curve over bins of 1, 2, 3 to 4, 5 to 8, ... tokens read."""
    ends = [0, *(2**n for n in range(64) if 2**n < len(nll_T)), len(nll_T)]
    for low, high in itertools.pairwise(ends):
        nll = float(nll_T[low:high].mean())
        span = {"from_tokens_read": low + 1, "to_tokens_read": high}
        yield {**span, "nll": nll, "bpc": metrics.bits(nll)}


def summarize(nll_T: np.ndarray, pieces: int, config: EvalConfig) -> Json:
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
        "rows": [*bins(nll_T)],
        "split": config.split,
        "tgt_len": config.tgt_len,
        "mem_len": config.mem_len,
    }


def plot_cold_start(nll_T: np.ndarray, result: Json, path: Path) -> None:
    """Draws bits per token against the tokens read since a cold start, and in bins."""
    figure = empty(8, 4.5)
    axes = figure.add_subplot()
    read, bits = np.arange(1, len(nll_T) + 1), nll_T / math.log(2)
    label = f"mean of {result['pieces']} cold starts"
    axes.plot(read, bits, "C0.", markersize=3, alpha=0.25, label=label)
    at = [(x["from_tokens_read"] * x["to_tokens_read"]) ** 0.5 for x in result["rows"]]
    binned = [x["bpc"] for x in result["rows"]]
    axes.plot(at, binned, "C0o-", markersize=4, label="mean of bins")
    settled = result["settled_bpc"]
    label = f"mean of the last quarter: {settled:.3f}"
    axes.axhline(settled, color="gray", linestyle=":", label=label)
    for name, color in (("tgt_len", "tab:orange"), ("mem_len", "tab:green")):
        if 0 < result[name] <= len(nll_T):
            label = f"eval.{name} = {result[name]}"
            axes.axvline(result[name], color=color, linestyle="--", label=label)
    axes.set_xscale("log", base=2)
    ticks = [2**n for n in range(int(math.log2(len(nll_T))) + 1)]
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    axes.set(xlabel="tokens read since the cold start", ylabel="bits per token")
    save(figure, path)
