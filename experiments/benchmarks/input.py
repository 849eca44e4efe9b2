"""Measures how fast a corpus is prepared and read; prints one JSON line.

    python experiments/benchmarks/input.py [--megabytes=500] [--folder=DIR]

The program writes a word-level corpus of Zipf text (267,735 types, lines as in
WikiText), prepares it and reads it in 60 streams with segments of 150 tokens. The goal
for 500 MB on 2 cores: preparation in under 120 seconds and 4 GiB, and reading at over
20 million tokens per second. `prepare_seconds` includes the copy to ArrayRecord, which
`copy_seconds` gives separately.
"""

import argparse
import json
import resource
import tempfile
import time
from pathlib import Path

import numpy as np

from txl_jax.data import builder, tokens
from txl_jax.data.streams import Position, Streams

TYPES = 267_735
LINE_WORDS = 57  # of a WikiText-103 line, on average


def make_words(rng: np.random.Generator) -> np.ndarray:
    """Returns TYPES distinct words; as in English, frequent words are short."""
    letters = "etaoinshrdlcumwfgypbvkxjqz"
    words = []
    for rank in range(TYPES):
        word = ""
        while rank >= 0:  # bijective base 26, so that all are distinct
            word += letters[rank % 26]
            rank = rank // 26 - 1
        words.append(word + "aeiou"[: int(rng.integers(0, 5))] + str(len(word)))
    return np.array(words, object)


def write_corpus(folder: Path, megabytes: int) -> None:
    """Writes a train.txt of this size, and a small valid.txt and test.txt."""
    rng = np.random.default_rng(0)
    words = make_words(rng)
    share = np.cumsum(1 / np.arange(1, TYPES + 1))
    share /= share[-1]
    for split, size in (("train", megabytes * 1e6), ("valid", 1e6), ("test", 1e6)):
        with (folder / f"{split}.txt").open("w", encoding="ascii") as file:
            while file.tell() < size:
                ranks = np.searchsorted(share, rng.random(LINE_WORDS * 5_000))
                lines = words[ranks].reshape(-1, LINE_WORDS).tolist()
                file.writelines(f" {' '.join(line)} \n" for line in lines)


def read_tokens(split: np.ndarray, seconds: float) -> float:
    """Reads batches for about `seconds`, and returns the tokens per second."""
    streams = Streams(split, 60, 150)
    position, count = Position(), 0
    began = time.perf_counter()
    while (taken := time.perf_counter() - began) < seconds:
        segment, position = streams.batch(position)
        count += int(segment.length_SB.sum())
    return count / taken


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, default=500)
    parser.add_argument(
        "--folder", type=Path, help="working folder; default: a temporary one"
    )
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.folder) as name:
        folder = Path(name)
        (folder / "text").mkdir()
        write_corpus(folder / "text", args.megabytes)
        copied, copy = 0.0, builder.prepare

        def timed(*args: object) -> builder.CorpusBuilder:
            nonlocal copied
            began = time.perf_counter()
            stored = copy(*args)  # type: ignore[arg-type]
            copied = time.perf_counter() - began
            return stored

        builder.prepare = timed  # type: ignore[assignment]
        config = tokens.DataConfig(
            "text", str(folder / "text"), str(folder / "data"), "word"
        )
        began = time.perf_counter()
        made = tokens.prepare(config)
        seconds = time.perf_counter() - began
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        train = made.manifest["splits"]["train"]
        result = {
            "benchmark": "input",
            "megabytes": train["bytes"] / 1e6,
            "tokens": train["tokens"],
            "types": made.manifest["types"],
            "prepare_seconds": round(seconds, 2),
            "copy_seconds": round(copied, 2),
            "tokens_per_second_preparing": round(train["tokens"] / seconds),
            "peak_bytes": peak,
            "tokens_per_second_reading": round(read_tokens(made.split("train"), 5)),
        }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
