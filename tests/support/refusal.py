"""Expectations about user errors."""

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from txl_jax.errors import UserError


def contents(folder: Path) -> dict[str, tuple[int, ...]]:
    """Returns the size and the time of every file in a folder, and () for folders."""
    states: dict[str, tuple[int, ...]] = {}
    for parent, _, names in os.walk(folder):
        states[parent] = ()
        for path in (f"{parent}/{name}" for name in names):
            stat = os.lstat(path)
            states[path] = stat.st_size, stat.st_mtime_ns
    return states


@contextlib.contextmanager
def refused(match: str) -> Iterator[pytest.ExceptionInfo[UserError]]:
    """Expects a UserError of one line that matches a regular expression."""
    with pytest.raises(UserError, match=match) as caught:
        yield caught
    assert "\n" not in str(caught.value)


def refusal(call: Callable[..., Any], *args: Any) -> str:
    """Returns the message of the UserError that call(*args) raises: one line."""
    with refused(".") as caught:
        call(*args)
    return str(caught.value)
