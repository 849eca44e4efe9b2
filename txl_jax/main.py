"""The command line: flags in, one JSON object and a status out.

    python -m txl_jax.main --config=FILE [--workdir=DIR] [--mode=MODE] [--config.x.y=V]

The last line on stdout is one JSON object; progress and logs go to stderr. Status 0
means that the work is done, 2 that the user can mend what the one line on stderr says,
75 that the same command goes on where this one was interrupted, 76 that training
stopped at bad numbers, of which none is in the checkpoint it leaves (see `errors`). Of
several processes the first writes and prints.
"""

import sys
from contextlib import ExitStack

import jax
from absl import logging as absl_logging

from txl_jax import allocator, bucket, distributed, flags, help, peers
from txl_jax.distributed import RunConfig
from txl_jax.errors import BadNumbers, Interrupted, UserError
from txl_jax.modes import MODES, TOGETHER
from txl_jax.preemption import stop
from txl_jax.report.writer import to_json


def main(argv: list[str] | None = None) -> int:
    """Runs one mode and returns the exit status.

    As a program, without argv, it also meets other processes and ends on signals; a
    caller in Python keeps its own ways.
    """
    is_program = argv is None
    argv = sys.argv[1:] if argv is None else argv
    absl_logging.set_verbosity(absl_logging.FATAL)  # we tell what fails in orbax
    if {"--help", "--helpfull", "-h"} & set(argv):
        print((help.full if "--helpfull" in argv else help.short)(MODES), end="")
        return 0
    try:
        command = flags.parse(argv, list(MODES))
        if command.print_config:
            print(help.resolved(command), end="")
            return 0
        with ExitStack() as stack:
            if is_program:
                allocator.keep_freed()
                start(command.config.run)
                stack.push(distributed.fail)
                stack.enter_context(stop.listening())
                stack.enter_context(peers.watching())
                check_alone(command.mode)
            result = MODES[command.mode](command)
            if there := bucket.of(command.workdir):
                there.store_files()
            distributed.wait_for_all()
    except (UserError, Interrupted, BadNumbers) as error:
        return distributed.say_why(error)
    except jax.errors.JaxRuntimeError as error:
        return distributed.say_why(out_of_memory(error))
    if distributed.is_first():
        print(to_json({"mode": command.mode, **result}), flush=True)
    return 0


def out_of_memory(error: jax.errors.JaxRuntimeError) -> UserError:
    """Returns what a device's lack of memory means; raises any other error again."""
    reason = str(error).partition("\n")[0][:200]
    if "RESOURCE_EXHAUSTED" not in reason:
        raise error
    return UserError(
        f"the devices' memory is too small ({reason}): lower train.batch_size or raise "
        "train.batch_chunk, set model.remat, or split the model by mesh.fsdp"
    )


def start(how: RunConfig) -> None:
    """Meets the other processes, before anything computes."""
    if how.compilation_cache:
        jax.config.update("jax_compilation_cache_dir", how.compilation_cache)
    distributed.connect(how.connect_seconds)


def check_alone(mode: str) -> None:
    """Refuses several processes for a mode that takes one."""
    if distributed.several() and mode not in TOGETHER:
        raise UserError(
            f"--mode={mode} takes one process: start it once, on one machine (several "
            f"can make {', '.join(sorted(TOGETHER))})"
        )


if __name__ == "__main__":
    sys.exit(main())
