"""Runs a figure or a recipe with the error handling of the package."""

import argparse
import contextlib
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from absl import logging

from txl_jax.errors import BadNumbers, Interrupted, UserError
from txl_jax.report.log import to_json
from txl_jax.runtime import distributed, storage


def make_parser(doc: str | None) -> argparse.ArgumentParser:
    """Returns a parser whose errors are one line; `doc` is the program's docstring."""
    return argparse.ArgumentParser(
        usage=argparse.SUPPRESS,
        description=(doc or "").partition("\n")[0],
        allow_abbrev=False,
    )


def count(text: str) -> int:
    """Parses a flag that is a positive integer."""
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{text} must be at least 1")
    return number


def new_path(text: str) -> Path:
    """Parses a flag that is the path of a file or folder to make."""
    path = Path(text)
    if os.path.exists(path):
        raise argparse.ArgumentTypeError(f"{path} exists: choose another name")
    if not os.access(path.parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"cannot write to the folder {path.parent}")
    return path


def picture(text: str) -> Path:
    """Parses a flag that is the path of a picture to write."""
    if not text.endswith((".png", ".svg", ".pdf")):
        raise argparse.ArgumentTypeError(f"{text} must end with .png, .svg or .pdf")
    return Path(text)


def run(measure: Callable[[], dict[str, Any]]) -> int:
    """Prints the result as one line of JSON, and returns the exit status.

    Output of libraries goes to stderr. User errors, interruptions, values that are not
    finite and unusable files are reported there, in one line.
    """
    logging.set_verbosity(logging.FATAL)  # orbax warns of intended settings
    try:
        with contextlib.redirect_stdout(sys.stderr):
            result = measure()
    except (UserError, Interrupted, BadNumbers) as error:
        return distributed.report(error)
    except KeyboardInterrupt:
        return 130  # the status that shells report for this signal
    except storage.errors() as error:
        place = storage.place(error) if isinstance(error, OSError) else None
        where = place or "the disk or gs://"
        reason = getattr(error, "strerror", None) or storage.one_line(error)
        return distributed.report(UserError(f"cannot use {where}: {reason}"))
    print(to_json(result))
    return 0
