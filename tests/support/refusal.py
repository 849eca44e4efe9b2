"""Expectations about errors that a user causes."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from txl_jax.errors import UserError


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
