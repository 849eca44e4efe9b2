"""An exported model computes the same as the model, without the package."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support import tiny
from tests.support.refusal import refused
from txl_jax.aot import stablehlo
from txl_jax.data.vocab import CharVocab
from txl_jax.generate import GenerateConfig, stream

CONFIG = tiny.config(mem_len=9, pre_lnorm=True, clamp_len=4)
PARAMS = tiny.make_params(CONFIG)
VOCAB = CharVocab("0123456789ab")
PROMPTS = tiny.make_tokens(2, 11)
# Reads prompts and given continuations, and prints the nll of the continuations.
PROGRAM = """
import json, sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("txl_jax", "flax"):
            raise ImportError(name)

sys.meta_path.insert(0, Blocker())
folder, prompts, drawn = json.loads(sys.argv[1])
sys.path.insert(0, folder)
import jax
jax.config.update("jax_platforms", "cpu")
from loader import Model

model = Model(folder)
_, memory = model.read([x[:-1] for x in prompts], model.empty(len(prompts)))
token_B, rows = [x[-1] for x in prompts], []
for next_B in zip(*drawn):
    log_probs_BV, memory = model.read([[x] for x in token_B], memory)
    token_B = next_B
    rows.append([-float(row[x]) for row, x in zip(log_probs_BV, next_B)])
for wrong in ([[]], [[12]]):
    try:
        model.read(wrong, memory)
        sys.exit(f"{wrong} is read")
    except ValueError as error:
        assert str(error).startswith("give one token or more from 0 to 11"), error
print(json.dumps(rows))
"""


def test_the_loader_predicts_as_generate_token_by_token(tmp_path: Path) -> None:
    """The loader runs in a fresh interpreter that cannot import the package."""
    stablehlo.save(CONFIG, PARAMS, VOCAB, 4, tmp_path / "model")
    sampling = GenerateConfig(num_tokens=12, mem_len=9, temperature=3.0)
    (drawn,) = stream(CONFIG, PARAMS, [*PROMPTS], sampling, window=4, segments=1)
    assert len({*drawn.tokens_BT.flat}) > 3
    given = [str(tmp_path / "model"), PROMPTS.tolist(), drawn.tokens_BT.tolist()]
    command = [sys.executable, "-I", "-c", PROGRAM, json.dumps(given)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    tiny.assert_close(np.array(json.loads(done.stdout)).T, drawn.nll_BT)
    readme = (tmp_path / "model" / "README.md").read_text()
    modes = {path.stat().st_mode for path in (tmp_path / "model").glob("*.*")}
    assert len(modes) == 1, "files follow the umask"
    assert (tmp_path / "model" / "loader.py").read_text() in readme


@pytest.mark.parametrize(
    "fields", [{"mem_len": 0}, tiny.SAME, tiny.COMPRESSED, tiny.TOKENS]
)
def test_other_memories_are_refused(fields: dict[str, Any], tmp_path: Path) -> None:
    with refused("set generate.mem_len above 0"):
        config = tiny.config(**fields)
        stablehlo.save(config, PARAMS, VOCAB, 4, tmp_path / "model")
