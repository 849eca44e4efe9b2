"""The modes of the command line, and their execution with processes and signals."""

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import jax
from absl import logging as absl_logging

from txl_jax.cli import (
    attention,
    compile,
    convert,
    evaluate,
    generate,
    recl,
    run,
    score,
    speed,
    table,
)
from txl_jax.cli.flags import MODES, Command
from txl_jax.cli.prepare import prepare
from txl_jax.data.tokens import statistics
from txl_jax.errors import BadNumbers, Interrupted, UserError
from txl_jax.report.log import say, to_json
from txl_jax.runtime import allocator, distributed, peers, storage
from txl_jax.runtime.preemption import stop
from txl_jax.workdir.load import Loaded, load


def load_model(command: Command) -> Loaded:
    """Loads the trained model of --workdir, and logs its update."""
    loaded = load(command.workdir, command.config)
    say(f"the model of update {loaded.step} in {command.workdir}")
    return loaded


# The function of each mode returns a JSON-ready dict.
RUN: dict[str, Callable[[Command], dict[str, Any]]] = {
    "train": lambda c: run.train_and_evaluate(c.config, c.workdir),
    "evaluate": lambda c: evaluate.run(load_model(c), c.workdir),
    "generate": lambda c: generate.run(load_model(c)),
    "score": lambda c: score.run(load_model(c)),
    "attention": lambda c: attention.run(load_model(c), c.workdir),
    "prepare": lambda c: statistics(prepare(c.config.data)),
    "import": lambda c: convert.import_model(c.config.convert, c.workdir, c.overrides),
    "export": lambda c: convert.export_model(c.config.convert, load_model(c)),
    "compile": lambda c: compile.run(c.config),
    "table": lambda c: table.run(c.config.table, c.workdir, c.overrides),
    "speed": lambda c: speed.run(c.config, c.workdir),
    "recl": lambda c: recl.run(c.config.recl, c.workdir, c.overrides),
}


def execute(command: Command, is_program: bool) -> int:
    """Runs the command's mode, prints its result and returns the exit status."""
    absl_logging.set_verbosity(absl_logging.FATAL)  # orbax's errors are reported below
    try:
        with ExitStack() as stack:
            if is_program:
                allocator.keep_freed()
                if cache := command.config.run.compilation_cache:
                    jax.config.update("jax_compilation_cache_dir", cache)
                distributed.connect()
                stack.push(distributed.exit_on_error)
                stack.enter_context(stop.listening())
                stack.enter_context(peers.watching())
                check_processes(command.mode)
            result = RUN[command.mode](command)
            distributed.wait_for_all()
    except (UserError, Interrupted, BadNumbers) as error:
        return distributed.report(error)
    except storage.errors() as error:
        if not storage.is_remote(command.workdir):
            raise
        reason = storage.one_line(error)
        line = f"cannot reach {command.workdir} ({reason}): check the rights"
        return distributed.report(UserError(line))
    except jax.errors.JaxRuntimeError as error:
        return distributed.report(out_of_memory(error))
    if distributed.is_first():
        print(to_json({"mode": command.mode, **result}), flush=True)
    return 0


def check_processes(mode: str) -> None:
    """Raises UserError for several processes in a single-process mode."""
    if distributed.several() and not MODES[mode].parallel:
        parallel = ", ".join(sorted(name for name in MODES if MODES[name].parallel))
        raise UserError(
            f"--mode={mode} runs in one process: start it once, on one machine (modes "
            f"for several processes: {parallel})"
        )


def out_of_memory(error: jax.errors.JaxRuntimeError) -> UserError:
    """Converts an out-of-memory error to a UserError; re-raises any other error."""
    reason = str(error).partition("\n")[0][:200]
    if "RESOURCE_EXHAUSTED" not in reason:
        raise error
    return UserError(
        f"the devices' memory is too small ({reason}): in training, lower "
        "train.batch_size, raise train.batch_chunk or set model.remat_policy=full; in "
        "evaluation, lower eval.streams or eval.tgt_len; or raise mesh.fsdp"
    )
