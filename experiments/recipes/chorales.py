"""Bach's chorales as MIDI files, to try the recipe `music` with.

    pip install music21
    python -m txl_jax.experiments.recipes.chorales midi

music21 has them as scores, whose encodings may be restricted to uses that are not
commercial (music21/corpus/license.txt). An upbeat ends a full bar; repeats are not
played. This takes some minutes.
"""

import sys
from pathlib import Path
from typing import Any

from etils import epy

from txl_jax.report.progress import Progress

from ..figures import program

with epy.lazy_imports():  # not everyone has it
    from music21 import corpus, meter, stream


def write(folder: Path) -> dict[str, Any]:
    """Writes FOLDER/NUMBER.mid."""
    pieces = corpus.chorales.Iterator()
    folder.mkdir()
    with Progress("writing", pieces.highestNumber, unit="chorales") as bar:
        for number, piece in enumerate(pieces):
            measure = piece.parts[0].getElementsByClass("Measure")[0]
            parts = [part.flatten() for part in piece.parts]
            for part in parts:
                part.shiftElements(measure.paddingLeft)
            ratio = measure.timeSignature.ratioString
            parts[0].insert(0, meter.TimeSignature(ratio))
            stream.Score(parts).write("midi", folder / f"{number}.mid")
            bar(number + 1)
    return {"pieces": number + 1}


def main(argv: list[str] | None = None) -> int:
    parser = program.make_parser(__doc__)
    parser.add_argument("folder", type=program.path)
    return program.run(parser, lambda args: write(args.folder), argv)


if __name__ == "__main__":
    sys.exit(main())
