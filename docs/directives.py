"""Two directives for the pages, and the layout of docstrings.

`{made} module.function` inserts the Markdown that a function of `generate/` returns.
`{chapter}` is a toctree that omits missing pages.
"""

import importlib
import re
from typing import Any, ClassVar

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.directives.other import TocTree
from sphinx.util.docutils import SphinxDirective


class Made(SphinxDirective):
    """Text that follows from the code or from committed results."""

    required_arguments = 1
    optional_arguments = 8

    def run(self) -> list[nodes.Node]:
        """Parses what the function returns as a part of the page."""
        name, *arguments = self.arguments
        module, _, function = name.rpartition(".")
        text = getattr(importlib.import_module(f"generate.{module}"), function)(
            *arguments
        )
        # Sphinx cannot see that the Python and JSON behind the text have changed.
        self.env.note_reread()
        return self.parse_text_to_nodes(text, allow_section_headings=True)


class Chapter(TocTree):
    """A toctree in a given order."""

    option_spec: ClassVar[Any] = TocTree.option_spec

    def run(self) -> list[nodes.Node]:
        """Drops lines whose page does not exist."""
        found = self.env.found_docs
        here = [i for i, line in enumerate(self.content) if line.strip() in found]
        for i in reversed(range(len(self.content))):
            if i not in here:
                del self.content[i]
        return super().run()


def list_arguments(app: Sphinx, *rest: Any) -> None:
    """Makes each `name: meaning` of a docstring, with its indented lines, an item."""
    lines = rest[-1]
    for i, line in enumerate(lines):
        if re.match(r"\w+( \([^)]*\))?: ", line):
            lines[i] = f"- {line}"
        elif line.startswith("    ") and i and lines[i - 1].startswith(("- ", "  ")):
            lines[i] = f"  {line.strip()}"


def setup(app: Sphinx) -> dict[str, bool]:
    """Adds the directives."""
    app.add_directive("made", Made)
    app.add_directive("chapter", Chapter)
    app.connect("autodoc-process-docstring", list_arguments)
    return {"parallel_read_safe": True}
