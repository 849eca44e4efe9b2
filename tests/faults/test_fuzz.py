"""Whatever a file or a flag holds, it is read or refused in one line: nothing else.

Hypothesis makes the inputs: a few here, the same ones each time, and with
`pytest -m long tests/faults/test_fuzz.py` thousands of each kind. None may raise
anything but UserError, take long or much memory.
"""

import json
import resource
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.convert import bundles
from tests.convert.test_huggingface import folder_of
from tests.convert.test_pickle import RECORDED
from tests.faults import hostile
from txl_jax import config as configs
from txl_jax.checkpoint import manifest
from txl_jax.cli import flags
from txl_jax.convert import huggingface, keys, pickle, tensorflow, words
from txl_jax.data import text as texts
from txl_jax.data import vocab as vocabulary
from txl_jax.data.vocab import CharVocab, code_points
from txl_jax.data.word import Lines, WordVocab
from txl_jax.errors import UserError
from txl_jax.report import log
from txl_jax.report.checksum import with_checksum

pytestmark = pytest.mark.promise("User errors are one line")

FEW, MANY = 25, 2000
SECONDS = 20  # that one input may take, on a machine that does much else
MEGABYTES = 300  # that all inputs of a kind may add to what the process ever held

NUMBERS = st.integers() | st.integers(-2, 300) | st.floats() | st.just(2**70)
NAMES = st.sampled_from(sorted(configs.FIELDS)) | st.text(max_size=9)
PLAIN = st.none() | st.booleans() | NUMBERS | st.text(max_size=20)
JSON: st.SearchStrategy[Any] = st.recursive(
    PLAIN,
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


def encode(value: Any) -> bytes:
    """Returns JSON, or the bytes of a text with whatever surrogates."""
    text = value if isinstance(value, str) else json.dumps(value)
    return text.encode("utf-8", "surrogatepass")


def edited(*files: Path) -> st.SearchStrategy[bytes]:
    """Makes one of the files with a few places changed, longer or shorter; or cut."""
    contents = [path.read_bytes() for path in files]

    def edit(data: bytes, edits: list[tuple[float, bytes, int]], kept: float) -> bytes:
        for place, more, fewer in edits:
            at = int(place * len(data))
            data = data[:at] + more + data[at + fewer :]
        return data[: int(kept * len(data))]

    kept = st.just(1.0) | st.floats(0, 1)
    return st.builds(edit, st.sampled_from(contents), EDITS, kept)


def like(state: dict[str, Any]) -> st.SearchStrategy[dict[str, Any]]:
    """Makes an object with the keys of another, some of whose values are anything."""
    changes = st.dictionaries(st.sampled_from(sorted(state)), JSON, max_size=3)
    return st.builds(lambda change: {**state, **change}, changes)


def checksummed(state: dict[str, Any]) -> st.SearchStrategy[bytes]:
    """Makes JSON files of objects like `state`, with the right checksum."""
    return like(state).map(lambda state: encode(with_checksum(state)))


# Readers, each with its inputs

Read = Callable[[Path, Any], None]
READERS: dict[Read, st.SearchStrategy[Any]] = {}


def reads(inputs: st.SearchStrategy[Any]) -> Callable[[Read], Read]:
    """Registers a reader of the inputs."""

    def register(read: Read) -> Read:
        READERS[read] = inputs
        return read

    return register


TEXTS = st.text(max_size=30) | NUMBERS.map(str)


FLAGS = st.builds("--{}={}".format, NAMES, st.text(max_size=9))
FIELDS = st.builds("--config.{}={}".format, NAMES, NUMBERS)


@reads(st.lists(st.text(max_size=20) | FLAGS | FIELDS, max_size=4))
def command_line(folder: Path, argv: list[str]) -> None:
    flags.parse([f"--workdir={folder}/none", *argv])


@reads(JSON.map(encode) | checksummed(hostile.CONFIG) | edited(Path(__file__)))
def config(folder: Path, data: bytes) -> None:
    (folder / "config.json").write_bytes(data)
    configs.parse(configs.load_json(folder / "config.json"))


@reads(checksummed(hostile.RECORD) | JSON.map(encode))
def record(folder: Path, data: bytes) -> None:
    (folder / "record").mkdir(exist_ok=True)
    (folder / "record" / "metadata").write_bytes(data)
    result = manifest.read(folder, 3)
    assert result.rank is None or result.rank <= (np.inf, 0)
    manifest.check_arrays(result, {"params": {"a": np.zeros(3, np.float32)}})


VOCABULARIES: list[dict[str, Any]] = [
    {"kind": "byte"},
    hostile.CHARS,
    {"kind": "char", "of_bytes": True, "symbols": "ab\xff"},
    hostile.WORDS,
    {"kind": "subword", "tokenizer": {"model": {"type": "BPE"}}},
    hostile.PIECES,
]


@reads(JSON.map(encode) | st.sampled_from(VOCABULARIES).flatmap(checksummed))
def saved_vocabulary(folder: Path, data: bytes) -> None:
    (folder / "vocab.json").write_bytes(data)
    vocab = vocabulary.load(folder / "vocab.json")
    for text in ("a b\nc", "\0é😀", ""):
        try:
            vocab.decode(vocab.encode(text))
        except UserError:
            pass
    vocab.decode(range(len(vocab)))


@reads(
    st.tuples(
        st.sampled_from([".txt", ".json", ".model", ""]),
        st.binary() | JSON.map(encode) | edited(Path(__file__)),
    )
)
def users_vocabulary(folder: Path, file: tuple[str, bytes]) -> None:
    suffix, data = file
    path = folder / f"words{suffix}"
    path.write_bytes(data)
    is_text = suffix == ".txt"
    vocab = words.read(path) if is_text else vocabulary.read(path, WordVocab)
    vocab.decode(vocab.encode(""))


@reads(st.lists(st.binary(max_size=30) | TEXTS.map(encode), max_size=5))
def text(folder: Path, blocks: list[bytes]) -> None:
    whole = b"".join(blocks)
    assert b"".join(bytes(part) for part in code_points(blocks, "it", True)) == whole
    for pieces in (texts.characters, texts.words, texts.lines):
        try:
            assert "".join(pieces(iter(blocks), "it")).encode() == whole
        except UserError:
            with pytest.raises(UnicodeDecodeError):
                whole.decode()
    meter = texts.Meter()
    assert b"".join(meter.read(blocks)) == whole and meter.words <= len(whole)
    chars = CharVocab.count([code_points(blocks, "it", False)], False)
    tokens = [*chars.stream(blocks, "it")]
    joined = chars.decode(np.concatenate([*tokens, np.zeros(0, np.uint8)]))
    assert encode(joined) == whole
    for line in Lines().stream(blocks, "it"):
        WordVocab.choose(dict.fromkeys(line, 1))


PORT = {**huggingface.DEFAULTS, "model_type": "transfo-xl", "tie_projs": [False]}


@reads((like(PORT) | JSON).map(encode) | st.binary())
def huggingface_config(folder: Path, data: bytes) -> None:
    if not (folder / "config.json").exists():
        folder_of(folder)
    (folder / "config.json").write_bytes(data)
    huggingface.from_pretrained(folder)


@reads(edited(*sorted(RECORDED.glob("*.zip.pt"))[:1]) | st.binary())
def huggingface_weights(folder: Path, data: bytes) -> None:
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(data)
    huggingface.from_pretrained(folder)


TENSORFLOW = RECORDED.parent / "tensorflow_checkpoints" / "wt103"


def rewritten() -> st.SearchStrategy[bytes]:
    """Makes a checkpoint's index with right checksums over wrong entries."""
    with np.load(TENSORFLOW.with_suffix(".npz")) as saved:
        names = [str(name).encode() for name in saved["names"]]
    head = bundles.field(1, 1) + bundles.field(3, bundles.field(1, 1))

    def make(entries: dict[bytes, tuple[int, list[int], int, int, bytes]]) -> bytes:
        records = [(b"", head)]
        for name, (kind, shape, offset, size, more) in sorted(entries.items()):
            sizes = b"".join(bundles.field(2, bundles.field(1, n)) for n in shape)
            entry = bundles.field(1, kind) + bundles.field(2, sizes)
            entry += bundles.field(4, offset) + bundles.field(5, size) + more
            records.append((name, entry))
        return bundles.table(records)

    number = st.integers(0, 2**63) | st.integers(0, 40)
    entry = st.tuples(
        st.sampled_from([1, 1, 3, 9, 14, 77]),
        st.lists(number, max_size=3),
        *(number, number, st.binary(max_size=5)),
    )
    return st.builds(make, st.dictionaries(st.sampled_from(names), entry, max_size=9))


@reads(edited(TENSORFLOW / "ckpt-0.index") | rewritten())
def tensorflow_index(folder: Path, data: bytes) -> None:
    if not (folder / "ckpt-0.index").exists():
        shutil.copytree(TENSORFLOW, folder, dirs_exist_ok=True)
    (folder / "ckpt-0.index").write_bytes(data)
    tensorflow.read(folder / "ckpt-0", mem_len=2)


@reads(
    edited(*sorted(RECORDED.glob("*.p*")))
    | st.binary()
    | st.binary(min_size=1).map(lambda data: b"\x80\x02" + data + b".")
)
def pickled(folder: Path, data: bytes) -> None:
    path = folder / "model.pt"
    path.write_bytes(data)
    value = pickle.read(path)
    for read in (keys.arrays, words.from_pickle):
        try:
            read(value, path)
        except UserError:
            pass


@reads(
    st.lists(JSON.map(json.dumps) | st.text(max_size=9), max_size=4)
    | st.lists(like({"step": 1, "exact": {}}).map(lambda x: log.encode(x).decode()))
)
def metrics(folder: Path, lines: list[str]) -> None:
    (folder / "metrics.jsonl").write_bytes(encode("\n".join(lines)))
    assert log.last_step(folder / "metrics.jsonl") >= 0


@pytest.mark.parametrize("examples", [FEW, pytest.param(MANY, marks=pytest.mark.long)])
@pytest.mark.parametrize("read", READERS, ids=lambda read: read.__name__)
def test_any_input_is_read_or_refused_in_one_line(
    read: Read, examples: int, tmp_path: Path
) -> None:
    def check(value: Any) -> None:
        try:
            read(tmp_path, value)
        except UserError as error:
            assert str(error) and "\n" not in str(error)

    run = settings(
        max_examples=examples,
        derandomize=True,
        database=None,
        deadline=SECONDS * 1000,
        phases=[Phase.generate, Phase.shrink],
        suppress_health_check=list(HealthCheck),
    )
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    run(given(READERS[read])(check))()
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert (after - before) / 1024 < MEGABYTES
