"""The notebooks show their outputs, and show the same when they are executed again."""

import ast
import re
from pathlib import Path

import nbclient
import nbformat
import pytest
from nbformat import NotebookNode

from tests.support.shown import assert_shown

EXPERIMENTS = Path(__file__).parents[2] / "experiments"
NOTEBOOKS = sorted((EXPERIMENTS / "notebooks").glob("*.ipynb"))
# The README's command, which executes them in order: the first trains for the others.
COMMAND = re.search(
    r"jupyter nbconvert [^`]+", (EXPERIMENTS / "README.md").read_text("utf-8")
)
assert COMMAND
NAMES = re.findall(r"\S+\.ipynb", COMMAND[0])
ORDER = [EXPERIMENTS / "notebooks" / name for name in NAMES]
NOISE = re.compile(r"/(?:root|home|work|tmp|Users)/|Warning|Traceback")


def code(book: NotebookNode) -> list[NotebookNode]:
    return [cell for cell in book.cells if cell.cell_type == "code"]


def is_tagged(cell: NotebookNode, tag: str) -> bool:
    return tag in cell.metadata.get("tags", ())


def test_the_command_executes_all_notebooks() -> None:
    assert sorted(ORDER) == NOTEBOOKS and len(NOTEBOOKS) == 4


def test_all_notebooks_begin_with_the_same_folded_cell() -> None:
    books = [nbformat.read(path, as_version=4) for path in NOTEBOOKS]
    for path, book in zip(NOTEBOOKS, books, strict=True):
        link = f"OWNER/txl_jax/blob/main/experiments/notebooks/{path.name}"
        assert link in book.cells[0].source
    assert len({code(book)[0].source for book in books}) == 1
    assert all(code(book)[0].metadata.jupyter.source_hidden for book in books)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_valid_short_and_shows_its_outputs(path: Path) -> None:
    book = nbformat.read(path, as_version=4)
    nbformat.validate(book)
    assert path.stat().st_size < 300_000
    assert not NOISE.search(path.read_text("utf-8"))
    cells = code(book)
    assert [cell.execution_count for cell in cells] == [*range(1, len(cells) + 1)]
    assert not any("execution" in cell.metadata for cell in cells), "times vary"
    for cell in cells[1:]:
        ast.parse(cell.source)
        shows = re.search(r"\b(?:print|display|show)\(", cell.source)
        assert bool(cell.outputs) == bool(shows and not is_tagged(cell, "optional"))
        for output in cell.outputs:
            assert output.get("name", "stdout") == "stdout"
    own = sum(len(cell.source.splitlines()) for cell in cells[1:])
    assert own < 60, "longer code belongs in the package"


def kinds(cell: NotebookNode) -> list[str]:
    """Returns "text", or the types of a picture, of each output."""
    return [
        " ".join(sorted(output.data)) if "data" in output else "text"
        for output in cell.outputs
    ]


def printed(cell: NotebookNode) -> str:
    return "".join(output.get("text", "") for output in cell.outputs)


@pytest.mark.long
@pytest.mark.exact_bits
def test_executed_notebooks_show_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Texts and single tokens vary between processors, and losses a little."""
    monkeypatch.setenv("TFDS_DATA_DIR", str(tmp_path / "data"))
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    where = {"metadata": {"path": str(tmp_path)}}
    for path in ORDER:
        book = nbformat.read(path, as_version=4)
        shown = nbformat.read(path, as_version=4)
        nbclient.NotebookClient(book, timeout=3600, resources=where).execute()
        for new, old in zip(code(book), code(shown), strict=True):
            assert kinds(new) == kinds(old), old.source
            if not is_tagged(old, "varies"):
                assert_shown(printed(new), printed(old), relative=0.05)
