"""The names of `import txl_jax` are lazy and touch no device; its examples run."""

import doctest
import inspect
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import pytest

import txl_jax
from tests.support import tiny
from tests.support.shown import assert_shown

PAGE = Path(__file__).parents[2] / "docs" / "python.md"
# Code, and the output that the page shows after it.
BLOCKS = re.findall(
    r"```python\n(.*?)```(?:\n\n```text\n(.*?)```)?", PAGE.read_text("utf-8"), re.S
)

LAZY = """
import sys
import txl_jax
assert "jax" not in sys.modules, "import txl_jax imports nothing else"
names = [getattr(txl_jax, name) for name in txl_jax.__all__]
assert len(set(names)) == 10 and set(txl_jax.__all__) <= set(dir(txl_jax))
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


def test_the_page_lists_the_public_names() -> None:
    page = PAGE.with_name("api.md").read_text("utf-8")
    public = page.partition("## The public names")[2].partition("\n## ")[0]
    listed = re.findall(r"^\.\. auto\w+:: txl_jax\.(\w+)", public, re.M)
    assert sorted(listed) == txl_jax.__all__ == sorted(txl_jax.__all__)
    for name in listed:
        assert inspect.getdoc(getattr(txl_jax, name)), name


def test_the_example_of_the_docstring() -> None:
    assert doctest.testmod(txl_jax) == (0, 10)
    with pytest.raises(AttributeError, match="has no attribute 'Transformer'"):
        txl_jax.Transformer  # type: ignore[attr-defined] # noqa: B018


def test_the_examples_of_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"txl_jax": txl_jax}
    filled = [None, [16], [8] * 64, None, [7, 6], [4, 4]]
    for (code, shown), filled_B in zip(BLOCKS, filled, strict=True):
        exec(compile(code, str(PAGE), "exec"), names)
        assert_shown(capsys.readouterr().out, shown)
        if filled_B:
            assert names["memory"].filled_B.tolist() == filled_B
    assert [names[x].shape for x in ("nll_T", "hidden_TD")] == [(19,), (19, 128)]
    assert names["params"]["params"]["TransformerXL_0"].keys() == {"layers", "u", "w"}
    memory = txl_jax.Memory.empty(names["loaded"].config.model, batch_size=2)
    expected_BLV, *_ = names["call"](names["tokens_BL"], jax.tree.leaves(memory))
    tiny.assert_close(names["log_probs_BLV"], expected_BLV)
