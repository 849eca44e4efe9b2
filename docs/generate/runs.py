"""How each experiment of the results page was run: command, seeds, time and files."""

import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from generate.claims import SEEDS, read
from generate.markdown import ROOT, code, revision


class Run(NamedTuple):
    """An experiment: its commands, a block on a page, and the files it wrote."""

    title: str
    page: str
    command: str  # a part of the block's text; "" = its program is gone
    files: tuple[str, ...]
    seeds: int  # 0 = nothing is trained
    more: str = ""  # facts that the files lack


RESULTS = "ablations/results/"
RUNS = (
    Run(
        "Quickstart",
        "tutorial/quickstart.md",
        "--config=experiments/quickstart.py",
        ("logs/quickstart.json",),
        1,
        "2026-11-29, two cores",
    ),
    Run(
        "Tables 6 and 10",
        "ablations.md",
        "--table=10 --workdir=runs/table6",
        (f"{RESULTS}table6.json", f"{RESULTS}table10.json"),
        3,
        "two rows stand in both tables, and count twice in the hours",
    ),
    Run(
        "Table 10, equal amounts of text",
        "ablations.md",
        "--workdir=runs/table10_tokens",
        (f"{RESULTS}table10_tokens.json", f"{RESULTS}table10_half_tokens.json"),
        3,
    ),
    Run(
        "Table 6, words",
        "ablations.md",
        "--workdir=runs/table6_words",
        (f"{RESULTS}table6_words.json",),
        3,
    ),
    Run(
        "Table 7",
        "ablations.md",
        "--workdir=runs/table7",
        (f"{RESULTS}table7.json",),
        3,
    ),
    Run(
        "Table 8",
        "recl.md",
        "--workdir=runs/recl_1111",
        tuple(f"logs/recl_{seed}.json" for seed in SEEDS),
        3,
        "2026-11-25, revision `58f5bfc`, one core",
    ),
    Run(
        "Table 9",
        "long_context.md",
        "--mode=speed",
        ("logs/speed.json", "logs/speed_1.json", "logs/speed_2.json"),
        0,
    ),
    Run(
        "Copying",
        "copying.md",
        "experiments.figures.copying --seeds",
        ("logs/copying.json",),
        3,
    ),
    Run(
        "Copying across segments",
        "copying.md",
        "--gradient_segments 1 2 4 8 --updates 800",
        ("logs/copying_gradients.json",),
        3,
    ),
    Run(
        "Associative recall across segments",
        "copying.md",
        "--recall 2",
        ("logs/recall_gradients.json",),
        3,
    ),
    Run(
        "Kinds of memory",
        "tried.md",
        "--workdir=runs/memories",
        ("logs/memories.json",),
        3,
        "two runs at a time, each on one core; those of 2026-11-27 beside other work",
    ),
    Run(
        "Agents in a T-maze",
        "tutorial/reinforcement_learning.md",
        "experiments.rl.mazes\n",
        ("logs/rl_mazes.json",),
        5,
        "unfinished: the page lists the lengths",
    ),
    Run(
        "Fast weights in a maze of 200 steps",
        "tutorial/reinforcement_learning.md",
        "--lengths 200",
        ("logs/rl_maze_200.json",),
        3,
        "beside other work",
    ),
    Run(
        "Agents that repeat cards",
        "tutorial/reinforcement_learning.md",
        "--environment=repeat_previous",
        ("logs/rl_repeat_previous.json",),
        3,
        "beside other work",
    ),
    Run(
        "Training beside Hugging Face's port",
        "migration.md",
        "",
        ("benchmarks/training.jsonl",),
        18,
    ),
    Run(
        "Penn Treebank",
        "models.md",
        "--config=ptb --workdir=runs/ptb",
        ("logs/ptb.jsonl", "logs/ptb.json"),
        1,
        "two cores",
    ),
    Run(
        "WikiText-2",
        "models.md",
        "--config=experiments/wikitext2.py --workdir=runs/wikitext2",
        (
            *(f"logs/wikitext2_seed_{seed}.json" for seed in SEEDS),
            *(f"logs/wikitext2_cache_{seed}.json" for seed in SEEDS),
        ),
        3,
        "one core",
    ),
    Run(
        "Tiny Shakespeare, three minutes",
        "models.md",
        "--config=experiments/shakespeare.py",
        ("benchmarks/shakespeare.jsonl",),
        1,
        "both recipes",
    ),
    Run(
        "Tiny Shakespeare, two hours",
        "models.md",
        "--config=experiments/shakespeare_long.py",
        ("logs/shakespeare_long.jsonl",),
        1,
        "2026-11-24, two cores, beside other work",
    ),
    Run(
        "Music",
        "tutorial/sequences.md",
        "--config=music --workdir=runs/music",
        ("logs/music.json",),
        1,
        "2026-11-27, one core",
    ),
    Run(
        "Cold start",
        "howto/evaluate.md",
        "--sweep=cold_start=512",
        ("logs/cold_start.json",),
        1,
    ),
    Run(
        "enwik8, compressed",
        "howto/compress.md",
        "python -m experiments.recipes.compress encode",
        ("logs/compress_1mb_encode.json", "logs/compress_3mb_encode.json"),
        1,
        "on one core, beside other work",
    ),
    Run(
        "Later additions",
        "howto/variants.md",
        "",
        ("benchmarks/variants.jsonl",),
        1,
        "beside other work",
    ),
)


def block(page: str, part: str) -> str:
    """Returns the block of commands on a page that contains `part`."""
    text = (ROOT / "docs" / page).read_text("utf-8")
    (found,) = (
        body for body in re.findall(r"```sh\n(.*?)```", text, re.S) if part in body
    )
    return f"```sh\n{found}```\n"


def flat(value: Any) -> Iterator[tuple[str, Any]]:
    """Yields every (key, value) inside a result, at any depth."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield key, inner
            yield from flat(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from flat(inner)


def hours(result: Any) -> float:
    """Returns the hours that a result states for its runs, 0 if it states none."""
    if isinstance(result, list):
        beside = [run for line in result for run in line.get("runs", [])]
        if beside:
            sides = [side for run in beside for side in run.values()]
            return sum(side["seconds"] for side in sides) / 3600
        return max(line.get("seconds", 0.0) for line in result) / 3600
    if "hours" in result:
        return result["hours"]
    parts = result.get("cells", [result])
    return sum(x["seconds"] + x.get("train_seconds", 0.0) for x in parts) / 3600


def made(run: Run) -> str:
    """Returns when, by which revisions and in how many hours the files were made."""
    found = [read(name) for name in run.files]
    pairs = [pair for result in found for pair in flat(result)]
    keys = "git_revision", "revision"
    revisions = {value for key, value in pairs if key in keys}
    revisions |= {x for key, value in pairs if key == "git_revisions" for x in value}
    days = {value[:10] for key, value in pairs if key in ("time", "date")}
    days |= {x for key, value in pairs if key == "days" for x in value}
    time = sum(map(hours, found))
    parts = [f"{time:.1f} hours" if time >= 0.1 else f"{60 * time:.1f} minutes"]
    parts = (parts if time else []) + sorted(days)
    names = sorted(map(revision, revisions))
    if names:
        parts.append(f"revision{'s' * (len(names) > 1)} {', '.join(names)}")
    return ", ".join([*parts, *filter(None, [run.more])])


def runs() -> str:
    """Returns a section for each experiment: a paragraph and the folded command."""
    parts = []
    for run in RUNS:
        seeds = f"{run.seeds} seeds" if run.seeds > 1 else "**one seed**"
        seeds = seeds if run.seeds else "timed"
        files = ", ".join(map(code, run.files))
        parts.append(
            f"### [{run.title}]({run.page})\n\n{seeds}; {made(run)}; {files}\n"
        )
        if run.command:
            parts[-1] += (
                "\n<details><summary>command</summary>\n\n"
                f"{block(run.page, run.command)}\n</details>\n"
            )
    return "\n".join(parts)
