"""Corpora of integers: read from every format, prepared, trained, scored, generated."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.refusal import refused
from tests.support.trained import EXPERIMENT, command
from txl_jax.data import number
from txl_jax.data import vocab as vocabulary
from txl_jax.data.number import NumberVocab
from txl_jax.data.options import SPLITS, DataConfig
from txl_jax.data.streams import Position, Streams
from txl_jax.data.tokens import prepare

NUMBERS = np.random.default_rng(0).integers(0, 300, 400)


def config(home: Path, path: Path, **fields: Any) -> DataConfig:
    return DataConfig("tokens", str(path), str(home / "data"), **fields)


@pytest.mark.parametrize("name, dtype", [("a.npy", ""), ("a.bin", "uint16")])
def test_every_format_gives_the_same_tokens(
    name: str, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(number, "BLOCK_NUMBERS", 7)
    path = tmp_path / name
    if dtype:
        NUMBERS.astype("<u2").tofile(path)
    else:
        np.save(path, NUMBERS.astype(np.int16))
    made = prepare(config(tmp_path, path, dtype=dtype))
    assert made.vocab == NumberVocab(int(NUMBERS.max()) + 1)
    sizes = [len(made.split(split)) for split in SPLITS]
    assert sizes == [360, 20, 20]
    joined = np.concatenate([made.split(split) for split in SPLITS])
    np.testing.assert_array_equal(joined, NUMBERS)
    assert joined.dtype == made.vocab.dtype == np.uint16
    assert made.manifest["convention"] == "numbers"
    assert made.denominators("test") == {"tokens": 20}


def test_files_are_documents_and_names_state_splits(tmp_path: Path) -> None:
    folder = tmp_path / "music"
    folder.mkdir()
    for name in ("train_1", "train_2", "valid", "test"):
        np.save(folder / f"{name}.npy", [7, 3])
    made = prepare(config(tmp_path, folder, document_end="9"))
    np.testing.assert_array_equal(made.split("train"), [7, 3, 9, 7, 3, 9])
    np.testing.assert_array_equal(made.split("test"), [7, 3, 9])
    assert len(made.vocab) == 10 and made.vocab.dtype == np.uint8
    streams = Streams(made.split("train"), 1, 6, reset_memory_at=9)
    assert np.flatnonzero(streams.batch(Position())[0].first_SBL).tolist() == [0, 2]
    path = made.folder / "vocab.json"
    assert vocabulary.load(path) == made.vocab
    again = prepare(config(tmp_path, folder, vocab_path=str(path)))
    assert again.vocab == made.vocab


def test_numbers_are_written_with_spaces() -> None:
    vocab = NumberVocab(100)
    tokens_T = np.array([5, 17, 99])
    assert vocab.decode(tokens_T) == "5 17 99"
    np.testing.assert_array_equal(vocab.encode(" 5\n17 99\n"), tokens_T)
    assert [*vocabulary.spell(vocab.decode, tokens_T, 1)] == [" 17", " 99"]
    assert vocabulary.find_token(vocab, "0") == 0
    with refused("number 100, which is not from 0 to 99: .* data.vocab_size"):
        vocab.encode("1 100")
    with refused("is not whole numbers"):
        vocab.encode("1 2.5")


@pytest.mark.parametrize(
    "name, content, fields, error",
    [
        ("a.txt", b"1 2", {}, "a.txt is not one sequence of integers in a .npy file"),
        ("a.bin", b"1234", {}, "data.dtype='' .*or set data.dtype"),
        ("a.bin", b"12345", {"dtype": "int32"}, "not a multiple of"),
        ("a.bin", b"\xff" * 8, {"dtype": "int16"}, "numbers from -1 to -1"),
        ("a.npy", np.zeros((2, 3)), {}, r"shape \(2, 3\) of float64"),
        ("a.npy", np.zeros(10, int), {}, "too small: its valid split has 0 tokens"),
        ("a.npy", NUMBERS, {"vocab_size": 3}, "has the number .*, which is"),
        ("a.npy", NUMBERS, {"vocab": "word"}, "do not fit a vocabulary of kind"),
        ("a.npy", NUMBERS, {"document_end": "<eod>"}, "document_end is not whole num"),
        ("a.npy", NUMBERS, {"document_end": "4294967296"}, "document_end has numbers"),
    ],
)
def test_other_files_are_refused(
    name: str, content: Any, fields: dict[str, Any], error: str, tmp_path: Path
) -> None:
    path = tmp_path / name
    if isinstance(content, np.ndarray):
        np.save(path, content)
    else:
        path.write_bytes(content)
    with refused(error):
        prepare(config(tmp_path, path, **fields))


@pytest.mark.long
def test_a_model_of_numbers_is_trained_scored_and_sampled(tmp_path: Path) -> None:
    cycle = np.arange(2000) * 3 % 300  # each number decides the next one
    np.save(tmp_path / "signal.npy", cycle)
    files = {"path": "signal.npy", "data_dir": "data"}
    places = {name: str(tmp_path / file) for name, file in files.items()}
    (tmp_path / "tiny.py").write_text(EXPERIMENT.format(**places))
    run = f"--workdir={tmp_path / 'run'}"
    changes = {
        **{"data.corpus": "tokens", "train.num_steps": 80, "optim.lr": 3e-2},
        **{"generate.prompt": "0 3", "generate.num_tokens": 99},
        **{"generate.temperature": 0.0, "eval.baselines": False},
    }
    flags = (f"--config.{name}={value}" for name, value in changes.items())
    trained = command(f"--config={tmp_path / 'tiny.py'}", run, *flags)
    assert trained.result["nll"] < 0.5 and "word_ppl" not in trained.result
    assert "bits/token, perplexity" in trained.err
    assert re.search(r"a sample:\n0 3 6 9 [0-9 ]{180,} \[...\]\n", trained.err)

    np.save(tmp_path / "more.npy", cycle[:50])
    scored = command("score", run, f"--path={tmp_path / 'more.npy'}").result
    assert (scored["tokens"], scored["bits_per_byte"]) == (50, None)
    assert scored["nll"] < 0.5

    target = tmp_path / "sample.npy"
    sampled = command("generate", run, "--num_tokens=6", f"--output={target}")
    assert sampled.result["text"] == "0 3 6 9 12 15 18 21"
    np.testing.assert_array_equal(np.load(target), cycle[:8])
    stopped = command("generate", run, "--stop=2", f"--output={target}").result
    (sample,) = stopped["sampled"]
    assert (sample["text"], sample["tokens"]) == ("0 3 6 9 1", 3)
    np.testing.assert_array_equal(np.load(target), cycle[:5])
    np.savetxt(tmp_path / "prompts.txt", cycle[:6].reshape(2, 3), "%d")
    prompts = f"--prompt=@{tmp_path / 'prompts.txt'}"
    command("generate", run, prompts, "--num_tokens=2", f"--output={target}")
    np.testing.assert_array_equal(np.load(target), [cycle[:5], cycle[3:8]])

    several = command("generate", run, prompts, "--stop=2", f"--output={target}")
    assert several.status == 2 and "without generate.stop: write JSON" in several.err
    for flag, error in (
        ("--prompt= ", "generate.prompt = ' ' has no token"),
        ("--prompt=300", "the number 300, which is not from 0 to 297"),
    ):
        refused_flag = command("generate", run, flag)
        assert refused_flag.status == 2 and error in refused_flag.err
