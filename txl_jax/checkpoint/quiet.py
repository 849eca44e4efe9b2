"""Suppresses messages of orbax that say nothing to a user."""

import functools
import logging
import sys
from typing import Any


@functools.cache
def quiet_orbax() -> None:
    """Suppresses orbax's messages about abandoned operations and read-only folders.

    When one operation fails, each of the others would print a traceback when it ends or
    is garbage-collected.
    """
    logging.getLogger("asyncio").setLevel(logging.CRITICAL)
    logging.getLogger("absl").addFilter(
        lambda record: not record.getMessage().startswith("Given directory is read")
    )
    hook = sys.unraisablehook

    def filtered_hook(unraisable: Any) -> None:
        code = getattr(unraisable.object, "cr_code", None)
        abandoned = code is not None and "orbax" in code.co_filename
        if not abandoned and str(unraisable.exc_value) != "Event loop is closed":
            hook(unraisable)

    sys.unraisablehook = filtered_hook
