"""Messages on stderr are shown once, and a long wait is announced."""

import logging
import queue
import sys
from functools import partial

import pytest

from tests.support.processes import LIMIT_SECONDS
from txl_jax.report import log
from txl_jax.report.log import log_to_screen, waiting


def test_a_message_of_the_core_is_shown_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    handlers = [logging.StreamHandler(sys.stderr)]  # a library may have added one
    monkeypatch.setattr(logging.root, "handlers", handlers)
    with log_to_screen():
        logging.getLogger("txl_jax.runtime").info("compiling")
    assert capsys.readouterr().err == "compiling\n"
    assert logging.getLogger("txl_jax").propagate


def test_a_long_wait_is_announced(monkeypatch: pytest.MonkeyPatch) -> None:
    said: queue.Queue[str] = queue.Queue()
    hear = partial(said.get, timeout=LIMIT_SECONDS)
    monkeypatch.setattr(log, "say", said.put)
    monkeypatch.setattr(log, "QUIET_SECONDS", 0.0)
    with pytest.raises(ValueError), waiting("reading"):
        assert hear() == "reading"
        raise ValueError
