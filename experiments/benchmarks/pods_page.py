"""Writes pods.md from the rows of pods.jsonl; see `pods`."""

from typing import Any

TITLES = {
    "fit": "The large models on large slices",
    "published": "The published batch: how far it scales",
    "weak": "8,192 tokens per chip",
}


def span(pair: dict[str, float], scale: float = 1, digits: int = 1) -> str:
    """Formats a pair of bounds as "low – high"."""
    ends = sorted(value * scale for value in pair.values())
    return " – ".join(f"{end:,.{digits}f}" for end in ends)


HEAD = (
    "experiment",
    "slice",
    "chips",
    "mesh",
    "kernel",
    "streams",
    "GiB of",
    "step, ms",
    "tokens/s, thousand",
    "utilisation, %",
    "limit",
    "communication, %",
    "compiled, s",
)


def cells(row: dict[str, Any]) -> list[str]:
    """Returns the cells of a row; one without a date is marked as older."""
    name = f"`{row['experiment']}`" + ("" if "date" in row else " †")
    if "error" in row:
        topology = row["flags"].partition("--topology=")[2].split()[0]
        return [name, topology, row["error"]]
    mesh = " x ".join(str(size) for size in row["mesh"].values())
    gib = f"{row['hbm_bytes'] / 2**30:.1f} of {row['hbm_capacity_bytes'] / 2**30:.1f}"
    first = [name, row["topology"], str(row["chips"]), mesh]
    kept = row.get("remat_policy", "full" if row.get("remat") else "none")
    remat = {"none": "", "full": ", remat"}.get(kept, f", remat {kept}")
    kernel = f"{row['kernel']}, {row['dtype']}{remat}"
    first += [kernel, str(row["batch_size"]), gib]
    if not row["fits"]:
        return [*first, "does not fit"]
    return [
        *first,
        span(row["step_seconds"], 1e3),
        span(row["tokens_per_second"], 1e-3, 0),
        span(row["utilisation"], 100),
        row["limit"],
        f"{100 * row['communication_share']:.0f}",
        f"{row['seconds_to_compile']:.0f}",
    ]


def page(rows: list[dict[str, Any]]) -> str:
    """Returns the Markdown of all tables."""
    lines = [INTRODUCTION]
    for table, title in TITLES.items():
        own = [row for row in rows if row["table"] == table]
        if not own:
            continue
        lines += [
            f"## {title}",
            "",
            f"| {' | '.join(HEAD)} |",
            "|---" * len(HEAD) + "|",
        ]
        own.sort(key=lambda row: (row["experiment"], row.get("chips", 0)))
        for row in own:
            filled = cells(row)
            filled += [""] * (len(HEAD) - len(filled))
            lines.append(f"| {' | '.join(filled)} |")
        below = {"published": scaling, "weak": obstacles}.get(table)
        lines += ["", *(below(own) if below else []), ""]
    return "\n".join(lines).rstrip() + "\n"


def scaling(rows: list[dict[str, Any]]) -> list[str]:
    """Returns each experiment's speedup from more chips, without overlap."""
    lines = []
    for name in dict.fromkeys(row["experiment"] for row in rows):
        own = [row for row in rows if row["experiment"] == name and row.get("fits")]
        parts = []
        for row in own[1:]:
            fewer = own[0]
            speeds = [each["tokens_per_second"]["no_overlap"] for each in (row, fewer)]
            parts.append(
                f"{row['chips']} chips {speeds[0] / speeds[1]:.1f} times "
                f"({row['chips'] // fewer['chips']} times the chips, limit: "
                f"{row['limit']})"
            )
        if parts:
            lines.append(
                f"- `{name}`, against {own[0]['chips']} chips: {', '.join(parts)}."
            )
    return [*lines, "", WHY] if lines else []


GOAL = 0.4
# The scopes of HBM traffic, as `aot.traffic.by_scope` names them.
SCOPES = {
    "update": "the update (gradients, moments, parameters)",
    "layers": "activations between layers and for the backward pass",
    "attention": "attention",
    "feed_forward": "the feed-forward layers",
    "embedding.embed": "the embedding",
    "embedding.nll": "the softmax",
    "memory": "the memory",
    "unnamed": "operations without a name",
}


def obstacles(rows: list[dict[str, Any]]) -> list[str]:
    """Lists the rows that reach GOAL without overlap, and what limits the others."""
    rows = [row for row in rows if row.get("fits")]
    if not rows:
        return []
    used = [row["utilisation"]["no_overlap"] for row in rows]
    good = [
        f"`{row['experiment']}` on {row['topology']} ({part:.0%})"
        for row, part in zip(rows, used, strict=True)
        if part >= GOAL
    ]
    reached = f": {', '.join(good)}" if good else ""
    lines = [
        f"Without any overlap, {len(good)} of {len(rows)} reach {GOAL:.0%} of the "
        f"peak{reached}."
    ]
    if len(good) < len(rows):
        lines[0] += " The others spend the sum of the three times as follows:"
        lines.append("")
    for row, part in zip(rows, used, strict=True):
        if part < GOAL:
            lines.append(f"- `{row['experiment']}` on {row['topology']}: {parts(row)}.")
    return lines


def parts(row: dict[str, Any]) -> str:
    """Describes how the time of a row without overlap is divided."""
    seconds, needed = row["seconds"], row["utilisation"]["no_overlap"]
    share = {name: value / sum(seconds.values()) for name, value in seconds.items()}
    again = max(share["compute"] - needed, 0)
    traffic, count = row["hbm_traffic_bytes"], row["tokens"] / row["devices"]
    most = list(row.get("hbm_traffic_by_scope", {}).items())[:3]
    which = ", ".join(f"{SCOPES[name]} {size / traffic:.0%}" for name, size in most)
    return (
        f"{needed:.0%} products, {again:.0%} products made more than once, "
        f"{share['interconnect']:.0%} the interconnect, {share['hbm']:.0%} memory "
        f"traffic, which is {traffic / count / 1e6:.2f} MB a token"
        + (f" ({which})" if which else "")
    )


WHY = """\
The published batches are small for such slices. With one stream per chip the products
take the least of the three times. In each update every chip still reads and writes all
parameters, moments and gradients (HBM time) and takes part in summing the gradients
(interconnect time), however few tokens it has. More streams per chip raise the
utilisation."""


INTRODUCTION = """\
# The published models on TPU slices

Nothing on this page was measured. libtpu compiled each step for the slice on a machine
without a TPU; memory and collectives are those of the compiled programs. Times are
bounds from `txl_jax/aot/roofline.py`: they range from full overlap (the slowest of
products, memory and interconnect) to no overlap (their sum), and exclude the work of
the vector units. `python -m experiments.benchmarks.pods` writes this page; the full
results, with each command, are in `pods.jsonl`.

Columns: mesh is data x fsdp x model; streams are those of all chips; communication is
the interconnect's share of the sum of the three times; utilisation is the share of the
chips' peak FLOPs that the mathematics needs; compiled is the time on two cores that
also ran other work and, for some rows, were suspended for minutes.

All rows were made with libtpu 0.0.42.*, which jax[tpu] 0.10.2 installs. Its memory
figures exceed those of 0.0.51: for a small step, 125 instead of 74 MB of temporaries
and a peak of 213 instead of 204 MB. Both versions reject a step that does not fit. So a
step that 0.0.42 accepted while stating more memory than the chip has just fits, and the
stated figure is too large.

Rows marked † are of an earlier version of the step, without the changes that
`tpu_step.md` lists. Seven of them, `lm1b_large` without remat on 32 and 256 chips,
except v5e:16x16, are older still: the last dimension of W_q, W_k, W_v and W_r was the
head size instead of D. On 8 chips the utilisation of that version
without overlap was 39 instead of 43 % on v4, 44 instead of 46 % on v5p, and equal
(22 %) on v6e. Marked rows of the last two tables have no evaluation step in
`pods.jsonl`: their commands had a flag, removed since, that left it out.
"""
