"""Writes the text of a task that needs a memory, for the corpus "text".

    python -m txl_jax.experiments.recipes.tasks copying --delay=24 --length=8 \\
        --symbols=8

makes tasks/copying-24-8-8 with train.txt, valid.txt and test.txt, the same bytes on
every machine. A run with train.score_from=97 is trained on the answers, which are
letters in lower case, as in the experiment `copying`. The repository's docs/copying.md
describes the tasks.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

from txl_jax.errors import refuse
from txl_jax.paper.tasks import PATTERN, TEXTS

from ..figures import program


def write(args: argparse.Namespace) -> dict[str, Any]:
    """Writes the texts; raises UserError for too many letters."""
    limit = len(getattr(TEXTS[args.task], "keys", PATTERN))
    is_wrong = max(args.length, args.symbols) > limit
    refuse(is_wrong, f"--length and --symbols are at most {limit}")
    task = TEXTS[args.task](args.delay, args.length, args.symbols)
    return {"folder": str(task.write(args.folder))}


def main(argv: list[str] | None = None) -> int:
    parser = program.make_parser(__doc__)
    parser.add_argument("task", choices=TEXTS)
    parser.add_argument(
        "--delay", type=program.count, default=24, help="bytes of noise"
    )
    limit = len(PATTERN)
    text = f"letters of a pattern, or pairs, at most {limit}"
    parser.add_argument("--length", type=program.count, default=8, help=text)
    text = f"letters to choose from, at most {limit}"
    parser.add_argument("--symbols", type=program.count, default=8, help=text)
    parser.add_argument("--folder", type=program.path, default=Path("tasks"))
    return program.run(parser, write, argv)


if __name__ == "__main__":
    sys.exit(main())
