"""Programs of `experiments`, started as from the command line."""

import importlib
from collections.abc import Callable
from pathlib import Path

import pytest

EXPERIMENTS = Path(__file__).parents[2] / "experiments"
Start = Callable[[str, str], object]


@pytest.fixture
def start() -> Start:
    """Returns a function that starts a program, such as "figures.reach"."""

    def main(name: str, flags: str) -> object:
        return importlib.import_module(f"experiments.{name}").main(flags.split())

    return main
