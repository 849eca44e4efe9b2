"""Progress on stderr: a bar on a terminal, occasional lines elsewhere."""

import io
import shutil
import sys

import tqdm

from txl_jax.report.log import say
from txl_jax.runtime import distributed

EVERY_SECONDS = 10.0  # between lines, where stderr is not a terminal
NARROW = 6  # columns of the narrowest bar and its edges


class Bar(io.StringIO):
    """Receives a bar's output, and prints each state of the bar as a line."""

    def write(self, text: str) -> int:
        """Prints the text unless it is empty."""
        if text.strip():
            say(text.strip())
        return len(text)


class Progress(tqdm.tqdm):
    """A bar on a terminal; elsewhere a line every ten seconds.

    Both have the time that is left, and a rate: with `unit` tqdm's, in this unit,
    otherwise one of the figures. Only the first process shows it.
    """

    total: int | None

    def __init__(
        self, label: str, total: int = 0, done: int = 0, *, unit: str = "tokens"
    ):
        """Starts at `done`, above 0 in a resumed run; total = 0 means unknown."""
        terminal = sys.stderr.isatty()
        self.rate = ["{rate_noinv_fmt}"] if unit else []
        self.figures: tuple[str, ...] = ()
        super().__init__(
            desc=label,
            total=total or None,
            initial=done,
            # Some terminals, mostly in containers, report a width of 0.
            ncols=shutil.get_terminal_size().columns if terminal else 0,
            unit=f" {unit}",
            unit_scale=bool(unit),
            disable=not distributed.is_first(),
            file=None if terminal else Bar(),
            position=None if terminal else 0,  # tqdm moves the cursor for others
            delay=0.0 if terminal else EVERY_SECONDS,
            mininterval=0.1 if terminal else EVERY_SECONDS,
            maxinterval=EVERY_SECONDS,
        )

    def __call__(self, done: int, total: int = 0, /, *figures: str) -> None:
        """Sets the count, a total above 0, and figures such as "loss 1.92"."""
        self.total = total or self.total
        if not self.disable:
            self.figures = figures or self.figures
            self.update(done - self.n)

    def __str__(self) -> str:
        """Returns the bar or line, without the last figures if it were too long."""
        state, columns = self.format_dict, self.ncols
        start, shown = "{desc}: ", ["{n_fmt}"]
        if self.total:
            start += "{percentage:3.0f}% "
            shown = ["{n_fmt}/{total_fmt}", "{remaining} left"]
        shown += [*self.rate, *self.figures, "{elapsed} passed"]

        def text(bar: str = "", ncols: int | None = None) -> str:
            layout = {"bar_format": start + bar + ", ".join(shown), "ncols": ncols}
            return self.format_meter(**{**state, **layout})

        while columns and len(text()) > columns - NARROW and len(shown) > 1:
            shown.pop()
        return text("|{bar}| ", columns) if columns and self.total else text()
