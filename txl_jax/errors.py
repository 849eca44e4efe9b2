"""Exit statuses, and the exceptions that end a run with one line on stderr.

| status | name | meaning |
|---|---|---|
| 0 | | the work is done |
| 2 | USER_ERROR | the line says what to change |
| 75 | RETRY | stopped by a signal or a lost process: the same command resumes |
| 76 | BAD_NUMBERS | too many bad updates in a row, or a result that is not finite |
| 130 | INTERRUPTED | stopped by Ctrl-C: the same command resumes |
| 141 | BROKEN_PIPE | the reader of stdout has gone, as after `| head` |

Any other status is a bug, or 134: jax aborted a process that lost another one.
"""

import contextlib
import difflib
import re
import unicodedata
from collections.abc import Iterable, Iterator

USER_ERROR = 2
RETRY = 75  # EX_TEMPFAIL of sysexits.h: a scheduler may restart the run
BAD_NUMBERS = 76
INTERRUPTED = 130  # as in a shell: a scheduler should not restart the run
BROKEN_PIPE = 141  # as in a shell: 128 + SIGPIPE

DIRECTIONS = "LRE LRO RLE RLO PDF LRI RLI FSI PDI".split()
# Quotations, and text without spaces, of over 200 characters: cut to 200.
LONG = re.compile(r"(?<=[ =(])(?:'[^']{199,}'|\"[^\"]{199,}\")|\S{201,}")
LONGEST_LINE = 1000  # characters of an error; longer ones lose their middle


class Ending(Exception):
    """One line on stderr with which a run ends, and its exit status."""

    status: int


class Interrupted(Ending):
    """The run stopped before its work was done; the same command resumes it."""

    def __init__(self, line: str, status: int = RETRY):
        super().__init__(line)
        self.status = status


class UserError(Ending):
    """One line that says what is wrong and how to fix it.

    The command line prints only this line and exits with USER_ERROR; any other
    exception is a bug and keeps its traceback.
    """

    status = USER_ERROR

    def __init__(self, line: str):
        line = printable(" ".join(line.split("\n")))  # it may quote text or a path
        line = LONG.sub(lambda match: f"{match[0][:95]} ... {match[0][-100:]}", line)
        if len(line) > LONGEST_LINE:
            line = f"{line[:600]} ... {line[-300:]}"
        super().__init__(line)


def refuse(wrong: object, line: str) -> None:
    """Raises UserError with the line if `wrong` is true."""
    if wrong:
        raise UserError(line)


@contextlib.contextmanager
def prefixed(name: object) -> Iterator[None]:
    """Puts the name of a file or field before the line of a UserError."""
    try:
        yield
    except UserError as error:
        raise UserError(f"{name}: {error}") from error


class BadNumbers(Ending):
    """Too many updates in a row, or parameters or a result, are not finite.

    The skipped updates of a training changed no parameter, and a checkpoint was saved
    after them. The same command continues with the next data, so a scheduler should not
    restart the run by itself.
    """

    status = BAD_NUMBERS


def printable(text: str) -> str:
    """Escapes control characters for a terminal, except ends of lines and tabs."""

    def escape(x: str) -> str:
        is_control = x not in "\n\t" and unicodedata.category(x) in ("Cc", "Cs")
        is_control |= unicodedata.bidirectional(x) in DIRECTIONS
        return repr(x)[1:-1] if is_control else x

    return "".join(map(escape, text))


def nearest(name: str, known: Iterable[str]) -> str:
    """Returns " (did you mean 'x'?)" for the known name nearest to `name`, or ""."""
    match = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f" (did you mean {match[0]!r}?)" if match else ""


def require_one_of(value: object, known: Iterable[object], field: str) -> None:
    """Raises UserError if the value of `field` is not one of the known values."""
    names = [str(each) for each in known]
    if str(value) not in names:
        hint = nearest(str(value), names)
        raise UserError(f"{field} = {value!r} must be one of {', '.join(names)}{hint}")
