"""Executes a parsed command, with its processes, signals and errors."""

from contextlib import ExitStack

import jax
from absl import logging as absl_logging

from txl_jax.cli.flags import MODES, Command
from txl_jax.cli.modes import RUN
from txl_jax.errors import BadNumbers, Interrupted, UserError
from txl_jax.report.log import to_json
from txl_jax.runtime import allocator, distributed, peers
from txl_jax.runtime.preemption import stop
from txl_jax.workdir import bucket


def execute(command: Command, is_program: bool) -> int:
    """Runs the command's mode, prints its result and returns the exit status."""
    absl_logging.set_verbosity(absl_logging.FATAL)  # orbax's errors are reported below
    try:
        with ExitStack() as stack:
            if is_program:
                allocator.keep_freed()
                if cache := command.config.run.compilation_cache:
                    jax.config.update("jax_compilation_cache_dir", cache)
                distributed.connect(command.config.run.connect_seconds)
                stack.push(distributed.exit_on_error)
                stack.enter_context(stop.listening())
                stack.enter_context(peers.watching())
                check_processes(command.mode)
            result = RUN[command.mode](command)
            if there := bucket.of(command.workdir):
                there.store_files()
            distributed.wait_for_all()
    except (UserError, Interrupted, BadNumbers) as error:
        return distributed.report(error)
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
        "train.batch_size, raise train.batch_chunk or set model.remat; in evaluation, "
        "lower eval.streams or eval.tgt_len; or split the model with mesh.fsdp"
    )
