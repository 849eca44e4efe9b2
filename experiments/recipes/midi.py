"""MIDI as numbers: pip install miditoolkit; python -m experiments.recipes.midi FILE OUT

FILE.mid becomes OUT.npy, and FILE.npy, such as a sample, becomes OUT.mid. A note is up
to three numbers: the sixteenths since the last note's start, if any (128 to 191), the
pitch (0 to 127), and its length in sixteenths (192 to 255). Drums and tempo are lost.
"""

import sys
from pathlib import Path

import numpy as np
from miditoolkit import Instrument, MidiFile, Note

from experiments.figures import program
from txl_jax.errors import UserError


def encode(path: str) -> np.ndarray:
    midi, now, numbers = MidiFile(path), 0, list[int]()
    notes = [note for x in midi.instruments if not x.is_drum for note in x.notes]
    for note in sorted(notes, key=lambda note: (note.start, note.pitch)):
        start, end = np.rint(np.divide([note.start, note.end], midi.ticks_per_beat / 4))
        wait, now = int(start) - now, int(start)
        length = min(max(int(end) - now, 1), 64)
        numbers += [127 + min(wait, 64)] * (wait > 0) + [note.pitch, 191 + length]
    return np.array(numbers, np.uint8)


def decode(numbers: np.ndarray, path: str) -> None:
    midi, now, pitch = MidiFile(), 0, -1
    step, midi.instruments = midi.ticks_per_beat // 4, [Instrument(program=0)]
    for number in numbers.tolist():
        if 127 < number < 192:
            now += number - 127
        elif number > 191 and pitch >= 0:  # a sample may lack a pitch
            note = Note(80, pitch, now * step, (now + number - 191) * step)
            midi.instruments[0].notes.append(note)
        pitch = number if number < 128 else -1
    midi.dump(path)


def convert(source: Path, target: Path) -> dict[str, str]:
    """Converts a file in either direction; raises UserError for another file."""
    source.open("rb").close()  # a wrong path is not an error of the format
    try:
        if source.suffix == ".npy":
            decode(np.load(source), str(target))
        else:
            np.save(target, encode(str(source)))
    except (ValueError, EOFError, KeyError, OSError, IndexError) as error:
        raise UserError(f"cannot convert {source} to {target}: {error}") from error
    return {"written": str(target)}


def main() -> int:
    parser = program.make_parser(__doc__)
    parser.add_argument("source", type=Path)
    parser.add_argument("target", type=Path)
    args = parser.parse_args()
    return program.run(lambda: convert(args.source, args.target))


if __name__ == "__main__":
    sys.exit(main())
