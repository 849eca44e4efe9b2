"""Bach's chorales as MIDI files, to try `experiments.recipes.music` with.

    pip install music21
    python -m experiments.recipes.chorales midi

music21 has them as scores, whose encodings may be restricted to uses that are not
commercial (music21/corpus/license.txt). An upbeat ends a full bar; repeats are not
played.
"""

import sys
from pathlib import Path
from typing import Any

from music21 import corpus, meter, stream

from experiments.figures import program


def write(folder: Path) -> dict[str, Any]:
    """Writes FOLDER/NUMBER.mid."""
    folder.mkdir()
    for number, piece in enumerate(corpus.chorales.Iterator()):
        bar = piece.parts[0].getElementsByClass("Measure")[0]
        parts = [part.flatten() for part in piece.parts]
        for part in parts:
            part.shiftElements(bar.paddingLeft)
        parts[0].insert(0, meter.TimeSignature(bar.timeSignature.ratioString))
        stream.Score(parts).write("midi", folder / f"{number}.mid")
    return {"pieces": number + 1}


def main() -> int:
    parser = program.make_parser(__doc__)
    parser.add_argument("folder", type=Path)
    args = parser.parse_args()
    return program.run(lambda: write(args.folder))


if __name__ == "__main__":
    sys.exit(main())
