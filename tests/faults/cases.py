"""Lists every refused input that a test holds: `python -m tests.faults.cases`.

The rows come from the tables of the tests themselves. Each names the input, the exit
status of a command that meets it, and a part of the one line that reports it.
"""

import itertools
from pathlib import Path
from typing import Any

from tests import test_config as config
from tests.convert import test_huggingface, test_pickle, test_pytorch, test_tensorflow
from tests.faults import hostile
from tests.promises import test_bad_inputs

PAGE = Path(__file__).parent / "cases.md"
HEAD = """# Refused inputs

Every input below ends a command with one line on stderr, and changes no file.
`python -m tests.faults.cases` writes this page from the tables of the tests, which hold
each row. The line is the part that the test requires.
"""
Rows = list[tuple[str, str, str]]  # input, status, part of the line


def split(text: str) -> Rows:
    """Returns the rows "input | part | more" of a table in a test."""
    rows = []
    for line in filter(None, text.splitlines()):
        first, *parts = (cell.strip() for cell in line.split(" | "))
        rows.append((first, "2", ", ".join(parts)))
    return rows


def every(inputs: Any, part: str, *layouts: str) -> Rows:
    """Returns a row for each input, in each of the layouts of its file."""
    pairs = itertools.product(inputs, layouts or ("",))
    return [(f"{each} {layout}".strip(), "2", part) for each, layout in pairs]


def groups() -> dict[str, Rows]:
    """Returns the rows by the test that holds them."""
    layouts = [*test_pickle.LAYOUTS]
    pickles = "`tests/convert/test_pickle.py`"
    return {
        "Commands: `tests/promises/test_bad_inputs.py`": split(test_bad_inputs.ERRORS),
        "Readers: `tests/faults/test_hostile.py`": [
            (f"{reader}: {damage}", "2", part) for reader, damage, part in hostile.ROWS
        ],
        "Values of fields: `tests/test_config.py`": split(config.REFUSED),
        "Types of fields: `tests/test_config.py`": [
            (str(fields), "2", part) for fields, part in config.WRONG
        ],
        f"Pickles that would execute code: {pickles}": every(
            test_pickle.payloads(""), "{path}", *layouts
        ),
        f"Views of storages: {pickles}": [
            (str(view), "2", part) for view, part in test_pickle.VIEWS if part
        ],
        f"Claims of size: {pickles}": every(test_pickle.CLAIMS, "{path}", *layouts),
        f"Depth and repetition: {pickles}": every(test_pickle.NESTED, "{path}"),
        "Fields of Hugging Face: `tests/convert/test_huggingface.py`": [
            (str(fields), "2", part) for fields, part in test_huggingface.MISTAKES
        ],
        "State dicts: `tests/convert/test_pytorch.py`": [
            (name, "2", str(case[-1])) for name, case in test_pytorch.BROKEN.items()
        ],
        "Variables of TensorFlow: `tests/convert/test_tensorflow.py`": [
            (name, "2", part) for name, _, part in test_tensorflow.REFUSED
        ],
    }


def page() -> str:
    """Returns the list of all cases in Markdown."""
    parts = [HEAD, f"{sum(len(rows) for rows in groups().values())} cases.\n"]
    for title, rows in groups().items():
        parts.append(f"\n## {title} ({len(rows)})\n\n")
        parts.append("| input | status | part of the line |\n|---|---|---|\n")
        for row in rows:
            cells = (cell.replace("|", "\\|").replace("\n", " ") for cell in row)
            first, status, part = cells
            parts.append(f"| `{first[:150]}` | {status} | `{part}` |\n")
    return "".join(parts)


if __name__ == "__main__":
    PAGE.write_text(page(), "utf-8")
