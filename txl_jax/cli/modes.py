"""The modes of the command line, and their execution with processes and signals."""

import logging
import math
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import jax
from etils import epy

from txl_jax.checkpoint import save_restore
from txl_jax.cli.flags import MODES, Command
from txl_jax.config import values_of
from txl_jax.data import tokens as token_files
from txl_jax.data.options import DataConfig
from txl_jax.errors import BadNumbers, UserError
from txl_jax.paper.options import MEMORIES
from txl_jax.report import provenance
from txl_jax.report.log import log_to_screen, say
from txl_jax.report.output import to_json
from txl_jax.runtime import distributed, programs
from txl_jax.runtime.explain import explain
from txl_jax.runtime.storage import Json
from txl_jax.workdir.load import Loaded, initial_data, load
from txl_jax.workdir.staging import UNWRITTEN

with epy.lazy_imports():  # a mode imports only its own
    from txl_jax import train
    from txl_jax.cli import (
        compile_ahead,
        convert,
        draw_samples,
        evaluate_split,
        score_texts,
        training_run,
    )
    from txl_jax.paper import attention_page, memory_table, recl, speed, table


def train_and_evaluate(command: Command) -> Json:
    """Trains up to train.num_steps, and returns the scores of the best checkpoint."""
    keep_prompt = "generate.prompt" in command.overrides
    with train.plan(command.config, command.workdir, keep_prompt) as run:
        run.train()
        return training_run.evaluate_best(run)


def load_model(command: Command) -> Loaded:
    """Loads the trained model of --workdir or --model, and logs its update."""
    source = command.model or command.workdir
    loaded = load(source, command.config)
    say(f"the model of update {loaded.step} in {source}")
    return loaded


def prepare_corpus(config: DataConfig) -> Json:
    """Prepares the corpus and returns its figures."""
    tokens = token_files.prepare(config)
    figures = {k: x for k, x in tokens.manifest.items() if k != "files"}
    places = list(map(str, token_files.copies(config)))
    splits = [f"{name} {x['tokens']:,}" for name, x in figures["splits"].items()]
    say(
        f"{figures['corpus']}: {', '.join(splits)} tokens; copies lie in "
        f"{' and '.join(places)}"
    )
    return {**figures, "folder": str(tokens.folder), "copies": places}


def make_table(command: Command) -> Json:
    """Makes one of the paper's tables, or the table of memories."""
    options = command.config.table
    make = memory_table.compare_memories if options.table == MEMORIES else table.ablate
    return make(options, command.workdir, command.overrides)


# The function of each mode of `flags.MODES` returns its result, ready for JSON.
RUN: dict[str, Callable[[Command], Json]] = {
    "train": train_and_evaluate,
    "evaluate": lambda c: evaluate_split.evaluate_model(load_model(c), c.workdir),
    "generate": lambda c: draw_samples.generate_samples(load_model(c)),
    "score": lambda c: score_texts.score_texts(load_model(c)),
    "attention": lambda c: attention_page.draw_attention(load_model(c), c.workdir),
    "prepare": lambda c: prepare_corpus(initial_data(c.config, c.workdir)),
    "import": lambda c: convert.import_model(c.config.convert, c.workdir, c.overrides),
    "export": lambda c: convert.export_model(
        c.config.convert, load_model(c), c.workdir
    ),
    "compile": lambda c: compile_ahead.compile_steps(c.config)[0],
    "table": make_table,
    "speed": lambda c: speed.measure_speed(c.config, c.workdir),
    "recl": lambda c: recl.measure_recl(c.config.recl, c.workdir, c.overrides),
}


def execute(command: Command, is_program: bool) -> tuple[int, str]:
    """Runs the command's mode; returns the exit status and the result to print."""
    with session(command.mode, is_program):
        if is_program:
            start_processes(command)
        result = {"mode": command.mode, **RUN[command.mode](command)}
        check_finite(result)
        distributed.wait_for_all()
    if not distributed.is_first():
        return 0, ""
    lost = result.get(UNWRITTEN)
    if lost:
        say(f"txl_jax: {lost}")
    return UserError.status if lost else 0, to_json(result) + "\n"


@contextmanager
def session(mode: str, is_program: bool) -> Iterator[None]:
    """Shows messages, and raises UserError for errors that `explain` explains.

    Settings of the process change in a program only: after a call from Python they
    would persist.
    """
    with ExitStack() as stack:
        stack.enter_context(log_to_screen())
        if is_program:
            stack.push(distributed.exit_on_error)
            save_restore.mute_orbax()  # each of its errors is reported in one line
            logging.getLogger("gcsfs").setLevel(logging.CRITICAL)  # also raised
        try:
            yield
        except Exception as error:
            if not (line := explain(error, mode)):
                raise
            raise UserError(line) from error


def start_processes(command: Command) -> None:
    """Connects the processes of a run, finds devices, and sets up the process."""
    distributed.connect()
    if command.mode not in ("train", "table"):  # their loop ends after SIGTERM
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    # `compile` needs no device, and libtpu prints errors without a TPU.
    if command.mode == "compile":
        jax.config.update("jax_platforms", "cpu")
    if command.mode != "compile" or jax.distributed.is_initialized():
        distributed.find_devices()
    programs.keep()
    if distributed.several():
        check_equal(command)
        check_processes(command.mode, command.config.eval.dynamic)


def check_finite(result: Json) -> None:
    """Raises BadNumbers if a loss in a mode's result is not finite."""
    for path, value in jax.tree.leaves_with_path(result):
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        if "nll" in name and isinstance(value, float) and not math.isfinite(value):
            raise BadNumbers(
                f"{name} = {value}, although every parameter is finite: a layer's "
                "values overflow; try --config.model.dtype=float32, or with "
                "eval.dynamic a lower eval.dynamic_lr"
            )


def check_equal(command: Command) -> None:
    """Raises UserError if processes of a run have different commands or libraries."""
    flags = {"--mode": command.mode, "--workdir": str(command.workdir)}
    rest: Json = {"a flag": command.overrides, **provenance.versions()}
    distributed.require_equal({**flags, **values_of(command.config), **rest})


def check_processes(mode: str, dynamic: str = "") -> None:
    """Raises UserError for several processes where the work needs one."""
    if not MODES[mode].parallel:
        raise UserError(f"--mode={mode} runs in one process: start it once")
    if dynamic and mode in ("train", "evaluate"):
        raise UserError("eval.dynamic reads one stream: start one process")
