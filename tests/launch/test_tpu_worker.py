"""tpu_worker.sh alone: a machine that is shut down ends the training cleanly."""

import os
import shutil
import signal
import subprocess
from pathlib import Path

from tests.launch import world

PROGRAM = """
trap 'echo a checkpoint; exit 75' TERM
umask
echo begun
while :; do sleep 0.05; done
"""


def test_sigterm_to_all_keeps_the_status_of_the_program(tmp_path: Path) -> None:
    (tmp_path / "launch").mkdir()
    script = shutil.copy(world.ROOT / "launch/tpu_worker.sh", tmp_path / "launch")
    (tmp_path / "train.sh").write_text(PROGRAM)

    def call(verb: str) -> str:
        command = ["bash", script, verb]
        return subprocess.run(command, stdout=subprocess.PIPE, text=True).stdout

    call("start")
    log = tmp_path / "train.log"
    world.wait_until(lambda: "begun" in log.read_text())
    assert call("status") == "txl_jax-status running\n"
    os.killpg(int((tmp_path / "train.pid").read_text()), signal.SIGTERM)
    assert call("finish").splitlines()[-1] == "txl_jax-status 75"
    lines = log.read_text().splitlines()
    assert "a checkpoint" in lines
    assert lines[0] == "0000", "the umask: every machine may write the run's files"
