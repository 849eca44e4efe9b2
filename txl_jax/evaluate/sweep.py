"""A field of the evaluation against its values: Table 6's attention lengths."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from txl_jax import distributed
from txl_jax.errors import UserError, require_one_of
from txl_jax.model.config import ModelConfig
from txl_jax.report import plots
from txl_jax.report.writer import say, to_json
from txl_jax.step import TrainConfig

FIELDS = (
    *("mem_len", "ext_len", "sliding_window", "tgt_len"),
    *("clamp_len", "same_length"),
)
# How often a longer attention may be called better: ppl as the paper prints it.
DECIMALS = 2
REACHING = f"the least value whose ppl, rounded to {DECIMALS} decimals, is the best"


class Sweep(NamedTuple):
    """A field of EvalConfig, and the values to evaluate it at, in rising order."""

    field: str
    values: tuple[int, ...]

    def including(self, trained: int) -> "Sweep":
        """Returns the sweep with the value that training had among its own."""
        return Sweep(self.field, in_order(self.field, [*self.values, trained]))

    def at(self, how: Any, value: int) -> Any:
        """Returns the EvalConfig `how` with the field at a value.

        A memory of no tokens shows none: same_length is off there.
        """
        changes: dict[str, Any] = {self.field: value}
        if self.field == "mem_len" and not value:
            changes["same_length"] = False
        return dataclasses.replace(how, **changes)


def trained(model: ModelConfig, train: TrainConfig, field: str) -> int:
    """Returns what training had for a field of the evaluation."""
    if field in ("ext_len", "tgt_len"):
        return getattr(train, field)
    if field == "sliding_window":
        return train.ext_len + train.tgt_len
    return getattr(model, field)


def parse(text: str) -> Sweep:
    """Returns the sweep that FIELD=START:STOP:STEP or FIELD=a,b,c asks for.

    STOP is evaluated too, where a step meets it. Raises UserError for anything else.
    """
    field, _, values = text.partition("=")
    require_one_of(field.strip(), list(FIELDS), "the field of eval.sweep")
    try:
        return Sweep(field.strip(), _read(field.strip(), values))
    except (ValueError, KeyError):
        wanted = "mem_len=START:STOP:STEP or mem_len=a,b,c in whole numbers"
        if field.strip() == "same_length":
            wanted = "same_length=false,true"
        raise UserError(f"eval.sweep = {text!r} is not of the form {wanted}") from None


def _read(field: str, text: str) -> tuple[int, ...]:
    found: list[int]
    if field == "same_length":
        words = {"false": False, "true": True}
        found = [words[each.strip().lower()] for each in text.split(",")]
    elif ":" in text:
        start, stop, step = map(int, text.split(":"))
        found = list(range(start, stop + 1, step))
        if step < 1:
            raise ValueError
    else:
        found = [int(each) for each in text.split(",")]
    if not found or min(found) < 0:
        raise ValueError
    return in_order(field, found)


def in_order(field: str, values: list[int]) -> tuple[int, ...]:
    """Returns the values once each, rising; clamp_len = 0, which is off, comes last."""
    return tuple(
        sorted(
            set(values), key=lambda value: (field == "clamp_len" and not value, value)
        )
    )


def summarize(field: str, rows: list[dict[str, Any]], trained: int) -> dict[str, Any]:
    """Returns Table 6's columns of rows in rising order.

    ppl_init: at the value that training had; ppl_best: the least; shortest: the first
    value that reaches it, see REACHING.
    """
    best = min(row["ppl"] for row in rows)
    reaches = [
        row for row in rows if round(row["ppl"], DECIMALS) <= round(best, DECIMALS)
    ]
    init = next(row for row in rows if row[field] == trained)
    return {
        "init": trained,
        "ppl_init": init["ppl"],
        "ppl_best": best,
        "shortest": reaches[0][field],
        "shortest_is": REACHING,
    }


def run(
    sweep: Sweep,
    trained: int,
    folder: Path,
    evaluate: Callable[[int], dict[str, Any]],
) -> dict[str, Any]:
    """Evaluates at each value and at training's; leaves a JSON file and a plot.

    evaluate(value) returns the scores, nll, ppl, bpc and cold_tokens among them.
    """
    field = sweep.field
    values = sweep.including(trained).values
    rows = []
    for number, value in enumerate(values):
        scores = evaluate(value)
        kept = ("nll", "ppl", "bpc", "tokens", "cold_tokens", "seconds")
        rows.append({field: value, **{name: scores[name] for name in kept}})
        say(
            f"{field} = {value}: ppl {scores['ppl']:.2f}, {scores['bpc']:.4f} bits "
            f"per token ({number + 1} of {len(values)})"
        )
    result = {"sweep": field, **summarize(field, rows, trained), "rows": rows}
    say(
        f"{field}: ppl {result['ppl_init']:.2f} at training's {trained}, at best "
        f"{result['ppl_best']:.2f}, reached at {result['shortest']}"
    )
    if distributed.is_first():
        stem = folder / f"sweep_{field}"
        result |= {"picture": f"{stem}.png", "file": f"{stem}.json"}
        plots.plot_sweep(result, Path(result["picture"]))
        Path(result["file"]).write_text(to_json(result, indent=2) + "\n", "utf-8")
    return result
