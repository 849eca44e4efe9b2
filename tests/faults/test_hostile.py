"""Damaged, hostile and arbitrary inputs of every reader are refused in one line.

A row of hostile.txt is a reader, the damage to its valid input, and a part of the
error:

    reader | field=JSON | ..    the JSON object with a field set; a.b is a nested field
    reader | -field | ..        the JSON object without the field
    reader | !NAME | ..         the content NAME of CONTENTS instead of the file
    reader | broken | ..        a broken link, or a folder, instead of the file
    reader | text | ..          a value, for the readers of VALUES

Hypothesis makes arbitrary inputs: a few here, the same ones each time, and thousands of
each kind with `pytest -m long tests/faults/test_hostile.py`.
"""

import dataclasses
import gzip
import json
import resource
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import numpy as np
import pytest
import safetensors.numpy
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.convert.test_pickle import RECORDED
from tests.convert.test_pytorch import saved_case
from tests.support.refusal import contents, refusal
from txl_jax import config as configs
from txl_jax.aot import lower
from txl_jax.checkpoint import manifest
from txl_jax.cli import flags
from txl_jax.convert import formats, huggingface, pickle, pytorch, tensorflow
from txl_jax.data import files, tokens
from txl_jax.data import text as streaming
from txl_jax.data import vocab as vocabulary
from txl_jax.data.streams import Position
from txl_jax.data.vocab import ByteVocab, CharVocab, code_points
from txl_jax.data.word import Lines, WordVocab
from txl_jax.errors import UserError
from txl_jax.generate import texts
from txl_jax.generate.options import GenerateConfig
from txl_jax.paper import table
from txl_jax.report.metrics_log import _encode, read_metrics
from txl_jax.workdir import run_record

pytestmark = pytest.mark.promise("User errors are one line")

ROWS = [
    tuple(cell.strip() for cell in line.split(" | "))
    for line in Path(__file__).with_name("hostile.txt").read_text("utf-8").splitlines()
    if line and not line.startswith("#")
]
FEW, MANY = 25, 2000  # arbitrary inputs of each kind
SECONDS = 1.0  # of processor time for an input, on average
MEGABYTES = 300  # largest growth of the peak memory by all inputs of a kind


# Arbitrary inputs

Strategy = st.SearchStrategy[Any]
NUMBERS = st.integers() | st.integers(-2, 300) | st.floats() | st.just(2**70)
NAMES = st.sampled_from(sorted(configs.FIELDS)) | st.text(max_size=9)
JSON: Strategy = st.recursive(
    st.none() | st.booleans() | NUMBERS | st.text(max_size=20),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.text(max_size=9), inner, max_size=4)
    ),
    max_leaves=12,
)
EDITS = st.lists(
    st.tuples(st.floats(0, 1), st.binary(max_size=6), st.integers(0, 9)),
    min_size=1,
    max_size=4,
)


def encode(text: str) -> bytes:
    """Returns the bytes of a text that may have surrogates."""
    return text.encode("utf-8", "surrogatepass")


def edited(*files: Path) -> Strategy:
    """Makes one of the files with a few places changed, inserted or removed, or cut."""

    def edit(data: bytes, edits: list[tuple[float, bytes, int]], kept: float) -> bytes:
        for place, more, fewer in edits:
            at = int(place * len(data))
            data = data[:at] + more + data[at + fewer :]
        return data[: int(kept * len(data))]

    data = st.sampled_from([path.read_bytes() for path in files])
    return st.builds(edit, data, EDITS, st.just(1.0) | st.floats(0, 1))


# Readers of files


class Reader(NamedTuple):
    """Reads a file with a name, whose valid content may be a JSON object `base`."""

    name: str
    read: Callable[[Path], object]
    base: Any = None
    more: Strategy = st.nothing()  # arbitrary inputs for this reader

    def write(self, state: Any) -> bytes:
        """Returns the file of a JSON object."""
        return json.dumps(state).encode()

    def damaged(self, damage: str) -> bytes:
        """Returns the content after the damage."""
        if damage.startswith("!"):
            return CONTENTS[damage[1:]]
        state = json.loads(json.dumps(self.base))
        field, _, value = damage.removeprefix("-").partition("=")
        *parents, key = field.split(".")
        place = state
        for parent in parents:
            place = place[int(parent) if isinstance(place, list) else parent]
        if damage.startswith("-"):
            del place[key]
        else:
            place[int(key) if isinstance(place, list) else key] = json.loads(value)
        return self.write(state)

    def inputs(self) -> Strategy:
        """Makes arbitrary files, and objects some of whose values are arbitrary."""
        made = st.binary() | JSON.map(json.dumps).map(str.encode) | self.more
        if not self.base:
            return made
        names = st.sampled_from(sorted(self.base))
        changes = st.dictionaries(names, JSON, max_size=3)
        return made | changes.map(lambda change: self.write({**self.base, **change}))


WORDS = {"kind": "word", "words": ["<eos>", "a"], **Lines()._asdict()}
CHARS = {"kind": "char", "of_bytes": False, "symbols": "ab c\n"}
LEVEL = {"type": "WordLevel", "unk_token": "a", "vocab": {"a": 0, "<eos>": 1}}
SUBWORDS = {"kind": "subword", "tokenizer": {"model": LEVEL}}
COUNTS = dict.fromkeys(("tokens", "bytes", "original_bytes", "words", "lines"), 4)
SPLITS = {name: {**COUNTS, "sha256": "x"} for name in ("train", "valid", "test")}
# The SHA-256 of the vocabulary of bytes.
BYTES = "b187eab71b22fd830df3c3b77a22a49b1b23df2813f3a562266340769496748d"
MANIFEST = {"splits": SPLITS, "files": {"vocab.json": BYTES}}
CHECKSUM = "float32", (3,), "0" * 16
SAVED = manifest.Manifest(3, Position(0, 1, 2), 1.5, {"params/a": CHECKSUM})
RECORD: dict[str, Any] = json.loads(json.dumps(SAVED.to_json()))
CONFIG = json.loads(json.dumps(dataclasses.asdict(configs.Config())))
RUN = {"config": CONFIG, "data": {"splits": {}}, "starts": [{}]}
ROW = table.row_config("wt103_128m", {"train.num_steps": 40})
LOSSES = {str(length): 1.0 for length in table.lengths(ROW)}
FINISHED = {"asked": table.identity(ROW), "nll_nats": LOSSES}
MODEL, WEIGHTS = saved_case("div_val_2")
TENSORFLOW = RECORDED.parent / "tensorflow_checkpoints" / "wt103"


def read_tokens(path: Path) -> object:
    """Opens prepared tokens with the file as their manifest."""
    vocabulary.save(ByteVocab(), path.with_name("vocab.json"))
    for name in SPLITS:
        path.with_name(f"{name}.bin").write_bytes(b"text")
    return tokens.load(path.parent)


def read_record(path: Path) -> None:
    """Reads the manifest of a checkpoint and compares its arrays with the model's."""
    result = manifest.read_manifest(path.parents[1], 3)
    manifest.check_arrays(result, {"params": {"a": np.zeros(3, np.float32)}})


def read_vocab(path: Path) -> None:
    """Reads a saved vocabulary and uses it."""
    vocab = vocabulary.load(path)
    for text in ("a b\nc", "\0é😀", ""):
        try:
            vocab.decode(vocab.encode(text))
        except UserError:  # a character is not in the vocabulary
            pass
    vocab.decode(range(len(vocab)))


def read_numbers(path: Path) -> None:
    """Reads a saved vocabulary of numbers and uses it."""
    vocab = vocabulary.load(path)
    vocab.decode(range(min(len(vocab), 9)))


def read_lengths(path: Path) -> object:
    """Reads the result of a row."""

    def train(row: configs.Config, workdir: Path) -> NoReturn:
        raise UserError(f"{workdir} is not finished")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(table, "plan", train)
        return table.run_once(ROW, path.parent)


def read_model(path: Path) -> object:
    """Imports a Hugging Face folder that has the file, and valid other files."""
    if not (config := path.with_name("config.json")).exists():
        config.write_text(json.dumps(MODEL))
    if not (weights := path.with_name("model.safetensors")).exists():
        safetensors.numpy.save_file(WEIGHTS, weights)
    return huggingface.from_pretrained(path.parent)


def read_tensorflow(path: Path) -> object:
    """Imports a TensorFlow checkpoint with the file as its index."""
    for data in TENSORFLOW.glob("*.data*"):
        shutil.copy(data, path.parent)
    return tensorflow.read_checkpoint(path.with_suffix(""), mem_len=2)


def read_words(path: Path) -> object:
    """Reads a list of words, as data.vocab_path names it."""
    return vocabulary.read_file(path, WordVocab)


def read_text(path: Path) -> object:
    """Reads a user's text, as `prepare` does."""
    (scratch := path.with_name("scratch")).mkdir(exist_ok=True)
    return files.split_text(str(path), scratch)


READERS: dict[str, Reader] = {
    "words": Reader("vocab.json", read_vocab, WORDS),
    "characters": Reader("vocab.json", read_vocab, CHARS),
    "subwords": Reader("vocab.json", read_vocab, SUBWORDS),
    "numbers": Reader("vocab.json", read_numbers, {"kind": "number", "size": 9}),
    "data.vocab_path": Reader("w.json", read_words),
    "list of words": Reader("w.txt", read_words, more=edited(Path(__file__))),
    "imported words": Reader("vocab.txt", formats.read_vocab),
    "imported pickle": Reader(
        "vocab.bin", formats.read_vocab, more=edited(*sorted(RECORDED.glob("*.pkl")))
    ),
    "manifest": Reader("manifest.json", read_tokens, MANIFEST),
    "record": Reader("record/metadata", read_record, RECORD),
    "config.json": Reader("config.json", configs.load_json, CONFIG),
    "run.json": Reader(
        "run.json",
        lambda x: run_record.check_trainable(x.parent, configs.Config()),
        RUN,
    ),
    "metrics.jsonl": Reader(
        "metrics.jsonl",
        read_metrics,
        more=st.fixed_dictionaries({"step": JSON, "exact": JSON}).map(_encode),
    ),
    "lengths.json": Reader("lengths.json", read_lengths, FINISHED),
    "Hugging Face": Reader(
        "config.json", read_model, {**huggingface.DEFAULTS, **MODEL}
    ),
    "safetensors": Reader("model.safetensors", read_model),
    "prompts": Reader(
        "p.txt",
        lambda x: texts.read_prompts(GenerateConfig(prompt=f"@{x}"), ByteVocab()),
    ),
    "text": Reader("text.txt", read_text),
    "text.gz": Reader("text.gz", read_text),
    "text.bz2": Reader("text.bz2", read_text),
    "text.xz": Reader("text.xz", read_text),
    "state dict": Reader(
        "model.pt",
        lambda x: pytorch.arrays(pickle.read_pickle(x), x),
        more=edited(*sorted(RECORDED.glob("*.pt")))
        | st.binary(min_size=1).map(lambda data: b"\x80\x02" + data + b"."),
    ),
    "TensorFlow": Reader(
        "ckpt-0.index", read_tensorflow, more=edited(TENSORFLOW / "ckpt-0.index")
    ),
}

CONTENTS: dict[str, bytes] = {
    "nothing": b"",
    "half": b"{",
    "number": b"3",
    "text": b'"model"',
    "null": b"null",
    "list": b"[]",
    "deep list": b"[" * 100_000,
    "deep object": b'{"a":' * 100_000,
    "long number": b"1" * 5000,
    "long line": b"<unk>\n" + b"x" * 10**6,
    "Latin-1": b'{"a": "caf\xe9"}',
    "UTF-16": '{"kind": "byte"}'.encode("utf-16"),
    "a byte-order mark": b'\xef\xbb\xbf{"kind": "byte"}',
    "garbage": bytes(range(256)) * 4,
    "fake": b"no compressed text\n",
    "bomb": gzip.compress(bytes(20_000_000)),
    "no tokens": b'{"model":{"type":"BPE","vocab":{},"merges":[]}}',
    "no end of line": b'{"model":{"type":"WordLevel","unk_token":"a","vocab":{"a":0}}}',
    "no unknown": b'{"model":{"type":"WordLevel","unk_token":"b","vocab":{"a":0}}}',
    "int64": safetensors.numpy.save({k: x.astype(int) for k, x in WEIGHTS.items()}),
    "extra tensor": safetensors.numpy.save(WEIGHTS | {"\x1b[2Jmore": np.zeros(1)}),
    "cut tensors": safetensors.numpy.save(WEIGHTS)[:-1],
}


# Readers of values


def find_texts(text: str, path: Path) -> object:
    """Looks for texts in an empty folder."""
    return files.text_files(text and str(path.with_name(text)), "score.path")


VALUES: dict[str, Callable[[str, Path], object]] = {
    "topology": lambda text, _: lower.find_slices(text),
    "two slices": lambda text, _: lower.find_slices(text, 2),
    "mode": lambda text, _: flags.parse(f"--mode={text}".split(" ")),
    "path": find_texts,
}


@pytest.mark.parametrize("reader, damage, part", ROWS, ids=str)
def test_damage_is_refused_in_one_line(
    reader: str, damage: str, part: str, tmp_path: Path
) -> None:
    if known := READERS.get(reader):
        path = tmp_path / "input" / known.name
        path.parent.mkdir(parents=True)
        if damage == "broken":
            path.symlink_to("/no/where")
        elif damage == "folder":
            path.mkdir()
        else:
            path.write_bytes(known.damaged(damage))
        before = contents(tmp_path)
        error = refusal(known.read, path)
        assert before.items() <= contents(tmp_path).items()
    else:
        error = refusal(VALUES[reader], damage, tmp_path / "file")
    assert part in error and len(error) < 950


def read_file(reader: Reader) -> Callable[[Path, bytes], object]:
    """Returns a function that reads bytes as the reader's file in a folder."""

    def read(folder: Path, data: bytes) -> object:
        path = folder / reader.name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        return reader.read(path)

    return read


def stream(_: Path, blocks: list[bytes]) -> None:
    """Text in blocks is valid UTF-8 and comes back, or is refused."""
    whole = b"".join(blocks)
    assert b"".join(bytes(part) for part in code_points(blocks, "it", True)) == whole
    for pieces in (streaming.characters, streaming.words, streaming.lines):
        try:
            assert "".join(pieces(iter(blocks), "it")).encode() == whole
        except UserError:
            with pytest.raises(UnicodeDecodeError):
                whole.decode()
    meter = streaming.Meter()
    assert b"".join(meter.measure(blocks)) == whole and meter.words <= len(whole)
    chars = CharVocab.count([code_points(blocks, "it", False)], False)
    tokens = [*chars.stream(blocks, "it")]
    joined = chars.decode(np.concatenate([*tokens, np.zeros(0, np.uint8)]))
    assert encode(joined) == whole
    for line in Lines().stream(blocks, "it"):
        WordVocab.choose(dict.fromkeys(line, 1))


TEXTS = st.text(max_size=30) | NUMBERS.map(str)
FLAGS = st.builds("--{}={}".format, NAMES, st.text(max_size=9))
FLAGS |= st.builds("--config.{}={}".format, NAMES, NUMBERS) | st.text(max_size=20)
ARBITRARY: dict[str, tuple[Callable[[Path, Any], object], Strategy]] = {
    "flags": (
        lambda folder, argv: flags.parse([f"--workdir={folder}/none", *argv]),
        st.lists(FLAGS, max_size=4),
    ),
    "blocks": (
        stream,
        st.lists(st.binary(max_size=30) | TEXTS.map(encode), max_size=5),
    ),
    **{name: (read_file(reader), reader.inputs()) for name, reader in READERS.items()},
}


@pytest.mark.parametrize("examples", [FEW, pytest.param(MANY, marks=pytest.mark.long)])
@pytest.mark.parametrize("kind", ARBITRARY)
def test_valid_input_is_read_and_any_other_is_read_or_refused_in_one_line(
    kind: str, examples: int, tmp_path: Path
) -> None:
    """Time and memory are bounded."""
    read, inputs = ARBITRARY[kind]
    if kind in READERS and (base := READERS[kind].base):
        read(tmp_path, READERS[kind].write(base))

    def check(value: Any) -> None:
        try:
            read(tmp_path, value)
        except UserError as error:
            assert str(error) and "\n" not in str(error)

    run = settings(
        max_examples=examples,
        derandomize=True,
        database=None,
        deadline=None,
        phases=[Phase.generate, Phase.shrink],
        suppress_health_check=list(HealthCheck),
    )
    before = resource.getrusage(resource.RUSAGE_SELF)
    run(given(inputs)(check))()
    after = resource.getrusage(resource.RUSAGE_SELF)
    assert after.ru_utime - before.ru_utime < SECONDS * examples
    assert (after.ru_maxrss - before.ru_maxrss) / 1024 < MEGABYTES
