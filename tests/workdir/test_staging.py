"""A workdir has one run at a time; the error of a second names the first."""

import errno
import fcntl
import os
import socket
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest

from tests.support.refusal import refused
from txl_jax.errors import UserError
from txl_jax.workdir.staging import LOCK, locked, read_arrays

HOLD = """
import pathlib, sys, time
from txl_jax.workdir.staging import locked
with locked(pathlib.Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(600)
"""


def test_arrays_of_a_claimed_size_are_made_again(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    with zipfile.ZipFile(path := tmp_path / "x.npz", "w") as archive:
        with archive.open("a.npy", "w") as file:
            header = {"descr": "<i8", "fortran_order": False, "shape": (2**58,)}
            np.lib.format.write_array_header_1_0(file, header)
    assert read_arrays(path) == {}
    assert "x.npz is damaged" in capsys.readouterr().err


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
