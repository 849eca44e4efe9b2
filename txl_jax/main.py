"""The command line: flags in, one JSON object and an exit status out.

    txl [MODE] --config=FILE [--workdir=DIR] [--config.x.y=V]

`python -m txl_jax` and `python -m txl_jax.main` are the same command.

When a mode has run, the last line on stdout is one JSON object; progress and logs go to
stderr. `errors` lists the exit statuses. With several processes, only the first writes
files and prints.
"""

import os
import signal
import sys
from importlib.metadata import version

import txl_jax
from txl_jax.errors import BROKEN_PIPE, USER_ERROR, UserError
from txl_jax.runtime import allocator

# Values of jax's environment variables with which parts of the program fail.
UNSUPPORTED: dict[str, tuple[object, ...]] = {
    "jax_enable_x64": (True,),
    "jax_disable_jit": (True,),
    "jax_numpy_rank_promotion": ("raise",),
    "jax_numpy_dtype_promotion": ("strict",),
    "jax_transfer_guard": ("disallow", "disallow_explicit"),
}


def main(argv: list[str] | None = None) -> int:
    """Runs one mode and returns the exit status.

    Without argv it runs as a program, which also connects to the other processes. If
    the reader of stdout has gone, it ends quietly.
    """
    if argv is None:
        allocator.keep_freed()
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # also ends C++ code
        os.environ["MPLBACKEND"] = "agg"  # pictures are files
        os.environ.setdefault("EPATH_USE_TF", "false")  # TensorFlow's file system
        if sys.stdout:  # its encoding may lack characters
            sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    try:
        status, text = run_mode(sys.argv[1:] if argv is None else argv, argv is None)
    except BrokenPipeError:
        status, text = BROKEN_PIPE, ""
    try:
        print(text, end="", flush=True)
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # the interpreter flushes again
        if isinstance(error, BrokenPipeError):
            return status or BROKEN_PIPE
        print(f"txl_jax: stdout: {error.strerror}", file=sys.stderr)
        return status or USER_ERROR
    return status


def run_mode(args: list[str], is_program: bool) -> tuple[int, str]:
    """Runs one mode; returns the exit status, and the result or the help to print."""
    from txl_jax.cli import flags, help  # takes 0.2 s

    try:
        general, _ = flags.read_general(args)
        if general.helpfull:
            return 0, help.full()
        if general.help:
            return 0, help.of_mode(general.mode) if general.mode else help.short()
        if general.version:
            return 0, versions()
        command = flags.parse(args)
        if general.print_config:
            return 0, help.resolved(command)
        import_jax()
    except UserError as error:
        print(f"txl_jax: {error}", file=sys.stderr)
        return USER_ERROR, ""
    from txl_jax.cli.modes import execute

    return execute(command, is_program)


def versions() -> str:
    """Returns the versions of txl_jax and jax, and the devices or why there are none.

    On a slice of several hosts, jax finds its devices once all hosts have started.
    """
    lines = [f"txl_jax {txl_jax.__version__}"]
    lines += [f"{name} {version(name)}" for name in ("jax", "jaxlib")]
    try:
        import_jax()
        import jax

        from txl_jax.runtime import distributed

        distributed.find_devices()
        devices = jax.local_devices()
        lines.append(f"devices {len(devices)} {devices[0].device_kind}")
    except UserError as error:
        lines.append(f"devices 0 ({error})")
    return "\n".join(lines) + "\n"


def import_jax() -> None:
    """Imports jax, which takes seconds; raises UserError if the environment forbids."""
    try:
        import jax
    except ValueError as error:
        raise UserError(
            f"jax cannot be imported ({error}): correct the environment"
        ) from error
    for name, values in UNSUPPORTED.items():
        if (value := jax.config.values[name]) in values:
            raise UserError(f"{name.upper()}={value} is not supported: unset it")


if __name__ == "__main__":
    sys.exit(main())
