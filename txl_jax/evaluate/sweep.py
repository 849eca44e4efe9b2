"""A sweep over one field of the evaluation, as in Table 6's attention lengths."""

from typing import Any

from txl_jax.model.config import ModelConfig
from txl_jax.update.options import TrainConfig

# The paper prints perplexities with two decimals; smaller gains do not count.
DECIMALS = 2
REACHING = f"the least value whose ppl, rounded to {DECIMALS} decimals, is the best"
SCORES = ("nll", "ppl", "bpc", "tokens", "cold_tokens", "seconds")


def trained(model: ModelConfig, train: TrainConfig, field: str) -> int:
    """Returns the value of the swept field during training."""
    if field in ("ext_len", "tgt_len"):
        return getattr(train, field)
    if field == "sliding_window":
        return train.ext_len + train.tgt_len
    return getattr(model, field)


def row(field: str, value: int, scores: dict[str, Any]) -> dict[str, Any]:
    """Returns a row of the table: the field's value and its scores."""
    return {field: value, **{name: scores[name] for name in SCORES}}


def summarize(field: str, rows: list[dict[str, Any]], trained: int) -> dict[str, Any]:
    """Returns the columns of Table 6, and the rows, which are in ascending order.

    ppl_init: at training's value; ppl_best: the lowest; shortest: the smallest value
    that reaches ppl_best, see REACHING.
    """
    best = min(row["ppl"] for row in rows)
    reached = round(best, DECIMALS)
    return {
        "sweep": field,
        "init": trained,
        "ppl_init": next(row["ppl"] for row in rows if row[field] == trained),
        "ppl_best": best,
        "shortest": next(
            row[field] for row in rows if round(row["ppl"], DECIMALS) <= reached
        ),
        "shortest_is": REACHING,
        "rows": rows,
    }
