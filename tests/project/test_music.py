"""MIDI files become a corpus, and a sample of a model is music."""

import functools
import json
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("miditok", reason="pip install miditok")

from miditok import REMI, TokenizerConfig
from symusic import Note, Score, Track

from experiments.recipes import music
from tests.project.conftest import EXPERIMENTS, Start
from tests.support.trained import command

V = len(REMI(TokenizerConfig(**music.SETTINGS)))
Notes = list[tuple[int, int, int]]  # start and length in twelfths of a quarter, pitch


def write(path: Path, notes: Notes) -> None:
    """Writes a MIDI file."""
    score, track = Score(12), Track()
    track.notes = [Note(*note, 80) for note in notes]
    score.tracks.append(track)
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(score.dumps_midi())


def draw_notes(seed: int, count: int = 30) -> Notes:
    """Returns random notes with up to four at a time, on the grid."""
    rng = np.random.default_rng(seed)
    starts = rng.choice(240, count, replace=False)
    pitches = [rng.choice(128, rng.integers(1, 5), replace=False) for _ in starts]
    return [
        (int(start), int(rng.integers(1, 48)), int(pitch))
        for start, chord in zip(starts, pitches, strict=True)
        for pitch in chord
    ]


TINY = (
    "model.n_layer=1 model.d_model=8 model.n_head=1 model.d_head=8 model.d_inner=8 "
    "model.mem_len=8 model.unroll=1 train.batch_size=8 train.tgt_len=8 "
    "train.num_steps=4 train.eval_every=4 eval.tgt_len=8 eval.mem_len=8 "
    "eval.streams=8 generate.mem_len=8 data.data_dir=data"
)


def test_three_commands_make_a_piece(
    tmp_path: Path, start: Start, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    for n in range(5):
        write(Path("midi", f"{n}.mid"), draw_notes(n))
    write(Path("midi", "no.mid"), [])
    Path("midi", "text.mid").write_text("These are no notes.")
    assert start("recipes.music", "encode midi music") == 0
    stdout, stderr = capsys.readouterr()
    made = json.loads(stdout)
    assert made["pieces"] == 5 and made["left_out"] == 2 and made["vocab_size"] == V
    assert [line.partition(" (")[0] for line in stderr.splitlines()] == [
        "left out: midi/no.mid has no notes, apart from drums",
        "left out: midi/text.mid is not a MIDI file",
    ]

    config, flags = EXPERIMENTS / "music.py", [f"--config.{x}" for x in TINY.split()]
    result = command(f"--config={config}", "--workdir=run", *flags).result
    (test,) = Path("music", "test").iterdir()
    assert result["tokens"] == len(np.load(test))  # and the end, but the first
    line = "sample run a.mid --prompt=midi/1.mid --prompt_bars=2 --bars=3"
    assert start("recipes.music", line) == 0
    result = json.loads(capsys.readouterr().out)
    assert 2 <= result["bars"] <= 5 and Score("a.mid").note_num() == result["notes"] > 0


def test_a_chorale_begins_with_its_upbeat(
    tmp_path: Path, start: Start, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
) -> None:  # fmt: skip
    chorales = pytest.importorskip(
        "music21.corpus.chorales", reason="pip install music21"
    )
    monkeypatch.chdir(tmp_path)
    first_two = functools.partial(chorales.Iterator, 1, 2)
    monkeypatch.setattr(chorales, "Iterator", first_two)
    assert start("recipes.chorales", "midi") == 0
    assert json.loads(capsys.readouterr().out)["pieces"] == 2
    score = Score("midi/0.mid")  # BWV 269, whose upbeat is a quarter of three
    first = score.time_signatures[0]
    assert (first.time, first.numerator, first.denominator) == (0, 3, 4)
    begins = [track.notes[0] for track in score.tracks if track.notes]
    assert [note.time for note in begins] == [2 * score.tpq] * 4
    assert [note.pitch for note in begins] == [67, 62, 59, 43]
