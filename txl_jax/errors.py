"""What ends a command without its result, and what the messages need."""

import difflib
from typing import Any


class UserError(Exception):
    """Says in one line what is wrong and how to mend it.

    The command line prints the message alone and exits with status 2; anything else
    that escapes is a bug and keeps its traceback.
    """


class BadNumbers(Exception):
    """Training stopped: so many updates in a row were bad that no more would help.

    None of them was made, and what was before them is saved. The command line prints
    the message alone and exits with STATUS. Started again as it is, the run goes on
    with the data that follow, so a scheduler is not to restart it by itself.
    """

    STATUS = 76


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
