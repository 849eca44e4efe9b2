"""How a run ends before its work is done, and what its last line needs.

Exit statuses: 0 = done, MENDABLE = the user can mend what the last line says,
AGAIN = the same command goes on where this one stopped (a signal to end, a lost
process, a hang), INTERRUPTED = so does it, but a person wanted it to stop (Ctrl-C),
BAD_NUMBERS = training met bad numbers again and again, anything else = a bug, or, of
several processes, the death of the first (134).
"""

import difflib
from typing import Any

MENDABLE = 2
AGAIN = 75  # EX_TEMPFAIL of sysexits.h: a scheduler may start it again
BAD_NUMBERS = 76
INTERRUPTED = 130  # as a shell has it for Ctrl-C: nobody should start it again


class Interrupted(Exception):
    """Says in one line why the run ended; the same command goes on from there."""

    def __init__(self, line: str, status: int = AGAIN):
        super().__init__(line)
        self.status = status


class UserError(Exception):
    """Says in one line what is wrong and how to mend it.

    The command line prints the message alone and exits with status 2; anything else
    that escapes is a bug and keeps its traceback.
    """

    def __init__(self, line: str):
        super().__init__(" ".join(line.split("\n")))  # what it quotes may have several


class BadNumbers(Exception):
    """Training stopped: so many updates in a row were bad that no more would help.

    None of them was made, and what was before them is saved. The command line prints
    the message alone and exits with `status`. Started again as it is, the run goes on
    with the data that follow, so a scheduler is not to restart it by itself.
    """

    status = BAD_NUMBERS


def nearest(name: str, known: list[str]) -> str:
    """Returns ", did you mean 'x'?" for the known name nearest to `name`, or ""."""
    match = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f", did you mean {match[0]!r}?" if match else ""


def require(config: Any, section: str, least: float, *names: str) -> None:
    """Refuses values of the config's fields `names` that are below `least`."""
    for name in names:
        value = getattr(config, name)
        if not value >= least:
            raise UserError(f"{section}.{name} = {value} must be at least {least}")


def require_one_of(value: str, known: list[str], field: str) -> None:
    """Refuses a value of `field` that is not among the known ones."""
    if value not in known:
        raise UserError(
            f"{field} = {value!r} is none of {', '.join(known)}{nearest(value, known)}"
        )
