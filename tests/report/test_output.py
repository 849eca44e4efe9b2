"""Files of JSON lines are complete, or say that they are not."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from txl_jax.errors import UserError
from txl_jax.report.output import json_lines

INTERRUPTED = """
import os, signal, sys
from txl_jax.report.output import json_lines

signal.signal(signal.SIGINT, signal.SIG_DFL)  # as `entry` sets it
with json_lines(sys.argv[1], "score.output") as write:
    write({"n": 1})
    os.kill(os.getpid(), signal.%s)
    write({"n": 2})
"""


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT"])
def test_lines_that_a_signal_cuts_off_are_in_a_file_that_says_so(
    tmp_path: Path, name: str
) -> None:
    path = tmp_path / "lines.jsonl"
    path.write_text("of an earlier run")
    line = [sys.executable, "-c", INTERRUPTED % name, str(path)]
    done = subprocess.run(line, capture_output=True, text=True, check=False)
    assert done.returncode == -signal.Signals[name]
    partial = f"{path}.incomplete"
    assert done.stderr == f"txl_jax: ended by a signal: {partial} is incomplete\n"
    assert Path(partial).read_text() == '{"n": 1}\n'
    assert path.read_text() == "of an earlier run"


def test_lines_have_their_name_once_they_are_complete(tmp_path: Path) -> None:
    path, before = tmp_path / "lines.jsonl", signal.getsignal(signal.SIGTERM)
    with pytest.raises(UserError), json_lines(str(path), "score.output") as write:
        raise UserError("a text cannot be read")
    assert not path.exists()
    with json_lines(str(path), "score.output") as write:
        write({"n": 1})
    assert [*tmp_path.iterdir()] == [path] and path.read_text() == '{"n": 1}\n'
    assert signal.getsignal(signal.SIGTERM) == before
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    unnamed, end = os.pipe()  # as of `>(gzip)` in bash
    for read, name in ((reader, tmp_path / "pipe"), (unnamed, f"/dev/fd/{end}")):
        with json_lines(str(name), "score.output") as write:
            write({"n": 1})
        assert os.read(read, 99) == b'{"n": 1}\n'
    for number in (reader, unnamed, end):
        os.close(number)
    assert len([*tmp_path.iterdir()]) == 2


def test_a_signal_keeps_the_effect_that_it_has_in_a_notebook(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    with pytest.raises(KeyboardInterrupt), json_lines(str(tmp_path / "x"), ""):
        signal.raise_signal(signal.SIGINT)
    assert signal.signal(signal.SIGINT, before) is signal.default_int_handler
    assert "x.incomplete is incomplete" in capfd.readouterr().err
