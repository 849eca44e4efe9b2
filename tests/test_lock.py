"""A workdir has one run at a time, and whoever comes second learns of the first.

Dims: none.
"""

import errno
import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from txl_jax.errors import UserError
from txl_jax.lock import LOCK, locked

HOLD = """
import pathlib, sys, time
from txl_jax.lock import locked
with locked(pathlib.Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(600)
"""


def test_another_process_is_refused_until_it_is_dead(tmp_path: Path) -> None:
    workdir = tmp_path / "run"
    command = [sys.executable, "-c", HOLD, str(workdir)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout and holder.stdout.readline() == "held\n"
        with pytest.raises(UserError) as caught:
            with locked(workdir):
                pass
        who = f"process {holder.pid} on {socket.gethostname()}, started 20"
        assert f"{workdir} is in use by another run ({who}" in str(caught.value)
        holder.send_signal(signal.SIGKILL)
    assert (workdir / LOCK).exists(), "what a kill leaves"
    with locked(workdir):
        said = json.loads((workdir / LOCK).read_text())
        assert said["pid"] == os.getpid()
        with pytest.raises(UserError, match="in use"), locked(workdir):
            pass
    assert not list(workdir.iterdir())
    with locked(workdir):
        pass


@pytest.mark.parametrize("text", ["", "[]", "{", "{}"])
def test_a_holder_that_has_not_said_who_it_is(tmp_path: Path, text: str) -> None:
    with locked(tmp_path):
        (tmp_path / LOCK).write_text(text)
        with pytest.raises(UserError, match=r"\(another process\)"), locked(tmp_path):
            pass


def test_a_lock_that_was_removed_meanwhile_is_taken_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The holder ends between our opening its file and our locking it."""
    flock = fcntl.flock
    calls: list[int] = []

    def late(file: int, how: int) -> None:
        if not calls:
            (tmp_path / LOCK).unlink()
        calls.append(file)
        flock(file, how)

    monkeypatch.setattr(fcntl, "flock", late)
    with locked(tmp_path):
        assert len(calls) == 2
        monkeypatch.undo()
        with pytest.raises(UserError, match="in use"), locked(tmp_path):
            pass


def test_a_file_system_without_locks_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(file: int, how: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with locked(tmp_path):
        pass
    assert "cannot be locked (No locks available)" in capsys.readouterr().err


def test_a_workdir_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with (
        pytest.raises(UserError, match="cannot write"),
        locked(tmp_path / "file" / "x"),
    ):
        pass
