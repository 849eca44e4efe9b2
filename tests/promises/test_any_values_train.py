"""Random values of all fields train together, or are refused in one line.

The values come from the types and constraints of the fields. A row is a change of the
tiny run's config.
"""

import operator
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import pytest

from tests.support import trained
from tests.support.trained import home
from txl_jax import config as configs
from txl_jax.config import FIELDS, Config, with_values
from txl_jax.errors import UserError
from txl_jax.report.metrics_log import read_metrics
from txl_jax.train import plan

FIXTURES = (home,)
pytestmark = [pytest.mark.long, pytest.mark.promise("User errors are one line")]

Row = dict[str, Any]

ROWS, PARTS = 160, 8
SECTIONS = ("model.", "train.", "optim.")
# Two updates in each run.
FIXED = {"train.num_steps": 2, "train.eval_every": 2, "checkpoint.every_steps": 2}
NUMBERS: dict[Any, tuple[Any, ...]] = {
    bool: (False, True),
    int: (0, 1, 2, 8),
    float: (0.0, 0.1, 2.0),
}
# Values for texts and tuples, and sizes that the numbers above do not reach.
TEXTS: dict[str, tuple[Any, ...]] = {
    "model.vocab_size": (0, 300),
    "model.cutoffs": ((), (60, 120)),
    "model.tie_projs": ((), (True,), (False, True, True)),
    "model.remat_policy": ("none", "full", "dots", "save:q,k", "offload:o"),
    "train.order": ("stream", "roll", "sentences"),
    "train.reset_memory_at": ("", "\\n"),
}
NO_MEMORY = {"model.mem_len": 0, "eval.mem_len": 0, "generate.mem_len": 0}
SEGMENTS = "segments_per_call", "segments_per_update", "gradient_segments"
# Values that are only possible together; random changes start from each of these.
BASES: list[Row] = [
    {},
    NO_MEMORY,
    {"model.position": "shaw", "model.n_position": 8},
    {"model.position": "learned", "model.n_position": 64, **NO_MEMORY},
    {f"train.{name}": 2 for name in SEGMENTS},
]


def values_of(name: str, base: Config) -> list[Any]:
    """Returns the values of a field that its constraint allows, the base's first."""
    field = FIELDS[name]
    require = field.check
    found = [operator.attrgetter(name)(base)]
    found += TEXTS.get(name, NUMBERS.get(field.type, ()))
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


def draw_rows(values: dict[str, list[Any]], fits: Callable[[Row], bool]) -> list[Row]:
    """Returns rows that fit, each a random value of every field that takes one."""
    generator, rows = random.Random(0), []
    for n in range(ROWS):
        row = BASES[n % len(BASES)]
        for name in generator.sample(sorted(values), len(values)):
            changed = row | {name: generator.choice(values[name])}
            row = changed if name not in row and fits(changed) else row
        rows.append(row)
    return rows


@pytest.mark.parametrize("part", range(PARTS))
def test_random_values(
    part: int, home: trained.Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = jax.devices()[:1]
    monkeypatch.setattr(jax, "devices", lambda *_: device)
    base = with_values(configs.load(str(home.path / "tiny.py")), FIXED)
    names = [x for x in FIELDS if x.startswith(SECTIONS) and x not in FIXED]
    values = {name: values_of(name, base) for name in names}
    for kernel in ("cudnn", "tpu"):
        values["model.kernel"].remove(kernel)  # needs a GPU or a TPU
    rows = draw_rows(values, lambda row: not refusal_of(with_values, base, row))
    for n, row in enumerate(rows[part::PARTS]):
        print(row)
        with plan(with_values(base, row), tmp_path / str(n)) as run:
            run.train()
            lines = read_metrics(tmp_path / str(n) / "metrics.jsonl")
        assert run.result["updates"] == 2
        assert not [line for line in lines if line.get("skipped")]
