"""The command line: flags in, one JSON object and an exit status out.

    txl [MODE] --config=FILE [--workdir=DIR] [--config.x.y=V]

`python -m txl_jax` and `python -m txl_jax.main` are the same command.

When a mode has run, the last line on stdout is one JSON object; progress and logs go to
stderr. `errors` lists the exit statuses. With several processes, only the first writes
files and prints.
"""

import sys
from importlib.metadata import version

import txl_jax
from txl_jax.cli import entry
from txl_jax.errors import UserError


def main(argv: list[str] | None = None) -> int:
    """Runs one mode and returns the exit status.

    Without argv it runs as a program, which also connects to the other processes.
    """
    args, is_program = sys.argv[1:] if argv is None else argv, argv is None
    return entry.run(lambda: run_mode(args, is_program), is_program)


def run_mode(args: list[str], is_program: bool) -> tuple[int, str]:
    """Runs one mode; returns the exit status, and the result or the help to print."""
    from txl_jax.cli import flags, help  # takes 0.2 s

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
    entry.import_jax()
    from txl_jax.cli.modes import execute

    return execute(command, is_program)


# By version of jaxlib.
FAULTS = {"0.10.2": "jaxlib 0.10.2 computes wrong sums on CPUs: install another"}


def versions() -> str:
    """Returns the versions of txl_jax and jax, their known faults, and the devices.

    On a slice of several hosts, jax finds its devices once all hosts have started.
    """
    lines = [f"txl_jax {txl_jax.__version__}"]
    lines += [f"{name} {version(name)}" for name in ("jax", "jaxlib")]
    if fault := FAULTS.get(version("jaxlib")):
        lines.append(f"fault {fault}")
    try:
        entry.import_jax()
        import jax

        from txl_jax.report.provenance import describe_processor
        from txl_jax.runtime import distributed

        distributed.find_devices()
        devices = jax.local_devices()
        lines.append(f"devices {len(devices)} {devices[0].device_kind}")
        if devices[0].platform == "cpu":
            lines.append(f"processor {describe_processor()}")
    except UserError as error:
        lines.append(f"devices 0 ({error})")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
