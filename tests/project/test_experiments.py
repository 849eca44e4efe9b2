"""Each ablation differs from its parent only in the stated fields.

Nothing in this file compiles or trains.
"""

import dataclasses
from pathlib import Path

import pytest

from txl_jax import config as configs
from txl_jax.config import Config

FOLDER = Path(__file__).parents[2] / "experiments"

# Fields of evaluation and samples that replace the memory of a model without one.
WINDOWS = "eval.mem_len eval.ext_len eval.same_length generate.mem_len"
# Each line has an ablation, its parent, and the fields that differ.
TABLE = f"""
wt103_128m wt103 model.n_layer model.mem_len train.tgt_len eval.split eval.mem_len
wt103_151m wt103 eval.split
wt103_shaw wt103_128m model.position model.n_position eval.mem_len
wt103_half_loss wt103_128m train.half_loss eval.mem_len
wt103_no_recurrence wt103_128m model.mem_len eval.clamp_len {WINDOWS}
wt103_no_recurrence_half_loss wt103_no_recurrence train.half_loss eval.ext_len
wt103_no_recurrence_shaw wt103_no_recurrence model.position model.n_position \
    eval.ext_len
wt103_no_recurrence_shaw_half_loss wt103_no_recurrence_shaw train.half_loss
wt103_vaswani wt103_no_recurrence_half_loss model.position
wt103_al_rfou wt103_no_recurrence_half_loss model.position model.n_position
wt103_no_recurrence_176 wt103_no_recurrence train.tgt_len eval.ext_len
wt103_no_recurrence_half_loss_172 wt103_no_recurrence_half_loss train.tgt_len
lm1b_300m lm1b model.d_inner
lm1b_shaw lm1b_300m model.position model.n_position model.untie_r
lm1b_no_recurrence lm1b_300m model.mem_len {WINDOWS}
"""
ABLATIONS = {name: rest for name, *rest in map(str.split, TABLE.split("\n")[1:-1])}


def load(name: str) -> Config:
    """Returns a packaged experiment."""
    return configs.load(name)


@pytest.mark.parametrize("name", ABLATIONS)
def test_an_ablation_changes_only_the_stated_fields(name: str) -> None:
    parent, *fields = ABLATIONS[name]
    assert {*configs.differences(load(name), load(parent))} == {*fields}
    source = (FOLDER / "ablations" / f"{name}.py").read_text("utf-8")
    assert f"import {parent}\n" in source


def test_a_docstring_has_the_command_and_the_published_number() -> None:
    expected = ("Published: ", "No published number", "Not in the paper")
    for path in (*FOLDER.glob("[!_]*.py"), *FOLDER.glob("ablations/[!_]*.py")):
        source = path.read_text("utf-8")
        assert f"\n    python -m txl_jax.main --config={path.stem}\n" in source
        assert any(words in source for words in expected), path


# Tokens of an update, where they were published.
LARGE = "enwik8_24l text8 wt103_large wt103_nvidia wt103_nvidia_large".split()
UPDATES = {"enwik8": 11_264, "wt103": 9_000, "lm1b_large": 16_384}
UPDATES |= dict.fromkeys(LARGE, 49_152)


def test_an_update_has_the_published_tokens() -> None:
    for name, expected in UPDATES.items():
        train = load(name).train
        tokens = train.batch_size * train.tgt_len * train.segments_per_update
        assert tokens == expected, name


# The README beside the experiments

README = (FOLDER / "README.md").read_text("utf-8")
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in README.splitlines()
    if line.startswith("|")
]


def test_the_readme_has_every_experiment() -> None:
    listed = {row[0].strip("`") for row in ROWS}
    files = {path.name for path in FOLDER.glob("[!_]*.py")}
    assert files <= listed
    assert {path.stem for path in FOLDER.glob("ablations/[!_]*.py")} == set(ABLATIONS)
    for name, (parent, *_) in ABLATIONS.items():
        assert [f"`{name}`", f"`{parent}`"] in [row[:2] for row in ROWS]
    for name, *_, parameters in ROWS:
        if name.endswith(".py`"):
            source = (FOLDER / name.strip("`")).read_text("utf-8")
            assert parameters in " ".join(source.split())


def test_the_readme_has_every_field_against_the_original_flags() -> None:
    fields = {
        f"{section}.{field.name}"
        for section, fields in configs.SECTIONS.items()
        if section not in ("generate", "convert", "compile", "table", "recl")
        for field in dataclasses.fields(fields)
    }
    rows = [row for row in ROWS if "." in row[0] and not row[0].endswith(".py`")]
    assert sorted(row[0].strip("`") for row in rows) == sorted(fields)
    assert {len(row) for row in rows} == {6}
