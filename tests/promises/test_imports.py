"""A module imports only from the rows above its own, so the data flows one way."""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "txl_jax"

ROWS = """
    allocator errors fields seal hlo convert.crc32c convert.machine lamb guard
    distributed
    preemption watchdog peers
    chips
    convert.table data.pieces data.progress data.text data.streams data.prefetch
    convert.pickle convert.keys
    data.download data.files data.dataset data.word data.subword data.mirror
    data.copying
    data.archive data.vocab data.sentences convert.bundle
    data.facts data.spelling data.detokenization convert.words
    model.config
    roofline data.corpora sharding kernels.xla kernels.softmax kernels.skew
    kernels.tpu_blocks kernels.tiles kernels.decode kernels.sharded
    kernels.adaptive kernels.tpu_tiles kernels.tpu_scores
    kernels.tpu_forward kernels.tpu_backward
    kernels.tpu
    convert.embedding model.positions model.memory model.initializers model.dropout
    model.heads
    kernels.chunked
    kernels.choice
    model.key_values
    convert.pytorch digest model.adaptive data.builder data.recipe optim metrics
    model.attention data.encode report.writer report.plots report.recl ablation
    report.provenance report.trace report.wait report.tensorboard report.dots outcome
    lease
    model.block data.tokens record
    model.txl
    state bucket generate convert.huggingface convert.nvidia
    copies lock
    store
    step checkpoint evaluate.ngram convert.tensorflow
    convert.formats
    evaluate.accounting evaluate.sliding evaluate.sweep
    evaluate.perplexity evaluate.attended evaluate.reach evaluate.recl diagnose
    evaluate.cold_start evaluate.speed evaluate.score evaluate.attention
    evaluate.context
    report.attention config
    report.page
    workdir train
    flags aot
    restore pod
    evaluate.group
    convert.transfer table help sampling
    run
    modes
    main
"""
ROW = {
    name: row
    for row, names in enumerate(ROWS.strip().splitlines())
    for name in names.split()
}


def imported(path: Path) -> set[str]:
    """Returns the modules of the package that a file imports, anywhere in it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, f"{path}: relative import"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    inside = {name.removeprefix("txl_jax.") for name in found if "txl_jax." in name}
    # `from txl_jax.model.memory import Memory` imports model.memory.
    return {name if name in ROW else name.rpartition(".")[0] for name in inside}


def modules() -> list[str]:
    """Returns every module of the package by its dotted name."""
    paths = (path.relative_to(PACKAGE) for path in PACKAGE.rglob("*.py"))
    names = (".".join(path.with_suffix("").parts) for path in paths)
    return sorted(name for name in names if not name.endswith("__init__"))


def test_every_module_has_a_row() -> None:
    assert set(modules()) == set(ROW)


@pytest.mark.parametrize("name", modules())
def test_imports_only_from_rows_above(name: str) -> None:
    path = PACKAGE / Path(*name.split(".")).with_suffix(".py")
    below = {other for other in imported(path) if ROW[other] >= ROW[name]}
    assert not below, f"{name} imports {below}, of its own row or below"


def test_data_and_model_do_not_meet_below_state() -> None:
    for name in modules():
        if ROW[name] >= ROW["state"]:
            continue
        path = PACKAGE / Path(*name.split(".")).with_suffix(".py")
        rooms = {name.split(".")[0]} | {other.split(".")[0] for other in imported(path)}
        assert not {"data", "model"} <= rooms, name


def test_experiments_import_config_alone_and_ablations_their_parent() -> None:
    folder = PACKAGE.parent / "experiments"
    for path in folder.glob("*.py"):
        assert imported(path) <= {"config"}, path
    for path in folder.glob("ablations/[!_]*.py"):
        assert imported(path) in ({"experiments"}, {"experiments.ablations"}), path
