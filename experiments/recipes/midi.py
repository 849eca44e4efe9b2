"""MIDI as numbers: pip install miditoolkit; python -m experiments.recipes.midi FILE OUT

FILE.mid becomes OUT.npy, and FILE.npy, such as a sample, becomes OUT.mid. A note is up
to three numbers: the sixteenths since the last note's start, if any (128 to 191), the
pitch (0 to 127), and its length in sixteenths (192 to 255). Drums and tempo are lost.
"""

import sys

import numpy as np
from miditoolkit import Instrument, MidiFile, Note


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


source, target = sys.argv[1:]
to_midi = source.endswith(".npy")
decode(np.load(source), target) if to_midi else np.save(target, encode(source))
