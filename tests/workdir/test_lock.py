"""A workdir has one run at a time; the error of a second names the first."""

import errno
import fcntl
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.refusal import refused
from txl_jax.errors import UserError
from txl_jax.workdir.lock import LOCK, locked

HOLD = """
import pathlib, sys, time
from txl_jax.workdir.lock import locked
with locked(pathlib.Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(600)
"""


def test_another_process_is_refused_until_the_holder_is_killed(tmp_path: Path) -> None:
    workdir = tmp_path / "run"
    command = [sys.executable, "-c", HOLD, str(workdir)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout and holder.stdout.readline() == "held\n"
        with pytest.raises(UserError) as caught, locked(workdir):
            pass
        who = f"process {holder.pid} on {socket.gethostname()}, started 20"
        assert f"{workdir} is in use by another run ({who}" in str(caught.value)
        holder.kill()
    assert (workdir / LOCK).exists(), "a kill leaves the file"
    for _ in range(2):
        with locked(workdir):
            assert f"process {os.getpid()} on" in (workdir / LOCK).read_text()
            (workdir / LOCK).write_text("")
            with refused(r"in use .* \(another process\)"), locked(workdir):
                pass
        assert not list(workdir.iterdir())


def test_a_file_system_without_locks_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(file: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with locked(tmp_path):
        pass
    reason = os.strerror(errno.ENOLCK)
    assert f"cannot be locked ({reason})" in capsys.readouterr().err
