"""Runs the programs in experiments/ as `txl` runs: streams, errors and statuses."""

import argparse
import contextlib
import io
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from txl_jax.cli import entry, modes
from txl_jax.errors import UserError
from txl_jax.report.output import to_json
from txl_jax.runtime import distributed, storage
from txl_jax.runtime.explain import failed_path, one_line

# Modules of the extra `recipes`; others are packages of the same name.
RECIPES = "constriction", "miditok", "symusic", "sklearn"
Measure = Callable[[argparse.Namespace], dict[str, Any] | None]


def make_parser(doc: str | None) -> argparse.ArgumentParser:
    """Returns a parser whose errors are one line; `doc` is the program's docstring."""
    return argparse.ArgumentParser(
        usage=argparse.SUPPRESS,
        description=(doc or "").partition("\n")[0],  # -OO removes docstrings
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )


def count(text: str) -> int:
    """Parses a flag that is a positive integer."""
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{text} must be at least 1")
    return number


def path(text: str) -> Path:
    """Parses a flag that is the path of a file or folder, which may begin with ~."""
    try:
        return storage.local_path(text, "path")
    except UserError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def new_path(text: str) -> Path:
    """Parses a flag that is the path of a file or folder to make."""
    new = path(text)
    if os.path.exists(new):
        raise argparse.ArgumentTypeError(f"{new} exists: choose another name")
    return require_writable(new)


def require_writable(path: Path) -> Path:
    """Returns the path of a file to write, before the work whose result it gets."""
    if not os.access(path.parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"cannot write to the folder {path.parent}")
    return path


def picture(text: str) -> Path:
    """Parses a flag that is the path of a picture to write."""
    if not text.endswith((".png", ".svg", ".pdf")):
        raise argparse.ArgumentTypeError(f"{text} must end with .png, .svg or .pdf")
    return require_writable(path(text))


def run(
    parser: argparse.ArgumentParser,
    measure: Measure,
    argv: list[str] | None,
    prints: bool = False,
) -> int:
    """Prints the result as one line of JSON, and returns the exit status.

    Other output goes to stderr, unless the program `prints` its results itself. Without
    argv it owns the process, as in `txl_jax.main.main`.
    """

    def work() -> tuple[int, str]:
        try:
            with contextlib.redirect_stdout(io.StringIO()) as help:
                args = parser.parse_args(argv)
        except SystemExit as end:
            return int(end.code or 0), help.getvalue()
        to_stderr = contextlib.redirect_stdout(sys.stderr)
        with contextlib.nullcontext() if prints else to_stderr:
            with modes.session("", argv is None):
                result = attempt(measure, args)
        return 0, f"{to_json(result)}\n" if result else ""

    return entry.run(work, argv is None)


def attempt(measure: Measure, args: argparse.Namespace) -> dict[str, Any] | None:
    """Returns the result; raises UserError for what the machine or the user lacks."""
    entry.import_jax()  # the modules of a program have imported it: a check
    try:
        return measure(args)
    except BrokenPipeError:
        raise
    except OSError as error:
        where = failed_path(error) or "the disk or stdout"
        reason = error.strerror or one_line(error)
        raise UserError(f"cannot use {where}: {reason}") from error
    except ModuleNotFoundError as error:
        name = str(error.name).partition(".")[0]
        package = "'txl_jax[recipes]'" if name in RECIPES else name
        raise UserError(f"{name} is not installed: pip install {package}") from error
    except (RuntimeError, AssertionError):
        distributed.find_devices()  # raises UserError if this is the reason
        raise
