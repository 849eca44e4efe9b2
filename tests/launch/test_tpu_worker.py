"""tpu_worker.sh by itself: what a machine that is shut down does to the training."""

import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

from tests.launch import world

PROGRAM = """
trap 'echo a checkpoint; exit 75' TERM
umask
echo begun
while :; do sleep 0.05; done
"""


def test_sigterm_to_all_leaves_the_programs_own_status(tmp_path: Path) -> None:
    (tmp_path / "launch").mkdir()
    script = shutil.copy(world.ROOT / "launch/tpu_worker.sh", tmp_path / "launch")
    (tmp_path / "train.sh").write_text(PROGRAM)

    def ask(verb: str) -> str:
        asked = subprocess.run(
            ["bash", script, verb], stdout=subprocess.PIPE, text=True
        )
        return asked.stdout

    ask("start")
    log = tmp_path / "train.log"
    while "begun" not in log.read_text():
        time.sleep(0.01)
    assert ask("status") == "txl_jax-status running\n"
    os.killpg(int((tmp_path / "train.pid").read_text()), signal.SIGTERM)
    assert ask("finish").splitlines()[-1] == "txl_jax-status 75"
    lines = log.read_text().splitlines()
    assert "a checkpoint" in lines
    assert lines[0] == "0000", "the umask: every machine may write what it makes"
