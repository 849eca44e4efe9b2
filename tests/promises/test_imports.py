"""A room imports only from rows above its own, so the data flows one way."""

import ast
import os
import subprocess
import sys
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "txl_jax"

# A room may also import from earlier rooms in its own row.
ROWS = """
    errors metrics fields
    sharding kernels
    model
    update
    runtime report
    data
    checkpoint
    aot evaluate generate convert
    config
    workdir
    train
    paper
    cli
    main __main__
"""
ORDER = ROWS.split()


def modules() -> dict[str, Path]:
    """Returns every module of the package, by its dotted name."""
    paths = {path.relative_to(PACKAGE): path for path in PACKAGE.rglob("*.py")}
    names = {".".join(path.with_suffix("").parts): paths[path] for path in paths}
    return {name: path for name, path in sorted(names.items()) if name != "__init__"}


def imported(path: Path) -> set[str]:
    """Returns the modules of the package that a file imports, anywhere in it."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, f"{path}: relative import"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    inside = {name.removeprefix("txl_jax.") for name in names if "txl_jax." in name}
    # `from txl_jax.model.memory import Memory` imports model.memory.
    return {name if name in MODULES else name.rpartition(".")[0] for name in inside}


def room(module: str) -> str:
    """Returns the room of a module; a module at the root is its own room."""
    return module.partition(".")[0]


MODULES = modules()


def test_every_module_belongs_to_a_room() -> None:
    assert {room(name) for name in MODULES} == set(ORDER)
    files = {name for name in MODULES if "." not in name}
    programs = {"main", "__main__"}
    assert files == {*programs, "config", "train", "errors", "fields", "metrics"}


def test_a_module_name_occurs_in_one_room() -> None:
    """Each room has its `options`; `model.config` and `config` belong together."""
    ends = [name.rpartition(".")[2] for name in MODULES]
    repeated = {end for end in ends if ends.count(end) > 1}
    assert repeated == {"__init__", "options", "config"}


def test_rooms_import_from_rows_above() -> None:
    below = {
        (name, room(other))
        for name, path in MODULES.items()
        for other in imported(path)
        if other and ORDER.index(room(other)) > ORDER.index(room(name))
    }
    assert below == {("config", "paper")}  # only its options: see the next test


def test_only_the_command_line_needs_the_measurements_of_the_paper() -> None:
    for name, path in MODULES.items():
        used = {other for other in imported(path) if room(other) == "paper"}
        assert room(name) in ("paper", "cli") or used <= {"paper.options"}, name
    assert imported(MODULES["paper.options"]) == {"errors", "fields"}


def test_a_room_has_no_circular_imports() -> None:
    inside = {
        name: {other for other in imported(path) if room(other) == room(name)}
        for name, path in MODULES.items()
    }
    while ready := {name for name, others in inside.items() if not others - {name}}:
        inside = {
            name: others - ready for name, others in inside.items() if name not in ready
        }
    assert not inside, "these import each other in a circle"


def test_the_core_loads_neither_files_processes_nor_reports() -> None:
    program = "import sys, txl_jax.update.step; print(*sys.modules)"
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    loaded = done.stdout.split()
    ours = {name.partition(".")[2] for name in loaded if name.startswith("txl_jax.")}
    core = ORDER[: ORDER.index("update") + 1]
    assert {room(name) for name in ours} <= {*core}
    others = {"orbax", "tqdm", "requests", "tensorflow", "matplotlib"}
    assert not others & {name.partition(".")[0] for name in loaded}


# Compares the settings of a user's process around calls of the package. The libraries
# are imported first, since importing them has effects of their own.
SETTINGS = """
import logging, os, signal, sys, threading, warnings
import flax.linen, jax, ml_collections, optax, orbax.checkpoint
import jax.experimental.pallas.tpu  # adds fields to jax.config

NAMES = {*logging.root.manager.loggerDict, "txl_jax", "absl", "asyncio", "gcsfs"}
LOGGERS = [logging.root, *map(logging.getLogger, sorted(NAMES))]

def settings():
    return {
        **{x: (x.level, repr(x.handlers), x.propagate, x.disabled) for x in LOGGERS},
        **{name: getattr(sys, name) for name in dir(sys) if name.endswith("hook")},
        **{x: signal.getsignal(x) for x in signal.valid_signals()},
        **os.environ, **jax.config.values,
        "warnings": [*warnings.filters], "threads": threading.excepthook,
    }

before = settings()
import txl_jax
from txl_jax.main import main

txl_jax.load("shakespeare")
main(["--mode=compile", "--config=quickstart"])
after = settings()
changed = [x for x in before | after if before.get(x) != after.get(x)]
assert not changed, changed
"""


def test_a_users_process_keeps_its_settings() -> None:
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    subprocess.run([sys.executable, "-c", SETTINGS], check=True, env=environment)


def test_experiments_import_config_alone_and_ablations_their_parent() -> None:
    folder = PACKAGE.parent / "experiments"
    for path in folder.glob("*.py"):
        assert imported(path) <= {"config"}, path
    for path in folder.glob("ablations/[!_]*.py"):
        assert imported(path) in ({"experiments"}, {"experiments.ablations"}), path


def test_only_programs_import_train_and_no_room_imports_main() -> None:
    for name, path in MODULES.items():
        rooms = {room(other) for other in imported(path)}
        assert "main" not in rooms or name == "__main__", name
        assert "train" not in rooms or room(name) in ("paper", "cli"), name


def test_tfds_is_imported_only_to_prepare_a_corpus() -> None:
    """The import takes a second and brings pyarrow; prepared text needs neither."""
    tfds = ("tensorflow_datasets", "txl_jax.data.builder")
    for name, path in MODULES.items():
        at_import = {
            f"{getattr(node, 'module', '')}.{alias.name}".lstrip(".")
            for node in ast.parse(path.read_text("utf-8")).body
            if isinstance(node, ast.Import | ast.ImportFrom)
            for alias in node.names
        }
        found = [each for each in at_import if each.startswith(tfds)]
        assert not found or name == "data.builder", name
