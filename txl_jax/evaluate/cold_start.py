"""The loss after a cold start, against how many tokens have been read (section 4.4).

A split is cut into pieces of N tokens, each read from an empty memory. The mean nll of
all pieces' t-th predictions is what a model makes of t tokens of context; where the
curve stops falling, more memory brings no more.

Dims: B pieces side by side, L segment, T tokens of a piece.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh

from txl_jax import distributed, metrics
from txl_jax.errors import UserError
from txl_jax.evaluate.perplexity import EvalConfig, evaluation_model, make_steps
from txl_jax.model.config import ModelConfig
from txl_jax.model.txl import TransformerXL
from txl_jax.preemption import stop
from txl_jax.report import plots
from txl_jax.report.writer import Progress, to_json
from txl_jax.sharding import check_streams


def cut_pieces(tokens: np.ndarray, T: int) -> np.ndarray:
    """Returns pieces of T + 1 tokens, each beginning with the last one of another.

    What does not fill a piece is left out. Raises UserError where nothing fills one.
    """
    count = (len(tokens) - 1) // T
    if not count:
        raise UserError(
            f"eval.cold_start = {T} is more than the {len(tokens) - 1} tokens to "
            "score: lower it"
        )
    begin_P = T * np.arange(count)
    return np.asarray(tokens)[begin_P[:, None] + np.arange(T + 1)].astype(np.int32)


def measure(
    config: ModelConfig,
    how: EvalConfig,
    mesh: Mesh,
    params: Any,
    tokens: np.ndarray,
    progress: Callable[[int, int], None],
) -> tuple[np.ndarray, int]:
    """Returns (nll_T in nats, pieces): the mean over pieces of how.cold_start tokens.

    nll_T[t] is of predictions from exactly t + 1 tokens, as far as the memory holds
    them. how.streams pieces are read side by side, in segments of how.tgt_len.
    """
    check_streams(mesh, how.streams, "eval.streams")
    B, L, T = how.streams, how.tgt_len, how.cold_start
    pieces_PT = cut_pieces(how.cut(tokens), T)
    P = len(pieces_PT)
    apart, empty, _ = make_steps(config, how, mesh)
    model = TransformerXL(evaluation_model(config, how), stacked=False)

    @jax.jit
    def read(
        params: Any, memory: Any, inputs_BL: Array, targets_BL: Array, weight_B: Array
    ) -> tuple[Any, Array]:
        nll_BL, memory = model.apply(
            {"params": params}, inputs_BL, targets_BL, memory, method="nll"
        )
        return memory, jnp.sum(nll_BL * weight_B[:, None], axis=0)

    params = apart(params)
    width = -(-T // L) * L
    sum_T, batches = np.zeros(width), -(-P // B)
    for number in range(batches):
        own_BT = pieces_PT[number * B : (number + 1) * B]
        weight_B = (np.arange(B) < len(own_BT)).astype(np.float32)
        # Padding at the right end changes nothing before it.
        own_BT = np.pad(own_BT, ((0, B - len(own_BT)), (0, width - T)), mode="edge")
        memory, parts = empty(params), []
        for at in range(0, width, L):
            pair = own_BT[:, at : at + L], own_BT[:, at + 1 : at + L + 1]
            memory, nll_L = read(params, memory, *pair, weight_B)
            parts.append(nll_L)
        sum_T += np.concatenate(jax.device_get(parts)).astype(np.float64)
        progress(number + 1, batches)
    return sum_T[:T] / P, P


def bins(nll_T: np.ndarray) -> list[dict[str, Any]]:
    """Returns the curve in bins of 1, 2, 3 to 4, 5 to 8, ... tokens read."""
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


def summarize(nll_T: np.ndarray, pieces: int) -> dict[str, Any]:
    """Returns the curve's bins, where it settles, and what a cold start costs.

    settled_nll is the mean of the curve's last quarter. cost_nats: what one cold start
    adds to the sum of a text's nll, the curve's excess over that.
    """
    settled = float(nll_T[-max(len(nll_T) // 4, 1) :].mean())
    return {
        "cold_start": len(nll_T),
        "pieces": pieces,
        "settled_nll": settled,
        "settled_bpc": metrics.bits(settled),
        "cost_nats": float((nll_T - settled).sum()),
        "rows": bins(nll_T),
    }


def keep(nll_T: np.ndarray, pieces: int, how: EvalConfig, folder: Path) -> Any:
    """Returns the summary; leaves the whole curve as JSON, and a plot."""
    lengths = {"split": how.split, "tgt_len": how.tgt_len, "mem_len": how.mem_len}
    result = summarize(nll_T, pieces) | lengths
    if distributed.is_first():
        stem = folder / "cold_start"
        result |= {"picture": f"{stem}.png", "file": f"{stem}.json"}
        curve = {"nll_by_tokens_read": [round(nll, 6) for nll in nll_T.tolist()]}
        Path(result["file"]).write_text(to_json(result | curve) + "\n", "utf-8")
        plots.plot_cold_start(nll_T, result, Path(result["picture"]))
    return result


def run(
    config: ModelConfig,
    how: EvalConfig,
    mesh: Mesh,
    params: Any,
    tokens: np.ndarray,
    folder: Path,
) -> dict[str, Any]:
    """Reads pieces of a split, and returns what `keep` does."""
    with Progress("cold starts", 0) as bar:

        def progress(done: int, total: int) -> None:
            bar(done, total)
            if stop.at_boundary():
                raise stop.end("while evaluating")

        measured = measure(config, how, mesh, params, tokens, progress)
    return keep(*measured, how, folder)
