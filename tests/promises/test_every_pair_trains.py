"""Any two values of fields train together, or are refused in one line.

The values come from the types and constraints of the fields, and a greedy covering
array puts many pairs into one run. A row is a change of the tiny run's config.
"""

import dataclasses
import itertools
import random
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import pytest

from tests.support import trained
from tests.support.trained import home
from txl_jax import config as configs
from txl_jax.cli.plan import plan_updates
from txl_jax.cli.training_run import trained as trained_run
from txl_jax.config import FIELDS, Config
from txl_jax.data.preparation import prepare
from txl_jax.data.tokens import Tokens
from txl_jax.errors import UserError
from txl_jax.fields import KEY
from txl_jax.report.log import read_metrics

FIXTURES = (home,)
pytestmark = [pytest.mark.long, pytest.mark.promise("User errors are one line")]

Row = dict[str, Any]
Pair = tuple[tuple[str, Any], tuple[str, Any]]

SECTIONS = ("model.", "train.", "optim.")
# Two updates in each run.
FIXED = {"train.num_steps": 2, "train.eval_every": 2, "checkpoint.every_steps": 2}
NUMBERS: dict[Any, tuple[Any, ...]] = {
    bool: (False, True),
    int: (0, 1, 2, 8),
    float: (0.0, 0.1, 2.0),
}
# Values of texts and tuples, and of sizes that the numbers above do not reach.
TEXTS: dict[str, tuple[Any, ...]] = {
    "model.vocab_size": (0, 300),
    "model.cutoffs": ((), (60, 120)),
    "model.tie_projs": ((), (True,), (False, True, True)),
    "model.remat_policy": ("none", "full", "dots", "save:q,k", "offload:o"),
    "train.order": ("stream", "roll", "sentences:10"),
    "train.reset_memory_at": ("-1", "\\n"),
    "optim.betas": ((0.9, 0.999), (0.0, 0.0)),
}
NO_MEMORY = {"model.mem_len": 0, "eval.mem_len": 0, "generate.mem_len": 0}
# Values that are possible only together are tried from each of these.
BASES: list[Row] = [
    {},
    NO_MEMORY,
    {"model.position": "shaw", "model.n_position": 8},
    {"model.position": "learned", "model.n_position": 64, **NO_MEMORY},
]


def values_of(name: str, base: Config) -> list[Any]:
    """Returns the values of a field that its constraint allows, the base's first."""
    section, _, key = name.partition(".")
    options = getattr(base, section)
    field = next(x for x in dataclasses.fields(options) if x.name == key)
    require = field.metadata.get(KEY, lambda value, name: None)
    found = [getattr(options, key), *TEXTS.get(name, NUMBERS.get(field.type, ()))]
    found += [row[name] for row in BASES if name in row]
    if field.type is str and name not in TEXTS:
        found += re.findall(r"[\w-]+", refusal_of(require, "?", name).split("of ")[-1])
    return [x for x in dict.fromkeys(found) if not refusal_of(require, x, name)]


def refusal_of(call: Callable[..., Any], *args: Any) -> str:
    """Returns the message of the UserError that call(*args) raises, or ""."""
    try:
        call(*args)
        return ""
    except UserError as error:
        return str(error)


def changed(base: Config, row: Row) -> Config:
    """Returns the config with the values of a row."""
    sections: dict[str, Row] = {}
    for name, value in row.items():
        section, _, key = name.partition(".")
        sections.setdefault(section, {})[key] = value
    new = {x: dataclasses.replace(getattr(base, x), **y) for x, y in sections.items()}
    return dataclasses.replace(base, **new)


def make_cover(base: Config, tokens: Tokens) -> "Cover":
    """Returns the pairs of values of all fields that this machine accepts alone."""

    def check(row: Row) -> None:
        plan_updates(changed(base, row), tokens)

    names = [x for x in FIELDS if x.startswith(SECTIONS) and x not in FIXED]
    values = {name: values_of(name, base) for name in names}
    kernels = values["model.kernel"]
    values["model.kernel"] = [
        x for x in kernels if not refusal_of(check, {"model.kernel": x})
    ]
    return Cover(values, lambda row: not refusal_of(changed, base, row))


class Cover:
    """A greedy covering array: rows that fit and have many pairs of values each."""

    def __init__(self, values: dict[str, list[Any]], fits: Callable[[Row], bool]):
        self.values, self.fits = values, fits
        self.random = random.Random(0)
        items = [(name, value) for name in sorted(values) for value in values[name]]
        two = itertools.combinations(items, 2)
        self.left = {(x, y) for x, y in two if x[0] != y[0]}

    def next(self) -> Row:
        """Returns a row with many pairs that are left, {} at the end."""
        while self.left:
            pair = min(self.left, key=str)
            rows = filter(self.fits, ({**base, **dict(pair)} for base in BASES))
            for row in rows:
                return self.extended(row)
            self.left.remove(pair)
        return {}

    def extended(self, row: Row) -> Row:
        """Returns a row with values of all fields, each of which has most new pairs."""
        names = sorted(self.values.keys() - row.keys())
        for name in self.random.sample(names, len(names)):
            rows = [row | {name: value} for value in self.values[name]]
            rows.sort(key=lambda each: -len(self.left & pairs(each, name)))
            row = next(filter(self.fits, rows), row)
        return row


def pairs(row: Row, name: str = "") -> set[Any]:
    """Returns the pairs of fields and values in a row, or those with one field."""
    items = sorted(row.items(), key=lambda item: item[0])
    own = [(name, row[name])] if name else items
    two = itertools.product(own, items)
    return {(x, y) if x[0] < y[0] else (y, x) for x, y in two if x[0] != y[0]}


def problem_of(config: Config, workdir: Path) -> str:
    """Returns "" if a run makes two updates and a validation, else why not."""
    try:
        with trained_run(config, workdir) as done:
            lines = read_metrics(workdir / "metrics.jsonl")
        skipped = [line for line in lines if line.get("skipped")]
        return "" if done.result["updates"] == 2 and not skipped else str(skipped)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        shutil.rmtree(workdir, ignore_errors=True)


def test_every_pair(
    home: trained.Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = jax.devices()[:1]
    monkeypatch.setattr(jax, "devices", lambda *_: device)
    base = changed(configs.parse(configs.load(str(home.path / "tiny.py"))), FIXED)
    cover = make_cover(base, prepare(base.data))
    problems = {}
    while row := cover.next():
        cover.left -= pairs(row)
        if problem := problem_of(changed(base, row), tmp_path / "run"):
            problems[problem] = row
    assert not problems
