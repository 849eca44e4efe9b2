"""launch/README.md: its first command runs, and its table has every published model."""

import re
import shlex
from pathlib import Path

from tests.launch import world
from txl_jax.cli import flags

TEXT = (world.ROOT / "launch/README.md").read_text("utf-8")
ROWS = set(re.findall(r"^\| `(\w+)` \|(?:.*\|){5}$", TEXT, re.M))


def test_the_first_command_can_be_run_and_fits_the_slice(tmp_path: Path) -> None:
    """16 chips cannot share the paper's 60 streams, but can share the command's."""
    ((program, *rest),) = [
        shlex.split(line)
        for block in re.findall(r"```sh\n(.*?)```", TEXT, re.S)
        for line in block.splitlines()
        if "--spot" in line
    ]
    assert program == "launch/tpu_vm.sh"
    config = flags.parse(rest[rest.index("--") + 1 :]).config
    assert config.train.batch_size % 16 == config.eval.streams % 16 == 0
    result = world.run(world.make(tmp_path), "tpu_vm.sh", "--dry_run", *rest)
    assert result.returncode == 0, result.stderr


def test_every_published_model_is_in_the_table() -> None:
    files = (world.ROOT / "experiments").glob("*.py")
    on_a_cpu = {"quickstart", "copying", "music", "wikitext2"}
    on_a_cpu |= {"shakespeare", "shakespeare_long"}
    published = {path.stem for path in files} - {"__init__"} - on_a_cpu
    assert ROWS == published
