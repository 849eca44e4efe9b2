"""The stages and instructions of the Dockerfile."""

import re

from tests.launch import world

LAUNCH = world.ROOT / "launch"
TEXT = (LAUNCH / "Dockerfile").read_text("utf-8")
INSTRUCTIONS = [
    (line.split()[0], line.partition(" ")[2])
    for line in TEXT.replace("\\\n", "").splitlines()
    if line and not line.startswith("#")
]


def arguments(name: str) -> list[str]:
    """Returns the arguments of all instructions of a name."""
    return [rest for each, rest in INSTRUCTIONS if each == name]


def test_each_device_has_a_stage_with_its_extra() -> None:
    stages = dict(zip(arguments("FROM"), arguments("RUN")[1:], strict=True))
    setup = (world.ROOT / "setup.py").read_text("utf-8")
    for stage, extra in (("cpu", "gcs"), ("gpu", "cuda13"), ("tpu", "tpu")):
        install = stages[f"base AS {stage}"]
        extras = re.fullmatch(r"pip install --editable '\.\[(.+)\]'", install)
        assert extras and extra in extras[1].split(",")
        assert all(f'"{each}": ' in setup for each in extras[1].split(","))


def test_the_context_has_what_is_copied_and_nothing_else() -> None:
    ignore = (LAUNCH / "Dockerfile.dockerignore").read_text("utf-8").split()
    copied = {source for rest in arguments("COPY") for source in rest.split()[1:-1]}
    assert ignore[0] == "*"
    assert {line[1:] for line in ignore if line.startswith("!")} == copied
    assert all((world.ROOT / source).exists() for source in copied)
