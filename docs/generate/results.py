"""The committed logs of runs and evaluations, as tables."""

import collections
import json
import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from generate.markdown import ROOT, revision, table
from txl_jax.paper.memory_table import judge
from txl_jax.paper.options import KINDS, TASKS

FOLDER = ROOT / "experiments/logs"

# Table 3 of Morad et al. 2023, copied from github.com/bryjudy/fly-critic.
REPEAT_PREVIOUS = (
    ("POPGym's GRU", "1.00", "-0.32", "-0.43"),
    ("POPGym's best of 13 memories", "1.00", "0.79 (LMU)", "0.19 (LMU)"),
)


def read(name: str) -> dict[str, Any]:
    """Returns a committed result."""
    return json.loads((FOLDER / name).read_text("utf-8"))


def sweep(name: str) -> str:
    """Returns the perplexity of each value of a sweep."""
    result = read(name)
    field = result["sweep"]
    lines = [(row[field], f"{row['ppl']:.2f}") for row in result["rows"]]
    return table((f"`{field}`", "perplexity"), lines)


def evaluations(name: str) -> str:
    """Returns the perplexities on both splits of each way to evaluate a model."""
    found: dict[str, dict[str, str]] = collections.defaultdict(dict)
    for cell in read(name)["cells"]:
        found[cell["evaluation"]][cell["split"]] = f"{cell['ppl']:.2f}"
    lines = [(way, ppl["valid"], ppl["test"]) for way, ppl in found.items()]
    return table(("perplexity", "validation", "test"), lines)


def seeds(*names: str) -> str:
    """Returns each seed's perplexity in evaluations NAME_SEED.json, and their means."""
    found = [sorted(FOLDER.glob(f"{name}_[0-9]*.json")) for name in names]
    ends = [[path.stem.rpartition("_")[2] for path in paths] for paths in found]
    if any(each != ends[0] for each in ends):
        raise ValueError(f"{names} have different seeds")
    ppl = [[read(path.name)["ppl"] for path in paths] for paths in found]
    rows = [
        (f"seed {end}", *values) for end, *values in zip(ends[0], *ppl, strict=True)
    ]
    rows.append(("mean", *map(statistics.fmean, ppl)))
    lines = [(head, *(f"{value:.2f}" for value in values)) for head, *values in rows]
    return table(("perplexity", *(f"`{name}_*.json`" for name in names)), lines)


def dropout(*names: str) -> str:
    """Returns validation losses of runs that differ in dropout, and final losses."""
    texts = [(FOLDER / name).read_text("utf-8").splitlines() for name in names]
    runs = [[json.loads(line) for line in lines] for lines in texts]
    steps = [[each["updates"] for each in validations] for _, *validations in runs]
    if any(each != steps[0] for each in steps):
        raise ValueError("the runs were validated after different numbers of updates")
    rows = []
    for run, *validations in runs:
        nats = [each["valid_nats"] for each in validations]
        cells = [f"{each:.3f}" for each in nats]
        cells += [f"{math.exp(min(nats)):.2f}", f"{validations[-1]['train_nats']:.3f}"]
        cells += [f"{validations[-1]['seconds'] / 3600:.1f}"]
        cells.append(revision(run["git_revision"]))
        rows.append((run["config"]["model"]["dropout"], *cells))
    ends = "best perplexity", "training's loss", "hours", "revision"
    return table(("dropout", *(f"{step:,}" for step in steps[0]), *ends), rows)


def recl(*names: str) -> str:
    """Returns RECL by model and share of the positions, one number for each seed."""
    found: dict[str, list[dict[str, int]]] = {}
    for member in (each for name in names for each in read(name)["members"]):
        row = Path(member["workdir"]).parent.name
        found.setdefault(row, []).append(member["recl_tokens"])
    shares = "0.1", "0.5", "1"
    lines = [
        (f"`{row}`", *(", ".join(str(one[share]) for one in seeds) for share in shares))
        for row, seeds in found.items()
    ]
    return table(("model", *(f"r = {share}" for share in shares)), lines)


def speed(name: str) -> str:
    """Returns the times of Table 9: per token, and relative to a model with memory."""
    lines = [
        (
            f"{row['attention_len']:,}",
            f"{row['cached_seconds_per_token'] * 1e3:.2f}",
            *(f"{row[f'{x}_seconds_per_token']:.2f}" for x in ("sliding", "fair")),
            *(f"{row[x]:,.0f}" for x in ("ratio", "fair_ratio")),
            f"{row['predicted_fair_ratio']:,.0f}",
            f"{100 * row['fair_ratio'] / row['predicted_fair_ratio']:.0f} %",
            f"{row['paper_ratio']:,}",
        )
        for row in read(name)["rows"]
    ]
    seconds = "with a memory, ms", "plain window, s", "fair window, s"
    ratios = "plain / memory", "fair / memory", "predicted", "measured / predicted"
    return table(("attention length", *seconds, *ratios, "paper"), lines)


def copying(name: str, *distances: str) -> str:
    """Returns the correct answers by distance: mean and range of three seeds.

    The columns are memories or, if there is only one, the segments that a gradient
    crosses. distances: the distances to show, none = all.
    """
    cells = read(name)["cells"]
    column, title = "mem_len", "memory {}"
    if len({cell[column] for cell in cells}) == 1:
        column, title = "gradient_segments", "c = {}"
    counts = collections.Counter((x["delay"], x[column]) for x in cells)
    if {*counts.values()} != {3}:
        raise ValueError(f"{name} does not have three seeds of each cell")
    found: dict[int, dict[int, list[float]]] = {}
    for cell in cells:
        row = found.setdefault(cell["distance_tokens"], {})
        row.setdefault(cell[column], []).append(100 * cell["accuracy"])
    lines = [
        (distance, *map(percent, row.values()))
        for distance, row in sorted(found.items())
        if not distances or str(distance) in distances
    ]
    heads = (title.format(each) for each in next(iter(found.values())))
    return table(("tokens back", *heads), lines)


def memories(name: str) -> str:
    """Returns the correct answers or nats of each kind of memory, by task.

    Bold is better, and italics worse, than the row that a kind is compared with.
    """
    result = read(name)
    far = {cell["task"] for cell in result["cells"] if "accuracies" in cell}
    tasks = {x: rows for x, rows in result["rows_by_task"].items() if x not in far}
    lines = [
        (row_name(kind), *(memory_cell(result, task, kind) for task in tasks))
        for kind in max(tasks.values(), key=len)
    ]
    return table(("row", *(f"`{task}`" for task in tasks)), lines)


def row_name(kind: str) -> str:
    """Returns a kind's name in a table, with † if it can no longer be trained."""
    return f"`{kind}`" + " †" * (kind not in KINDS)


def distances(name: str) -> str:
    """Returns the correct answers of kinds of memory by task and distance."""
    cells = [cell for cell in read(name)["cells"] if "accuracies" in cell]
    rows: dict[tuple[str, str], list[dict[str, float]]] = {}
    for cell in cells:
        rows.setdefault((cell["task"], cell["kind"]), []).append(cell["accuracies"])
    heads = [*cells[0]["accuracies"]]
    lines = [
        (f"`{task}`", row_name(kind) + few_seeds(runs))
        + tuple(percent([100 * run[distance] for run in runs]) for distance in heads)
        for (task, kind), runs in rows.items()
    ]
    return table(("task", "row", *heads), lines)


def equal_bytes(name: str) -> str:
    """Returns how fast weights compare with a paper's memory of as many bytes."""
    cells, lines = read(name)["cells"], []
    nlls = {(cell["task"], cell["kind"], cell["seed"]): cell["nll"] for cell in cells}
    for task in TASKS:
        differences = [
            nll - nlls[task, "longer", seed]
            for (each, kind, seed), nll in nlls.items()
            if (each, kind) == (task, "fast_weights") and (task, "longer", seed) in nlls
        ]
        if differences:
            lines.append((f"`{task}`", spread(differences, 3), judge(differences)))
    return table(("task", "`fast_weights` - `longer`, nats", "verdict"), lines)


def few_seeds(runs: Sequence[object]) -> str:
    """Returns the number of seeds, or "" if there are three."""
    return "" if len(runs) == 3 else f", {len(runs)} seed{'s' * (len(runs) > 1)}"


def memory_cell(result: dict[str, Any], task: str, kind: str) -> str:
    """Returns correct answers or nats: the mean, the range and the verdict's mark."""
    row = result["rows_by_task"][task].get(kind)
    if row is None:
        return ""
    cells = [x for x in result["cells"] if (x["task"], x["kind"]) == (task, kind)]
    if all("accuracy" in cell for cell in cells):
        text = percent([100 * cell["accuracy"] for cell in cells])
    else:
        text = spread([cell["nll"] for cell in cells], 3)
        text += " nats" * ("accuracy" in result["rows_by_task"][task]["paper"])
    text += few_seeds(cells)
    mark = {"better": "**", "worse": "*"}.get(row.get("verdict", ""), "")
    return f"{mark}{text}{mark}"


def memory_costs(name: str, task: str) -> str:
    """Returns each kind of memory's cost in a task, and its loss on identifiers."""
    lines = [
        (
            row_name(kind),
            f"{row['parameters']:,}",
            f"{row['state_bytes'] / 2**10:,.0f}",
            f"{row['tokens_per_second']:,.0f}",
            f"{row['train_step_bytes'] / 2**20:,.0f}",
            f"{row['identifier_loss']:.2f}",
        )
        for kind, row in read(name)["rows_by_task"][task].items()
    ]
    heads = "parameters", "state, KiB", "tokens/s", "step, MiB", "identifiers, nats"
    return table(("row", *heads), lines)


def percent(values: list[float]) -> str:
    """Returns the mean, and the range unless it vanishes in one digit."""
    low, high = f"{min(values):.1f}", f"{max(values):.1f}"
    mean = f"{statistics.fmean(values):.1f} %"
    return mean if low == high else f"{mean} ({low}–{high})"


def mazes(name: str) -> str:
    """Returns the returns of agents by length, and how many trainings are missing."""
    result, found = read(name), collections.defaultdict(list)
    for cell in result["cells"]:
        found[cell["length"], cell["agent"]].append(cell)
    grid = [(n, agent) for n in sorted(result["lengths"]) for agent in result["agents"]]
    lines = []
    for length, agent in (key for key in grid if key in found):
        cells = found[length, agent]
        solved = [x["solved_after"] for x in cells if x["solved_after"]]
        updates = f", after {spread(solved, 0)}" if solved else ""
        share = f"{len(solved)} of {len(cells)}{updates}"
        best = [x["best_return"] for x in cells if "best_return" in x]
        text = spread(best, 2) if best else ""
        last = spread([x["return"] for x in cells], 2)
        lines.append((length, agent, text, last, share))
    heads = "best policy", "last updates", "seeds solved, after updates"
    rows = table(("steps", "agent", *heads), lines)
    total = len(grid) * len(result["seeds"])
    if len(result["cells"]) < total:
        rows += f"\n**{len(result['cells'])} of {total} trainings are finished.**\n"
    return rows


def repeat_previous(name: str) -> str:
    """Returns the highest mean returns of agents by difficulty, and published ones."""
    result, found = read(name), collections.defaultdict(list)
    for cell in result["cells"]:
        found[cell["agent"], cell["length"]].append(cell)
    lines = []
    for agent in result["agents"]:
        cells = [found[agent, length] for length in result["lengths"]]
        (steps,) = {x["steps"] for each in cells for x in each}
        returns = [spread([x["max_return"] for x in each], 2) for each in cells]
        lines.append((agent, f"{steps / 1e6:.1f} M", *returns))
    lines += ((agent, "15 M", *returns) for agent, *returns in REPEAT_PREVIOUS)
    heads = "Easy (k = 4)", "Medium (32)", "Hard (64)"
    return table(("agent", "steps", *heads), lines)


def spread(values: list[float], digits: int) -> str:
    """Returns the mean and the range."""
    mean, low, high = (
        f"{x:.{digits}f}" for x in (statistics.fmean(values), min(values), max(values))
    )
    return f"{mean} ({low} to {high})"


def cold_start(name: str) -> str:
    """Returns the loss in bits per token by the tokens read since a cold start."""
    rows = read(name)["rows"]
    ends = [(row["from_tokens_read"], row["to_tokens_read"]) for row in rows]
    heads = [f"{low}" if low == high else f"{low}–{high}" for low, high in ends]
    values = [f"{row['bpc']:.2f}" for row in rows]
    return table(("tokens read", *heads), [("bits per token", *values)])


def origin(name: str) -> str:
    """Returns a sentence on when, with what and for how long a result was made."""
    result = read(name)
    if "git_revisions" in result:  # the result is a table
        revisions = ", ".join(map(revision, result["git_revisions"]))
        return (
            f"`experiments/logs/{name}`: {result['hours']:.1f} hours of one core "
            f"({', '.join(result['days'])}; revision {revisions}).\n"
        )
    parts = result.get("cells", [result])
    made = [part["provenance"] for part in parts]
    timed = result["rows"] if result.get("sweep") else parts
    minutes = sum(each["seconds"] for each in timed) / 60
    days = sorted({each["time"][:10] for each in made})
    revisions = sorted({revision(each["git_revision"]) for each in made})
    (cores,) = {each["usable_cores"] for each in made}
    return (
        f"`experiments/logs/{name}`: {minutes:.1f} minutes on {cores} "
        f"core{'s' * (cores > 1)} ({' to '.join(dict.fromkeys(days[:1] + days[-1:]))}; "
        f"revision {', '.join(revisions)}).\n"
    )
