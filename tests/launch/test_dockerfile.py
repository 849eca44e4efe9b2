"""The stages and instructions of the Dockerfile."""

import re
from pathlib import Path

from tests.launch import world

LAUNCH = world.ROOT / "launch"
TEXT = (LAUNCH / "Dockerfile").read_text("utf-8")
INSTRUCTIONS = [
    (line.split()[0], line.partition(" ")[2])
    for line in TEXT.replace("\\\n", "").splitlines()
    if line and not line.startswith("#")
]
EXTRAS = {"cpu": "gcs", "gpu": "cuda13,gcs", "tpu": "tpu,gcs"}


def test_one_stage_per_device_with_its_extra() -> None:
    setup = (world.ROOT / "setup.py").read_text("utf-8")
    last = INSTRUCTIONS[-2 * len(EXTRAS) :]
    for stage, extras in EXTRAS.items():
        assert last[:2] == [
            ("FROM", f"base AS {stage}"),
            ("RUN", f"pip install --editable '.[{extras}]'"),
        ]
        assert all(f'"{extra}": ' in setup for extra in extras.split(","))
        del last[:2]


def test_the_base_is_pinned_runs_as_a_user_and_passes_signals_on() -> None:
    assert re.fullmatch(r"python:3\.\d+\.\d+-slim-\w+ AS base", INSTRUCTIONS[0][1])
    user = INSTRUCTIONS.index(("USER", "txl"))
    assert [name for name, _ in INSTRUCTIONS].count("USER") == 1
    root = [rest for name, rest in INSTRUCTIONS[:user] if name == "RUN"]
    assert root == ["useradd --create-home --uid 1000 txl"]
    assert ("ENTRYPOINT", '["python", "-m", "txl_jax.main"]') in INSTRUCTIONS


def test_the_context_has_what_is_copied_and_nothing_else() -> None:
    ignore = (LAUNCH / "Dockerfile.dockerignore").read_text("utf-8").split()
    copied = {
        source
        for name, rest in INSTRUCTIONS
        if name == "COPY"
        for source in rest.split()[1:-1]
    }
    assert ignore[0] == "*"
    assert {line[1:] for line in ignore if line.startswith("!")} == copied
    assert all((world.ROOT / Path(source)).exists() for source in copied)
