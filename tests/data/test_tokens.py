"""Token files are exact, appear whole or not at all, and are refused when damaged."""

import gzip
import hashlib
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.refusal import refused
from tests.support.store import Store, let_pass, remote, shared_store, store
from txl_jax.data import corpora
from txl_jax.data.files import split_stdlib
from txl_jax.data.options import SPLITS, DataConfig
from txl_jax.data.tokens import Tokens, prepare

FIXTURES = remote, shared_store, store

LINES = b"".join(b"%d bottles of beer on the wall\n" % n for n in range(40_000))


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A text of 1.2 MB: two blocks of TFDS, cut 90/5/5."""
    path = tmp_path_factory.mktemp("text") / "beer.txt"
    path.write_bytes(LINES)
    return path


@pytest.mark.parametrize("vocab", ["char", "word"])
@pytest.mark.parametrize(
    "name, start, place",
    [
        ("b.txt", "ok\n", "b.txt is not UTF-8 at byte 3"),
        ("b.txt", "\ufeffok\n", "b.txt is not UTF-8 at byte 6"),
        ("b.txt.gz", "ok\n", "b.txt.gz, unpacked, is not UTF-8 at byte 3"),
    ],
)
def test_the_file_that_is_not_utf8_is_named(
    name: str, start: str, place: str, vocab: str, tmp_path: Path
) -> None:
    (folder := tmp_path / "text").mkdir()
    for other in "ac":
        (folder / f"{other}.txt").write_bytes(LINES)
    data = start.encode() + b"\xff\n"
    packed = gzip.compress(data) if name.endswith(".gz") else data
    (folder / name).write_bytes(packed)
    with refused(place):
        prepare(DataConfig("text", str(folder), str(tmp_path), vocab))


@pytest.fixture(scope="module")
def prepared(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data_dir in which `text` is prepared."""
    data_dir = tmp_path_factory.mktemp("prepared")
    prepare(DataConfig("text", str(text), str(data_dir)))
    return data_dir


def joined(made: Tokens) -> bytes:
    return b"".join(made.split(name).tobytes() for name in SPLITS)


def test_stdlib_tokens_are_the_bytes_of_the_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = DataConfig(data_dir=str(tmp_path))
    made, source = prepare(config), corpora.find_source(config, tmp_path)
    output = capsys.readouterr()
    assert made.folder.parent == tmp_path / "txl_jax" / source.name / "1.0.0"
    entries = [made.manifest[key] for key in ("corpus", "edition", "vocab", "dtype")]
    assert entries == ["stdlib", source.edition, "byte", "uint8"]
    for split, pieces in split_stdlib().items():
        expected = b"".join(piece.path.read_bytes() for piece in pieces)
        array, entry = made.split(split), made.manifest["splits"][split]
        assert isinstance(array, np.memmap) and not array.flags.writeable
        assert array.dtype == np.uint8 and array.tobytes() == expected
        assert entry["tokens"] == entry["bytes"] == len(expected)
        assert entry["sha256"] == hashlib.sha256(expected).hexdigest()
    assert not output.out
    assert all(line.startswith("data: ") for line in output.err.splitlines())
    assert prepare(config).manifest == made.manifest
    assert not capsys.readouterr().err


def test_default_data_dir_is_that_of_tfds(
    text: Path, prepared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TFDS_DATA_DIR", str(prepared))
    made = prepare(DataConfig("text", str(text)))
    assert joined(made) == LINES
    monkeypatch.delenv("TFDS_DATA_DIR")
    monkeypatch.setenv("HOME", str(prepared))
    (prepared / "tensorflow_datasets").symlink_to(prepared)
    assert prepare(DataConfig("text", str(text))).manifest == made.manifest


def test_concurrent_preparations_agree(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = DataConfig("text", str(text), str(tmp_path))
    with ThreadPoolExecutor(2) as pool:
        both = list(pool.map(lambda _: prepare(config), range(2)))
    assert both[0].manifest == both[1].manifest and joined(both[0]) == LINES
    assert capsys.readouterr().err.count("data: preparing") == 1


class Killed(BaseException):
    """Ends a preparation, as a signal would."""


@pytest.mark.parametrize(
    "vocab, moment",
    [
        ("byte", "txl_jax.data.vocab.CharVocab.stream"),
        ("word", "txl_jax.data.word.Lines.stream"),
        ("byte", "os.fsync"),
    ],
)
def test_a_killed_preparation_leaves_nothing_complete(
    vocab: str, moment: str, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next preparation repeats everything."""
    config = DataConfig("text", str(text), str(tmp_path), vocab)
    source = corpora.find_source(config, tmp_path)
    for name in ("incomplete.X1_1.0.0", "incomplete.unpacked"):  # made by TFDS
        (tmp_path / "txl_jax" / source.name / name).mkdir(parents=True)
    with monkeypatch.context() as patch, pytest.raises(Killed):

        def kill(*_: Any) -> None:
            patch.setattr(shutil, "rmtree", lambda *_, **__: None)  # no time is left
            raise Killed

        patch.setattr(moment, kill)
        prepare(config)
    assert list(tmp_path.rglob("*incomplete*"))
    folders = {path.parent for path in tmp_path.rglob("manifest.json")}
    assert all(folder.name.startswith(".incomplete-") for folder in folders)
    made = prepare(config)
    assert not list(tmp_path.rglob("*incomplete*"))
    decoded = "".join(made.vocab.decode(made.split(name)) for name in SPLITS)
    assert decoded.encode() == LINES


def test_a_flipped_bit_in_a_split_is_refused(
    text: Path, prepared: Path, tmp_path: Path
) -> None:
    """The file keeps its size, and the other splits are intact."""
    shutil.copytree(prepared / "txl_jax", tmp_path / "txl_jax")
    config = DataConfig("text", str(text), str(tmp_path))
    tokens = prepare(config)
    path = tokens.folder / "valid.bin"
    content = bytearray(path.read_bytes())
    content[7] ^= 1
    path.write_bytes(content)
    with refused(f"{path.name} has changed since it was"):
        tokens.split("valid")
    assert tokens.split("test").size > 10
    # Without a manifest, all splits are made again.
    (tokens.folder / "manifest.json").unlink()
    assert joined(prepare(config)) == LINES


def test_a_prepared_read_only_folder_is_used(
    text: Path, prepared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TFDS, whose import takes a second, is not needed."""

    def refuse(*_: Any, **__: Any) -> None:
        raise PermissionError(13, "Read-only file system")

    # File permissions would not stop root.
    monkeypatch.setattr(Path, "mkdir", refuse)
    with monkeypatch.context() as patch:
        patch.delattr("txl_jax.data.builder", raising=False)
        patch.setitem(sys.modules, "txl_jax.data.builder", None)
        made = prepare(DataConfig("text", str(text), str(prepared)))
        assert joined(made) == LINES
    with refused("Read-only file system.*set data.data_dir"):
        prepare(DataConfig("text", str(text), str(prepared / "other")))


def test_a_remote_data_dir_is_copied_once_per_host(
    store: Store,
    remote: str,
    text: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    config = DataConfig("text", str(text), remote, "word")

    def prepare_on(host: str) -> tuple[Tokens, list[str]]:
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / host))
        return prepare(config), capsys.readouterr().err.splitlines()

    # Without permissions, this host keeps its files and uploads them the next time.
    store.proxy.hook = lambda method, path: 403 if method == "POST" else None
    with refused(f"cannot write {remote}/.*Forbidden"):
        prepare_on("first")
    store.proxy.hook = let_pass
    capsys.readouterr()
    made, (line,) = prepare_on("first")
    assert line.startswith("data: copying /")
    stored = store.names(remote)
    assert len(stored) == 5 and all(x.endswith((".bin", ".json")) for x in stored)
    # Another host downloads them, without the corpus's blocks.
    again, (line,) = prepare_on("second")
    assert f"copying {remote}/" in line
    assert again.manifest == made.manifest and again.folder != made.folder
    assert (again.split("train") == made.split("train")).all()
    assert not prepare_on("second")[1]
    # A file that was damaged in transfer is refused, and nothing complete is left.
    (name,) = [name for name in stored if name.endswith("valid.bin")]
    data = store.read(f"{remote}/{name}")
    store.write(f"{remote}/{name}", bytes([data[0] ^ 1]) + data[1:])
    with refused(r"valid\.bin has SHA-256"):
        prepare_on("third")
    assert not list((tmp_path / "third").rglob("manifest.json"))
    store.proxy.hook = lambda method, path: 403
    with refused("cannot read.*Forbidden.*check the address and the permissions"):
        prepare_on("first")
