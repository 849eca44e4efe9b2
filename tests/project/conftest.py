"""Programs of `experiments`, started as from the command line."""

import importlib
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

EXPERIMENTS = Path(__file__).parents[2] / "experiments"
Start = Callable[[str, str], object]


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Start:
    """Returns a function that starts a program, such as "figures.reach"."""

    def main(name: str, flags: str) -> object:
        monkeypatch.setattr(sys, "argv", [name, *flags.split()])
        return importlib.import_module(f"experiments.{name}").main()

    return main
