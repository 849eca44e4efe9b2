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


def stages() -> dict[str, list[tuple[str, str]]]:
    """Returns the instructions of each stage, its FROM first."""
    result: dict[str, list[tuple[str, str]]] = {}
    for name, rest in INSTRUCTIONS:
        if name == "FROM":
            stage = result[rest.rpartition(" AS ")[2]] = []
        stage.append((name, rest))
    return result


def test_one_stage_per_device_with_its_extra() -> None:
    assert list(stages()) == ["base", *EXTRAS]
    setup = (world.ROOT / "setup.py").read_text("utf-8")
    for stage, extras in EXTRAS.items():
        assert stages()[stage] == [
            ("FROM", f"base AS {stage}"),
            ("RUN", f"pip install --editable '.[{extras}]'"),
        ]
        assert all(f'"{extra}": ' in setup for extra in extras.split(","))


def test_the_base_image_is_pinned_and_its_user_not_root() -> None:
    _, image = stages()["base"][0]
    assert re.fullmatch(r"python:3\.\d+\.\d+-slim-\w+ AS base", image)
    names = [name for name, _ in INSTRUCTIONS]
    user = names.index("USER")
    assert INSTRUCTIONS[user] == ("USER", "txl")
    assert names.count("USER") == 1
    root = [rest for name, rest in INSTRUCTIONS[:user] if name == "RUN"]
    assert root == ["useradd --create-home --uid 1000 txl"]


def test_signals_reach_the_program() -> None:
    (entry,) = [rest for name, rest in INSTRUCTIONS if name == "ENTRYPOINT"]
    assert entry == '["python", "-m", "txl_jax.main"]'


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
