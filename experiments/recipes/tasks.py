"""Writes the text of a task that needs a memory, for the corpus "text".

    python -m experiments.recipes.tasks copying --delay=24 --length=8 --symbols=8

makes tasks/copying-24-8-8 with train.txt, valid.txt and test.txt, the same bytes on
every machine. A run with train.score_from=97 is trained on the answers, which are
letters in lower case, as in experiments/copying.py. docs/copying.md describes the
tasks.
"""

import argparse
from pathlib import Path

from txl_jax.paper.tasks import PATTERN, TEXTS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("task", choices=TEXTS)
    parser.add_argument("--delay", type=int, default=24, help="bytes of noise")
    most = len(PATTERN)
    text = f"letters of a pattern, or pairs, at most {most}"
    parser.add_argument("--length", type=int, default=8, help=text)
    text = f"letters to choose from, at most {most}"
    parser.add_argument("--symbols", type=int, default=8, help=text)
    parser.add_argument("--folder", type=Path, default=Path("tasks"))
    args = parser.parse_args()
    if args.delay < 1 or not (0 < args.length <= most and 0 < args.symbols <= most):
        parser.error(f"--delay is from 1 on, --length and --symbols from 1 to {most}")
    task = TEXTS[args.task](args.delay, args.length, args.symbols)
    print(task.write(args.folder))


if __name__ == "__main__":
    main()
