"""The function of each mode: it takes a command and returns a JSON-ready dict."""

from collections.abc import Callable
from typing import Any

from txl_jax.cli import (
    attention,
    compile,
    convert,
    evaluate,
    generate,
    prepare,
    recl,
    run,
    score,
    speed,
    table,
)
from txl_jax.cli.flags import Command
from txl_jax.report.log import say
from txl_jax.workdir.load import Loaded, load


def load_model(command: Command) -> Loaded:
    """Loads the trained model of --workdir, and logs its update."""
    loaded = load(command.workdir, command.config)
    say(f"the model of update {loaded.step} in {command.workdir}")
    return loaded


RUN: dict[str, Callable[[Command], dict[str, Any]]] = {
    "train": lambda c: run.train_and_evaluate(c.config, c.workdir),
    "evaluate": lambda c: evaluate.run(load_model(c), c.workdir),
    "generate": lambda c: generate.run(load_model(c)),
    "score": lambda c: score.run(load_model(c)),
    "attention": lambda c: attention.run(load_model(c), c.workdir),
    "prepare": lambda c: prepare.run(c.config.data),
    "import": lambda c: convert.import_model(c.config.convert, c.workdir, c.overrides),
    "export": lambda c: convert.export_model(c.config.convert, load_model(c)),
    "compile": lambda c: compile.run(c.config),
    "table": lambda c: table.run(c.config.table, c.workdir, c.overrides),
    "speed": lambda c: speed.run(c.config, c.workdir),
    "recl": lambda c: recl.run(c.config.recl, c.workdir, c.overrides),
}
