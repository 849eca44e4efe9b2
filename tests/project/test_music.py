"""MIDI files become a corpus, and every sample of a model is music.

Dims: T tokens, V vocabulary.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("miditok", reason="pip install miditok")

from miditok import REMI, TokenizerConfig, TokSequence
from symusic import Note, Score, Tempo, TimeSignature, Track

from experiments.recipes import music
from tests.project.conftest import EXPERIMENTS, Start
from tests.support import tiny
from tests.support.refusal import refused
from tests.support.trained import command
from txl_jax.data.number import NumberVocab
from txl_jax.evaluate.options import EvalConfig
from txl_jax.generate.options import GenerateConfig

TOKENIZER = REMI(TokenizerConfig(**music.SETTINGS))
GRAMMAR = music.Grammar(TOKENIZER)
V = len(TOKENIZER)
Notes = list[tuple[int, int, int]]  # start and length in twelfths of a quarter, pitch


def write(
    path: Path, *tracks: Notes, meters: Any = (), drums: tuple[int, ...] = ()
) -> None:
    """Writes a MIDI file. meters: start, numerator and denominator; drums: tracks."""
    score = Score(12)
    score.time_signatures = [TimeSignature(*x) for x in meters]
    for number, notes in enumerate(tracks):
        track = Track(program=40 * number, is_drum=number in drums)
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


def read_notes(score: Score) -> Notes:
    """Returns the notes of a score's only track."""
    (track,), scale = score.tracks, 12 / score.tpq
    return sorted((n.time * scale, n.duration * scale, n.pitch) for n in track.notes)


def test_a_piece_becomes_the_same_notes_again(tmp_path: Path) -> None:
    """Of two instruments, which share notes, and without the drums."""
    meters = [(0, 2, 2), (96, 3, 4), (168, 6, 8)]
    notes, lowest, highest = draw_notes(1), (0, 12, 0), (300, 12, 127)
    tracks = notes, [*notes[:9], lowest, highest], draw_notes(2)
    write(tmp_path / "a.mid", *tracks, meters=meters, drums=(2,))
    tokens = music.read(TOKENIZER, tmp_path / "a.mid")
    assert TOKENIZER.tokens_errors(TokSequence(ids=tokens)) == 0
    score = TOKENIZER.decode([TokSequence(ids=tokens)])
    assert read_notes(score) == sorted({*notes, lowest, highest})
    found = [(x.time, x.numerator, x.denominator) for x in score.time_signatures]
    scale = score.tpq // 12
    assert found == [(0, 4, 4), (96 * scale, 3, 4), (168 * scale, 6, 8)]
    require_allowed(tokens)


def require_allowed(tokens: list[int]) -> None:
    """Fails if a token of a whole piece is not allowed after those before it."""
    tokens = [music.END, *tokens, music.END]
    for t in range(1, len(tokens)):
        assert GRAMMAR.allow(tokens[:t])[tokens[t]]


@pytest.mark.parametrize("seed", range(8))
def test_any_piece_is_allowed(seed: int, tmp_path: Path) -> None:
    """Notes off the grid, and time signatures within bars and after the last note."""
    rng = np.random.default_rng(seed)
    score = Score(480)
    score.tempos = [Tempo(700, 150.0)]
    starts = [0, *rng.integers(60 * 480, size=12), 40 * 480 - 1, 80 * 480]
    meters = [
        (int(start), int(rng.integers(1, 7)), int(rng.choice([2, 4, 8])))
        for start in sorted(starts)
    ]
    hidden = [(0, 4, 4), (2400, 6, 8), (2880, 5, 4)]  # no bar is in 6/8
    score.time_signatures = [TimeSignature(*x) for x in (meters if seed else hidden)]
    score.tracks = [Track(), Track(program=9), Track(is_drum=True)]
    for track in score.tracks[1:]:
        draws = rng.integers([0, 0, 60], [40 * 480, 20 * 480, 72], (80, 3))
        track.notes = [Note(*map(int, note), 80) for note in draws]
    path = tmp_path / "a.mid"
    path.write_bytes(score.dumps_midi())
    tokens = music.read(TOKENIZER, path)
    require_allowed(tokens)
    assert TOKENIZER.tokens_errors(TokSequence(ids=tokens)) == 0
    found = {(x * 40, pitch) for x, _, pitch in read_notes(TOKENIZER.decode([tokens]))}
    for note in score.tracks[1].notes:
        near = {x for x, pitch in found if pitch == note.pitch}
        assert min(abs(x - note.time) for x in near) <= 30  # ticks: 3/4 of a position


KINDS: tuple[dict[str, Any], ...] = {}, tiny.FAST, {"mem_len": 0}


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_an_untrained_model_writes_music(kind: dict[str, Any], tmp_path: Path) -> None:
    config = tiny.config(**{"vocab_size": V, "mem_len": 8, **kind})
    sizes: Any = {"num_tokens": 120, "top_k": 0, "mem_len": config.mem_len}
    write(tmp_path / "a.mid", draw_notes(3), meters=[(0, 3, 4)])
    prompt = [music.END, *music.read(TOKENIZER, tmp_path / "a.mid")[:40]]
    pieces = []
    for seed, temperature in enumerate((1.0, 9.0, 0.0)):
        loaded = tiny.loaded(
            tiny.make_params(config, seed),
            model=config,
            eval=EvalConfig(tgt_len=4),
            generate=GenerateConfig(seed=seed, temperature=temperature, **sizes),
        )._replace(vocab=NumberVocab(V))
        start = [music.END] if seed else prompt
        pieces.append(music.extend(loaded, GRAMMAR, start, bars=5))
        assert pieces[-1][: len(start)] == start
    for tokens in pieces:
        assert TOKENIZER.tokens_errors(TokSequence(ids=tokens[1:])) == 0
        types = [*GRAMMAR.type_V[tokens]]
        assert types.count("Bar") <= 5 or tokens is pieces[0]
        score = TOKENIZER.decode([TokSequence(ids=tokens[1:])])
        assert score.note_num() == types.count("Duration")
    assert {len(tokens) for tokens in pieces[1:]} != {1} and pieces[1] != pieces[2]


def test_only_the_next_tokens_of_a_piece_are_allowed() -> None:
    names = np.array([*TOKENIZER.vocab])
    bar = "EOS_None Bar_None TimeSig_3/8 Position_12 Pitch_60 Duration_1.0.12"
    tokens = [TOKENIZER.vocab[name] for name in bar.split()]

    def after(count: int) -> list[str]:
        return [*names[GRAMMAR.allow(tokens[:count])]]

    positions = [f"Position_{n}" for n in range(36)]
    assert after(1) == ["Bar_None"] and {x[:7] for x in after(2)} == {"TimeSig"}
    assert after(3) == ["Bar_None", *positions] and len(after(4)) == 128
    assert {x[:8] for x in after(5)} == {"Duration"}
    pitches = [f"Pitch_{n}" for n in range(61, 128)]
    assert after(6) == ["EOS_None", "Bar_None", *pitches, *positions[13:]]


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
    Path("midi", "sub").mkdir()
    write(Path("midi", "sub", "same.MIDI"), draw_notes(4))
    write(Path("midi", "no.mid"), [])
    write(Path("midi", "drums.mid"), draw_notes(9), drums=(0,))
    write(Path("midi", "odd.mid"), draw_notes(9), meters=[(0, 3, 16)])
    write(Path("midi", "rest.mid"), [(0, 12, 60), (10**7, 12, 60)])
    Path("midi", "text.mid").write_text("These are no notes.")
    Path("midi", "folder.mid").mkdir()
    assert start("recipes.music", "encode midi music") == 0
    stdout, stderr = capsys.readouterr()
    made = json.loads(stdout)
    assert made["pieces"] == 5 and made["left_out"] == 7 and made["vocab_size"] == V
    assert [line.partition(" (")[0] for line in stderr.splitlines()] == [
        "left out: midi/drums.mid has no notes, apart from drums",
        "left out: [Errno 21] Is a directory: 'midi/folder.mid'",
        "left out: midi/no.mid has no notes, apart from drums",
        "left out: midi/odd.mid has bars of 3/16",
        "left out: midi/rest.mid lasts over 100,000 quarters",
        "left out: midi/sub/same.MIDI has the notes of midi/4.mid",
        "left out: midi/text.mid is not a MIDI file",
    ]
    files = {path: path.read_bytes() for path in Path("music").rglob("*.npy")}
    assert len(files) == 5
    assert start("recipes.music", "encode midi music") == 2
    assert "music exists: choose another name" in capsys.readouterr().err
    assert files == {path: path.read_bytes() for path in Path("music").rglob("*.npy")}

    config, flags = EXPERIMENTS / "music.py", [f"--config.{x}" for x in TINY.split()]
    result = command(f"--config={config}", "--workdir=run", *flags).result
    (test,) = Path("music", "test").iterdir()
    assert result["tokens"] == len(np.load(test))  # and the end, but the first
    line = "sample run a.mid --prompt=midi/1.mid --prompt_bars=2 --bars=3"
    assert start("recipes.music", line) == 0
    result = json.loads(capsys.readouterr().out)
    assert 2 <= result["bars"] <= 5 and Score("a.mid").note_num() == result["notes"] > 0

    written = json.loads(Path("music.json").read_text())
    others: Any = {}, [], {**written, "tokens": []}, {**written, "config": 1}
    for other in others:
        Path("music.json").write_text(json.dumps(other))
        assert start("recipes.music", "sample run b.mid") == 2
        (line,) = capsys.readouterr().err.splitlines()[-1:]
        assert "music.json is not by this miditok's `music encode`" in line
    Path("music.json").unlink()
    assert start("recipes.music", "sample run b.mid") == 2
    line = "music.json, which `music encode` writes beside the corpus, is missing: "
    assert line in capsys.readouterr().err
    assert not Path("b.mid").exists()


def test_chorales_begin_with_a_full_bar(
    tmp_path: Path, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    corpus = pytest.importorskip("music21", reason="pip install music21").corpus
    pieces = [*corpus.chorales.Iterator(1, 2)]
    monkeypatch.setattr(corpus.chorales, "Iterator", lambda: pieces)
    assert start("recipes.chorales", f"{tmp_path / 'midi'}") == 0
    tokens = music.read(TOKENIZER, tmp_path / "midi" / "0.mid")
    names = [[*TOKENIZER.vocab][token] for token in tokens[:4]]
    assert names == ["Bar_None", "TimeSig_3/4", "Position_24", "Pitch_43"]
    assert start("recipes.chorales", f"{tmp_path / 'midi'}") == 2  # it exists


def test_a_corpus_has_another_size(tmp_path: Path) -> None:
    path = tmp_path / "music.json"
    TOKENIZER.save(path, {"tokens": [*TOKENIZER.vocab]})
    assert music.load_tokenizer(path, V).vocab == TOKENIZER.vocab
    with refused("with 300 tokens: run this where you trained, or encode"):
        music.load_tokenizer(path, 300)


@pytest.mark.parametrize(
    "flags, line",
    [
        ("encode absent music", "absent is not a folder of at least 3 MIDI pieces"),
        ("encode absent no/music", "cannot write to the folder no"),
        ("sample shakespeare no/a.mid", "cannot write to the folder no"),
        ("sample shakespeare .", "argument out: . exists: choose another name"),
        ("sample absent a.mid", "absent holds no run"),
        ("sample shakespeare a.mid", "shakespeare is not a model of music"),
        ("sample shakespeare a.mid --bars=0", "argument --bars: 0 must be at least 1"),
    ],
)
def test_errors_are_one_line(
    flags: str, line: str, tmp_path: Path, start: Start,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    assert start("recipes.music", flags) == 2
    stdout, stderr = capsys.readouterr()
    assert not stdout and not [*tmp_path.iterdir()]
    assert line in stderr.strip().splitlines()[-1] and "Traceback" not in stderr
