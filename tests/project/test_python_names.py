"""The names of `import txl_jax` are lazy and touch no device; its examples run."""

import doctest
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import txl_jax

PAGE = Path(__file__).parents[2] / "docs" / "python.md"
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE.read_text("utf-8"), re.S)

LAZY = """
import sys
import txl_jax
assert "jax" not in sys.modules, "import txl_jax imports nothing else"
names = [getattr(txl_jax, name) for name in txl_jax.__all__]
assert len(set(names)) == 6 and set(txl_jax.__all__) <= set(dir(txl_jax))
import txl_jax.main
from jax._src import xla_bridge
assert not xla_bridge._backends, "no device was touched"
assert "tensorflow" not in sys.modules
"""


def test_names_are_lazy_and_touch_no_device() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", LAZY], capture_output=True, text=True
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_the_example_of_the_docstring() -> None:
    assert doctest.testmod(txl_jax) == (0, 10)
    with pytest.raises(AttributeError, match="has no attribute 'Transformer'"):
        txl_jax.Transformer  # type: ignore[attr-defined] # noqa: B018


@pytest.mark.long
def test_the_memory_of_the_page_recalls_a_distant_token(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The page's blocks in order; only a remembered token can be predicted."""
    names: dict[str, Any] = {}
    for block in BLOCKS[:2]:
        exec(compile(block, str(PAGE), "exec"), names)
    assert names["memory"].filled_B.tolist() == [4, 4]
    match = re.fullmatch(r"with memory (.+), without (.+)\n", capsys.readouterr().out)
    assert match
    assert float(match[1]) > 0.95
    assert 0.35 < float(match[2]) < 0.65
