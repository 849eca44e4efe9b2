"""The command line: flags in, one JSON object and an exit status out.

    python -m txl_jax.main --config=FILE [--workdir=DIR] [--mode=MODE] [--config.x.y=V]

When a mode has run, the last line on stdout is one JSON object; progress and logs go to
stderr. `errors` lists the exit statuses. Of several processes, the first writes and
prints.
"""

import sys

import txl_jax
from txl_jax.cli import flags, help
from txl_jax.errors import USER_ERROR, UserError


def main(argv: list[str] | None = None) -> int:
    """Runs one mode and returns the exit status.

    Without argv it runs as a program, which also connects to the other processes and
    handles signals.
    """
    args = sys.argv[1:] if argv is None else argv
    if text := help_or_version(args):
        print(text, end="")
        return 0
    try:
        command = flags.parse(args)
    except UserError as error:
        print(f"txl_jax: {error}", file=sys.stderr)
        return USER_ERROR
    if command.print_config:
        print(help.resolved(command), end="")
        return 0
    from txl_jax.cli import modes  # imports jax, which takes seconds

    return modes.execute(command, is_program=argv is None)


def help_or_version(args: list[str]) -> str:
    """Returns the text for --help, --helpfull or --version, or ""."""
    if "--helpfull" in args:
        return help.full()
    if {"--help", "-h"} & set(args):
        return help.short()
    return f"txl_jax {txl_jax.__version__}\n" if "--version" in args else ""


if __name__ == "__main__":
    sys.exit(main())
