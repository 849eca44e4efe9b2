"""A stand-in for the training of a table's rows."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from txl_jax.config import Config
from txl_jax.errors import RETRY, Interrupted
from txl_jax.paper import table


@pytest.fixture
def trained(
    monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> list[str]:
    """Replaces training; returns the runs made so far, one of them interrupted."""
    runs: list[str] = []

    @contextlib.contextmanager
    def plan(row: Config, workdir: Path) -> Iterator[SimpleNamespace]:
        runs.append(f"{workdir.parent.name} {workdir.name}")
        if len(runs) == request.param:
            raise Interrupted("ended at update 4", RETRY)
        workdir.mkdir(parents=True, exist_ok=True)
        tokens = SimpleNamespace(split=lambda split: None)
        yield SimpleNamespace(result={}, tokens=tokens, train=lambda: None)

    monkeypatch.setattr(table, "plan", plan)
    return runs
