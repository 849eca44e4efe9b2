"""Every published config: what was published, and what was run here."""

import ast
import json
import re
from pathlib import Path
from typing import NamedTuple

from generate.markdown import ROOT, block, code, table

FOLDER = ROOT / "experiments"


class Experiment(NamedTuple):
    """The contents of an experiment file's docstring."""

    name: str
    title: str
    text: list[str]  # the docstring's other paragraphs, without the command
    command: str


def read(path: Path) -> Experiment:
    """Parses the docstring of an experiment's file."""
    said = ast.get_docstring(ast.parse(path.read_text("utf-8"))) or ""
    title, command, *rest = said.split("\n\n")
    return Experiment(
        path.stem,
        title.replace("\n", " "),
        [paragraph.replace("\n", " ") for paragraph in rest],
        command.strip(),
    )


def experiments(pattern: str = "[!_]*.py") -> list[Experiment]:
    """Returns the experiments whose files match."""
    return [read(path) for path in sorted(FOLDER.glob(pattern))]


def readme() -> dict[str, list[str]]:
    """Returns the rows of experiments/README.md, which tests compare with the files."""
    text = (FOLDER / "README.md").read_text("utf-8")
    rows = [
        [cell.strip() for cell in line[1:-1].split("|")]
        for line in text.splitlines()
        if line.startswith("|")
    ]
    return {row[0].strip("`").removesuffix(".py"): row[1:] for row in rows}


# Pages with results, by experiment.
PAGES = {
    "copying": "[accuracy against delay](copying.md)",
    "ptb": "[the paper's smallest model](models.md)",
    "shakespeare": "[beside nanoGPT](models.md)",
    "shakespeare_long": "[beside nanoGPT](models.md)",
    "wikitext2": "[the reference model](models.md)",
}


def result_here(name: str) -> str:
    """Returns the result of an experiment that was run here, or "not run"."""
    if name in PAGES:
        return PAGES[name]
    path = FOLDER / "logs" / f"{name}.json"
    if not path.exists():
        return "not run"
    result = json.loads(path.read_text("utf-8"))
    return (
        f"{result['bpc']:.3f} bits per token on {result['split']}, "
        f"{result['updates']:,} updates; `experiments/logs/{name}.json`"
    )


def published() -> str:
    """Returns the table of all experiments but the ablations."""
    rows = []
    known = readme()
    for each in experiments():
        what, number, parameters = known[each.name]
        link = f"[`{each.name}`](#experiment-{each.name.replace('_', '-')})"
        here = result_here(each.name)
        rows.append((link, what, number or "none", parameters, here))
    return table(("config", "is", "published on test", "parameters", "run here"), rows)


def ablations() -> str:
    """Returns the table of the ablations."""
    rows = []
    known = readme()
    for each in experiments("ablations/[!_]*.py"):
        _, recurrence, positions, loss, number = known[each.name]
        rows.append(
            [code(each.name), recurrence, positions, loss, number or "none"]
            + [result_here(each.name)]
        )
    head = ["config", "recurrence", "positions", "loss", "published (attention)"]
    return table([*head, "run here"], rows)


def with_flags(text: str) -> str:
    """Returns a docstring's paragraph with its flags as code, joined where broken."""
    text = re.sub(r"(--config\.\w+\.) (?=\w+=)", r"\1", text)
    return re.sub(r"(--config\.[\w.]+=\w+|\b\w+\.\w+=\S+?(?=[,. ]))", r"`\1`", text)


def details() -> str:
    """Returns a section for each experiment, made from its docstring."""
    parts = []
    for each in experiments():
        rest = "\n\n".join(map(with_flags, each.text))
        parts.append(
            f"{{#experiment-{each.name.replace('_', '-')}}}\n### `{each.name}`\n\n"
            f"{each.title}\n\n{block(each.command)}\n{rest}\n"
        )
    return "\n".join(parts)
