"""The one exception for mistakes that a user can mend."""


class UserError(Exception):
    """Says in one line what is wrong and how to mend it.

    The command line prints the message alone and exits with status 2; anything else
    that escapes is a bug and keeps its traceback.
    """


def nearest(name: str, known: list[str]) -> str:
    """Returns ", did you mean 'x'?" for the known name nearest to `name`, or ""."""
    import difflib

    match = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f", did you mean {match[0]!r}?" if match else ""
