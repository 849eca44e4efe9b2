"""The notebooks are valid, have no outputs, and run at a small size."""

import ast
from pathlib import Path

import nbclient
import nbformat
import pytest

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "experiments" / "notebooks").glob("*.ipynb"))
NAMES = ["attention_maps", "own_text", "quickstart", "restore_and_evaluate"]
SMALL = (
    "--config.train.num_steps=24 --config.train.eval_every=12 "
    "--config.checkpoint.every_steps=12 --config.optim.warmup_steps=4 "
    "--config.model.n_layer=1 --config.model.d_model=16 --config.model.d_head=8 "
    "--config.model.d_inner=16 --config.generate.num_tokens=20 "
    "--config.eval.baselines=false"
)


def code(path: Path) -> list[nbformat.NotebookNode]:
    book = nbformat.read(path, as_version=4)
    return [cell for cell in book.cells if cell.cell_type == "code"]


def test_all_notebooks_begin_with_the_same_cells() -> None:
    assert [path.stem for path in NOTEBOOKS] == NAMES
    beginnings = {tuple(cell.source for cell in code(path)[:2]) for path in NOTEBOOKS}
    assert len(beginnings) == 1, "the same installation, device and folders"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=NAMES)
def test_a_notebook_is_valid_short_and_stripped(path: Path) -> None:
    nbformat.validate(nbformat.read(path, as_version=4))
    for cell in code(path):
        assert not cell.outputs and cell.execution_count is None
        ast.parse(cell.source)
    own = sum(len(cell.source.splitlines()) for cell in code(path)[2:])
    assert own < 50, "longer code belongs in the package"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the folder of all notebooks' runs; the first trains for the others."""
    return tmp_path_factory.mktemp("runs")


def execute(
    path: Path, runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> str:
    """Runs a notebook in tmp_path at a small size; returns what it printed."""
    monkeypatch.setenv("TXL_RUNS", str(runs))
    monkeypatch.setenv("TXL_LENGTHS", "0,16")
    monkeypatch.setenv("TXL_ATTENTION_FLAGS", "--max_tokens=128 --mem_len=160")
    monkeypatch.setenv("TXL_CHECK_MINUTES", "0.5")
    monkeypatch.setenv("TXL_CHECK_FLAGS", "--tiny")
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    book = nbformat.read(path, as_version=4)
    where = {"metadata": {"path": str(tmp_path)}}
    nbclient.NotebookClient(book, timeout=600, resources=where).execute()
    return "".join(
        output.text
        for cell in book.cells
        if cell.cell_type == "code"
        for output in cell.outputs
        if output.output_type == "stream" and output.name == "stdout"
    )


@pytest.mark.long
@pytest.mark.parametrize("path", NOTEBOOKS, ids=NAMES)
def test_a_notebook_runs(
    path: Path, runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = f"--config.data.data_dir={runs / 'data'}"
    monkeypatch.setenv("TXL_FLAGS", f"{SMALL} {data}")
    printed = execute(path, runs, tmp_path, monkeypatch)
    assert "bits per byte" in printed
    assert (runs / "quickstart" if path.stem != "own_text" else runs).exists()
    assert path.stem != "quickstart" or (runs / "chip" / "page.md").exists()
