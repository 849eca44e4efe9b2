"""Music: a folder of MIDI files becomes a corpus, and a trained model writes MIDI.

    pip install 'txl_jax[recipes]'
    python -m txl_jax.experiments.recipes.music encode FOLDER music
    python -m txl_jax.main --config=music --workdir=runs/music
    python -m txl_jax.experiments.recipes.music sample runs/music sample.mid \\
        [--prompt=FILE.mid]

The tokens are REMI's (Huang and Yang 2020), by miditok: a bar with its time signature,
a position in it, the pitch and the length, at most 12 beats, of each note that starts
there. Drums, instruments, loudness and tempo are left out, and of equal pitches that
start together one is kept. `sample` draws only tokens that may follow in a piece.
"""

import argparse
import contextlib
import dataclasses
import functools
import json
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from etils import epy

import txl_jax
from txl_jax.errors import UserError, refuse
from txl_jax.generate.sampler import Reading, Sampler, choose
from txl_jax.report.log import say
from txl_jax.report.progress import Progress
from txl_jax.runtime.storage import DAMAGE, local_path, replacing

from ..figures import program

with epy.lazy_imports():  # of an extra
    import miditok
    import symusic

GRID = 12  # positions in a beat: sixteenths and triplets
END = 1  # miditok's EOS, which the corpus writes after each piece
SUFFIXES = ".mid", ".midi"
SETTINGS: dict[str, Any] = dict(
    pitch_range=(0, 127),
    beat_res={(0, 12): GRID},
    special_tokens=["PAD", "EOS"],
    use_velocities=False,
    use_pitchdrum_tokens=False,
    use_time_signatures=True,
    time_signature_range={4: [*range(1, 13)], 8: [*range(1, 13)]},
    remove_duplicated_notes=True,
)


def load_tokenizer(path: Path, size: int) -> "miditok.REMI":
    """Returns the encoding of a corpus; raises UserError if it has another size."""
    missing = f"{path}, which `music encode` writes beside the corpus, is missing: "
    refuse(not path.exists(), f"{missing}restore it, or encode and train again")
    with contextlib.suppress(OSError, *DAMAGE):
        names = json.loads(path.read_bytes())["tokens"]
        tokenizer = miditok.REMI(params=path)
        if names == [*tokenizer.vocab] and len(names) == size:
            return tokenizer
    line = f"{path} is not by this miditok's `music encode`, with {size} tokens"
    raise UserError(f"{line}: run this where you trained, or encode and train again")


def read(tokenizer: "miditok.REMI", path: Path) -> list[int]:
    """Returns the tokens of a MIDI file; raises UserError if it has none."""
    try:
        score = symusic.Score.from_midi(path.read_bytes())
    except (RuntimeError, ValueError) as error:
        raise UserError(f"{path} is not a MIDI file ({error})") from error
    notes = [note for x in score.tracks if not x.is_drum for note in x.notes]
    refuse(not notes, f"{path} has no notes, apart from drums")
    refuse(score.end() > 10**5 * score.tpq, f"{path} lasts over 100,000 quarters")
    for x in score.time_signatures:
        if x.denominator == 2:  # the same bars in quarters
            x.numerator, x.denominator = 2 * x.numerator, 4
        known = (x.numerator, x.denominator) in tokenizer.time_signatures
        refuse(not known, f"{path} has bars of {x.numerator}/{x.denominator}")
    score.tracks = [symusic.Track(notes=sorted(notes, key=lambda note: note.time))]
    # Time signatures move to the next bar; those that are left determine positions.
    score = tokenizer.preprocess_score(score)
    last = score.tracks[0].notes[-1].time
    score.time_signatures = [x for x in score.time_signatures if x.time <= last]
    return [*tokenizer.encode(score)[0].ids]


def encode(folder: Path, out: Path) -> dict[str, Any]:
    """Writes OUT/SPLIT/NUMBER.npy for each piece, and OUT.json, the encoding."""
    settings = Path(f"{out}.json")
    refuse(settings.exists(), f"{settings} exists: remove it, or choose another name")
    tokenizer = miditok.REMI(miditok.TokenizerConfig(**SETTINGS))
    pieces = dict[tuple[int, ...], Path]()
    files = sorted(x for x in folder.rglob("*") if x.suffix.lower() in SUFFIXES)
    with Progress("encoding", len(files), unit="files") as bar:
        for done, path in enumerate(files, 1):
            try:
                same = pieces.setdefault(tuple(read(tokenizer, path)), path)
                refuse(same != path, f"{path} has the notes of {same}")
            except (UserError, OSError) as error:
                say(f"left out: {error}")
            bar(done)
    refuse(len(pieces) < 3, f"{folder} is not a folder of at least 3 MIDI pieces")
    tokens = [np.array(piece, np.uint16) for piece in pieces]
    shuffled = np.random.default_rng(1).permutation(len(tokens))
    held_out = max(len(tokens) // 20, 1)
    for rank in range(len(tokens))[::-1]:  # an unfinished corpus has no test: refused
        place = out / ("test", "validation", "train")[min(rank // held_out, 2)]
        place.mkdir(parents=True, exist_ok=True)
        np.save(place / f"{shuffled[rank]:05d}.npy", tokens[shuffled[rank]])
    tokenizer.save(settings, {"tokens": [*tokenizer.vocab]})
    counts = {"tokens": sum(map(len, tokens)), "vocab_size": len(tokenizer)}
    return {"pieces": len(tokens), "left_out": len(files) - len(pieces), **counts}


class Grammar:
    """The tokens that may follow others. Dims: T tokens of a piece, V vocabulary."""

    def __init__(self, tokenizer: "miditok.REMI") -> None:
        self.type_V, self.value_V = np.array([x.split("_") for x in tokenizer.vocab]).T
        self.first_position = tokenizer.vocab["Position_0"]
        graph = tokenizer.tokens_types_graph
        after = {name: graph[name] - {"PAD", "EOS"} for name in graph}
        after["EOS"] = {"Bar"}
        after["Duration"].add("EOS")
        after["TimeSig"].remove("Pitch")  # the encoder writes a Position between them
        self.after_V = {x: np.isin(self.type_V, [*after[x]]) for x in after}

    def allow(self, tokens: list[int]) -> np.ndarray:
        """Returns which tokens may follow, a bool for each.

        Positions rise within a bar and end with it; pitches rise within a position.
        """
        type_T, number_V = self.type_V[tokens], np.arange(len(self.type_V))
        last = dict(zip(type_T, tokens, strict=True))  # of each type
        allowed_V = self.after_V[type_T[-1]].copy()
        for name in ("Position", "Pitch") if type_T[-1] == "Duration" else ():
            allowed_V &= (self.type_V != name) | (number_V > last[name])
        if "TimeSig" in last:
            beats = int(self.value_V[last["TimeSig"]].partition("/")[0])
            end = self.first_position + beats * GRID
            allowed_V &= (self.type_V != "Position") | (number_V < end)
        return allowed_V


def extend(
    loaded: txl_jax.Loaded, grammar: Grammar, tokens: list[int], bars: int, **flags: Any
) -> list[int]:
    """Returns the tokens and up to `bars` more bars; flags are fields of `generate`."""
    config, V = loaded.config, len(loaded.vocab)
    options = dataclasses.replace(config.generate, **flags)
    reading = Reading(config.eval.ext_len + config.eval.tgt_len)
    sampler = Sampler(config.model, loaded.params, options, 1, len(tokens), V, reading)

    @functools.partial(jax.jit, donate_argnums=1)
    def step(params: Any, context: Any, allowed_V: jax.Array, n: int) -> Any:
        log_p_BV, context = sampler.predict(params, context)
        logits_BV = jnp.where(allowed_V, log_p_BV[:, :V], -jnp.inf)
        key = jax.random.fold_in(jax.random.key(options.seed), n)
        token_B = choose(logits_BV, key, options).astype(jnp.int32)
        return token_B, context._replace(token_B=token_B)

    context, tokens = sampler.prefill([np.array(tokens)]), [*tokens]
    for n in range(options.num_tokens):
        token_B, context = step(sampler.params, context, grammar.allow(tokens), n)
        tokens.append(int(token_B[0]))
        bars -= bool(grammar.type_V[tokens[-1]] == "Bar")
        if bars < 0 or tokens[-1] == END:
            break
    return tokens[:-1] if bars < 0 else tokens


def sample(args: argparse.Namespace) -> dict[str, Any]:
    """Writes a sampled piece, which may begin with the first bars of another."""
    loaded = txl_jax.load(args.source)
    refuse(loaded.vocab.kind != "number", f"{args.source} is not a model of music")
    settings = Path(f"{local_path(loaded.config.data.path, 'data.path')}.json")
    tokenizer = load_tokenizer(settings, len(loaded.vocab))
    grammar, tokens = Grammar(tokenizer), [END]
    if args.prompt:
        tokens += read(tokenizer, args.prompt)
        starts = np.flatnonzero(grammar.type_V[tokens] == "Bar")
        tokens = tokens[: [*starts, None][min(args.prompt_bars, len(starts))]]
    flags = {"temperature": args.temperature, "num_tokens": 200 * args.bars}
    with replacing(args.out) as file:
        tokens = extend(loaded, grammar, tokens, args.bars, seed=args.seed, **flags)
        score = tokenizer.decode([miditok.TokSequence(ids=tokens[1:])])
        file.write(score.dumps_midi())
    bars, ended = [*grammar.type_V[tokens]].count("Bar"), tokens[-1] == END
    return {"bars": bars, "notes": score.note_num(), "ended": ended}


def main(argv: list[str] | None = None) -> int:
    parser = program.make_parser(__doc__)
    parser.add_argument("action", choices=("encode", "sample"))
    parser.add_argument(
        "source", type=program.path, help="a folder of MIDI files, or a run"
    )
    parser.add_argument("out", type=program.new_path, help="a corpus, or a MIDI file")
    parser.add_argument("--prompt", type=program.path, help="a MIDI file to continue")
    parser.add_argument("--prompt_bars", type=program.count, default=4)
    parser.add_argument("--bars", type=program.count, default=32, help="to sample")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--temperature", type=float, default=1.0)

    def measure(args: argparse.Namespace) -> dict[str, Any]:
        return (
            encode(args.source, args.out) if args.action == "encode" else sample(args)
        )

    return program.run(parser, measure, argv)


if __name__ == "__main__":
    sys.exit(main())
