"""The published models on TPU slices, compiled ahead of time: pods.jsonl and pods.md.

    pip install 'jax[tpu]'
    python -m experiments.benchmarks.pods [--only=TABLE] [--rows=N]

Each row is one command of `--mode=compile`, whose JSON becomes a line of pods.jsonl;
rows that are there already are not compiled again. --rows=N compiles N more at most;
--rows=0 writes pods.md alone. No TPU takes part: memory and collectives are the
compiler's, times are bounds.
"""

import argparse
import json
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
LINES, PAGE = FOLDER / "pods.jsonl", FOLDER / "pods.md"
TITLES = {
    "fit": "The large models on large slices",
    "published": "The published batch: how far it scales",
    "weak": "8,192 tokens per chip",
}
# By the number of chips.
V4 = {
    4: "v4:2x2x1",
    8: "v4:2x2x2",
    16: "v4:2x2x4",
    32: "v4:2x4x4",
    64: "v4:4x4x4",
    128: "v4:4x4x8",
    256: "v4:4x8x8",
}
FLAT = {8: "2x4", 32: "4x8", 128: "8x16", 256: "16x16"}


def slices(kind: str) -> dict[int, str]:
    """Returns the slices of a kind of chip by their number of chips."""
    if kind in ("v4", "v5p"):
        return {n: name.replace("v4", kind) for n, name in V4.items()}
    return {n: f"{kind}:{shape}" for n, shape in FLAT.items()}


def commands() -> Iterator[tuple[str, str, str, str]]:
    """Yields (table, experiment, topology, flags) of every row, needed ones first."""
    for kernel in ("xla", "tpu"):
        own = f"--config.model.kernel={kernel}"
        yield "fit", "wt103_large", V4[128], f"{own} --config.eval.streams=128"
        yield (
            "fit",
            "wt103_large",
            "v5e:16x16",
            f"{own} --mesh=auto " + ("--config.eval.streams=128"),
        )
        yield (
            "fit",
            "lm1b_large",
            "v5e:16x16",
            (f"{own} --config.mesh.fsdp=8 --config.eval.streams=256"),
        )
    alone = "--evaluation=false --mesh=auto --config.model.kernel=tpu"
    alone += " --config.model.dtype=bfloat16"
    # The paper's 32, 32, 64 and 512 cores of TPU; a chip of v4 has two.
    for name, sizes in (
        ("wt103_large", (32, 8, 128, 256)),
        ("enwik8_24l", (16, 64, 256)),
        ("lm1b_large", (256, 64)),
        ("wt103", (4,)),
        ("enwik8", (4,)),
        ("wt103_nvidia", (8, 128)),
        ("wt103_nvidia_large", (8,)),
        ("text8", (16,)),
        ("enwik8_18l", (16,)),
        ("lm1b", (32,)),
        ("ptb", (4,)),
    ):
        for chips in sizes:
            yield "published", name, V4[chips], alone
    # 21 segments of 384 tokens are 8,064, 256 of 32 are 8,192.
    for name, streams in (("wt103_large", 21), ("lm1b_large", 256)):
        for chips in (8, 256, 32):
            for kind in ("v5e", "v4", "v5p", "v6e"):
                flags = f"{alone} --streams_per_chip={streams}"
                yield "weak", name, slices(kind)[chips], flags
        # Where it needs more than the chip has, as it stands.
        if name == "lm1b_large":
            flags += " --config.model.remat=true"
            for chips in (8, 256, 32):
                yield "weak", name, slices("v5e")[chips], flags


def run(table: str, name: str, topology: str, flags: str) -> dict[str, Any]:
    """Returns the JSON of one row's command, or the line that it ended with."""
    argv = ["--mode=compile", f"--topology={topology}", f"--config={name}"]
    argv += shlex.split(flags)
    row = {"table": table, "experiment": name, "flags": " ".join(argv)}
    program = [sys.executable, "-m", "txl_jax.main", *argv]
    done = subprocess.run(program, capture_output=True, text=True)
    if done.returncode:
        return row | {"error": done.stderr.strip().splitlines()[-1]}
    return row | json.loads(done.stdout.splitlines()[-1])


def read() -> list[dict[str, Any]]:
    """Returns the rows so far."""
    if not LINES.exists():
        return []
    return [json.loads(line) for line in LINES.read_text("utf-8").splitlines()]


def span(pair: dict[str, float], scale: float = 1, digits: int = 1) -> str:
    """Returns "from - to" of a pair of bounds."""
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
    """Returns a row of a table."""
    if "error" in row:
        topology = row["flags"].partition("--topology=")[2].split()[0]
        return [f"`{row['experiment']}`", topology, row["error"]]
    mesh = " x ".join(str(size) for size in row["mesh"].values())
    gib = f"{row['hbm_bytes'] / 2**30:.1f} of {row['hbm_capacity_bytes'] / 2**30:.1f}"
    first = [f"`{row['experiment']}`", row["topology"], str(row["chips"]), mesh]
    kernel = f"{row['kernel']}, {row['dtype']}" + (", remat" if row["remat"] else "")
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
        found = [row for row in rows if row["table"] == table]
        if not found:
            continue
        lines += [
            f"## {title}",
            "",
            f"| {' | '.join(HEAD)} |",
            "|---" * len(HEAD) + "|",
        ]
        found.sort(key=lambda row: (row["experiment"], row.get("chips", 0)))
        for row in found:
            own = cells(row)
            lines.append(f"| {' | '.join(own + [''] * (len(HEAD) - len(own)))} |")
        below = {"published": scaling, "weak": obstacles}.get(table)
        lines += ["", *(below(found) if below else []), ""]
    return "\n".join(lines).rstrip() + "\n"


def scaling(rows: list[dict[str, Any]]) -> list[str]:
    """Returns what more chips bring each experiment, without any overlap."""
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
# What traffic is for, by `pod.by_scope`.
SCOPES = {
    "update": "the update (gradients, moments, parameters)",
    "layers": "what is kept for the backward pass or goes between layers",
    "attention": "attention",
    "feed_forward": "the feed-forward layers",
    "embedding.embed": "the embedding",
    "embedding.nll": "the softmax",
    "memory": "the memory",
    "unnamed": "what the compiler names nothing for",
}


def obstacles(rows: list[dict[str, Any]]) -> list[str]:
    """Returns which rows reach GOAL without overlap, and what stands in others' way."""
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
        f"With no overlap at all, {len(good)} of {len(rows)} reach {GOAL:.0%} of the "
        f"peak{reached}."
    ]
    if len(good) < len(rows):
        lines[0] += (
            " What stands in the way of the others, in parts of the sum of the three "
            "times:"
        )
        lines.append("")
    for row, part in zip(rows, used, strict=True):
        if part < GOAL:
            lines.append(f"- `{row['experiment']}` on {row['topology']}: {parts(row)}.")
    return lines


def parts(row: dict[str, Any]) -> str:
    """Returns what the time of a row without overlap is made of, in words."""
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
The published batches are small for such slices. At one stream a chip the products are
the least of the three times: every chip still reads and writes all parameters, moments
and gradients in each update (the HBM's time), and adds all gradients up (the
interconnect's), however few tokens it has. More streams per chip are what helps."""


INTRODUCTION = """\
# The published models on TPU slices

Nothing here was measured: no TPU took part. libtpu compiled each step for the slice, on
a machine without a TPU; memory and collectives are what it says. Times are bounds from
`txl_jax/roofline.py`: from "all overlaps" (the slowest of products, memory and
interconnect) to "nothing overlaps" (their sum), without the vector units' work. Made by
`python -m experiments.benchmarks.pods`; all of it, with each command, is in
`pods.jsonl`.

mesh: data x fsdp x model. streams: of all chips. communication: the interconnect's part
of the sum of the three times. Utilisation: the FLOPs that the mathematics needs, of
the chips' peak. compiled: on two cores that had other work, and that were stopped for
minutes in some rows.

libtpu 0.0.42 made all rows, which jax[tpu] 0.10.2 installs. It counts more memory than
0.0.51: for a small step temporaries of 125 and not 74 MB, and a peak of 213 and not
204 MB. What does not fit both refuse; so where 0.0.42 took a step and states more than
the chip has, take its sum for too large, and the step for one that hardly fits.

Seven rows of the third table are of an earlier step, whose W_q, W_k, W_v and W_r ended
with a head's size and not with D: `lm1b_large` without remat on 32 and 256 chips, but
for v5e:16x16. On 8 chips that made the step's utilisation without overlap 39 instead of
43 % on v4, 44 instead of 46 % on v5p, and 22 in both on v6e.
"""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", choices=["", *TITLES])
    parser.add_argument("--rows", type=int, default=1000)
    given = parser.parse_args()
    known = {row["flags"] for row in read()}
    left = given.rows
    for table, name, topology, flags in commands():
        wanted = f"--mode=compile --topology={topology} --config={name} {flags}"
        if wanted in known or given.only not in ("", table) or not left:
            continue
        left -= 1
        row = run(table, name, topology, flags)
        with LINES.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        print(" | ".join(cells(row)), flush=True)
    PAGE.write_text(page(read()), "utf-8")


if __name__ == "__main__":
    main()
