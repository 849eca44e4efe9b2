"""Token files are exact, appear whole or not at all, and are refused when damaged."""

import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from filelock import FileLock

from txl_jax.data import corpora
from txl_jax.data.tokens import DataConfig, prepare
from txl_jax.errors import UserError

ROOT = Path(__file__).parents[2]
LINES = b"".join(b"%d bottles of beer on the wall\n" % n for n in range(80_000))

RUN = """
import os, sys
from txl_jax.data import tokens
path, data_dir = sys.argv[1:]
config = tokens.DataConfig(corpus="text", path=path, data_dir=data_dir)
"""


def start(code: str, *args: str | Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-W", "error", "-c", RUN + code, *map(str, args)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Holds 2.5 MB: three blocks of TFDS, cut 90/5/5."""
    path = tmp_path_factory.mktemp("text") / "beer.txt"
    path.write_bytes(LINES)
    return path


@pytest.fixture(scope="module")
def prepared(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Holds a data_dir in which `text` is prepared."""
    data_dir = tmp_path_factory.mktemp("prepared")
    prepare(DataConfig("text", str(text), str(data_dir)), say=lambda _: None)
    return data_dir


def test_stdlib_tokens_are_the_files(tmp_path: Path) -> None:
    said: list[str] = []
    made = prepare(DataConfig(data_dir=str(tmp_path)), said.append)
    source = corpora.find("stdlib")
    assert made.folder == tmp_path / "txl_jax" / source.config / "1.0.0" / "byte"
    assert made.manifest["corpus"] == "stdlib"
    assert made.manifest["edition"] == source.edition
    assert (made.manifest["vocab"], made.manifest["dtype"]) == ("byte", "uint8")
    for split, pieces in source.splits.items():
        expected = b"".join(piece.path.read_bytes() for piece in pieces)
        array = made.split(split)
        assert isinstance(array, np.memmap) and not array.flags.writeable
        assert array.dtype == np.uint8 and array.tobytes() == expected
        entry = made.manifest["splits"][split]
        assert entry["tokens"] == entry["bytes"] == len(expected)
        assert entry["sha256"] == hashlib.sha256(expected).hexdigest()
    assert len(said) == 2 and "preparing" in said[0] and "tokens in" in said[1]
    assert (
        prepare(DataConfig(data_dir=str(tmp_path)), said.append).manifest
        == made.manifest
    )
    assert len(said) == 2


def test_default_data_dir_is_that_of_tfds(
    text: Path, prepared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TFDS_DATA_DIR", str(prepared))
    made = prepare(DataConfig("text", str(text)))
    assert b"".join(made.split(name).tobytes() for name in corpora.SPLITS) == LINES
    monkeypatch.delenv("TFDS_DATA_DIR")
    monkeypatch.setenv("HOME", str(prepared))
    (prepared / "tensorflow_datasets").symlink_to(prepared)
    assert prepare(DataConfig("text", str(text))).manifest == made.manifest


def test_reuse_needs_no_tfds_and_a_changed_text_is_made_again(
    text: Path, prepared: Path, tmp_path: Path
) -> None:
    code = "tokens.prepare(config); assert 'tensorflow_datasets' not in sys.modules"
    process = start(code, text, prepared)
    assert process.communicate() == ("", "") and process.returncode == 0
    copy = tmp_path / "copy.txt"
    shutil.copy(text, copy)
    config = DataConfig("text", str(copy), str(prepared))
    first = prepare(config, say=lambda _: None)
    copy.write_bytes(b"other\n" + LINES)
    second = prepare(config, say=lambda _: None)
    assert first.folder != second.folder
    assert second.split("train")[:6].tobytes() == b"other\n"


def test_two_processes_prepare_the_same(text: Path, tmp_path: Path) -> None:
    code = "print(tokens.prepare(config).manifest)"
    both = [start(code, text, tmp_path) for _ in range(2)]
    outputs = [process.communicate() for process in both]
    assert [process.returncode for process in both] == [0, 0], outputs
    assert outputs[0][0] == outputs[1][0] != ""
    # One of them made it, whether or not the other came early enough to wait.
    assert sum("data: preparing" in error for _, error in outputs) == 1


def test_waiting_for_the_lock_is_said(
    text: Path, tmp_path: Path, prepared: Path
) -> None:
    config = DataConfig("text", str(text), str(tmp_path))
    name = corpora.find("text", str(text)).config
    lock = FileLock(tmp_path / "txl_jax" / f"{name}.lock")
    (tmp_path / "txl_jax").mkdir()
    lock.acquire()
    said: list[str] = []

    def say(line: str) -> None:
        # The other process finishes its work while this one waits.
        said.append(line)
        shutil.copytree(prepared / "txl_jax" / name, tmp_path / "txl_jax" / name)
        lock.release()

    assert len(prepare(config, say).split("train")) > 0
    assert said == [f"data: waiting for another process that prepares {name}"]


KILLS = {
    "while TFDS writes": """
from txl_jax.data import corpora
blocks = corpora.blocks
def kill(pieces, size):
    for number, block in enumerate(blocks(pieces, size)):
        if size == 1 << 20 and number == 1 and len(block) == size:
            os._exit(9)
        yield block
# The search for line ends reads less than a block, so it lives on.
corpora.blocks = kill
""",
    "while tokens are written": """
from txl_jax.data.vocab import ByteVocab
count = 0
def kill(self, text, encode=ByteVocab.encode):
    global count
    count += 1
    return encode(self, text) if count < 3 else os._exit(9)
ByteVocab.encode = kill
""",
    "before the rename": """
import pathlib
rename = pathlib.Path.rename
def kill(self, target):
    return os._exit(9) if self.name == "byte.incomplete" else rename(self, target)
pathlib.Path.rename = kill
""",
}


@pytest.mark.parametrize("moment", KILLS)
def test_killed_preparation_leaves_nothing_complete(
    text: Path, prepared: Path, tmp_path: Path, moment: str
) -> None:
    process = start(KILLS[moment] + "tokens.prepare(config)", text, tmp_path)
    process.communicate()
    assert process.returncode == 9
    assert list(tmp_path.rglob("*incomplete*"))
    assert not list(tmp_path.rglob("byte"))
    made = prepare(DataConfig("text", str(text), str(tmp_path)), say=lambda _: None)
    assert not list(tmp_path.rglob("*incomplete*"))
    expected = prepare(DataConfig("text", str(text), str(prepared)))
    assert made.manifest == expected.manifest
    assert b"".join(made.split(name).tobytes() for name in corpora.SPLITS) == LINES


def truncate(folder: Path) -> None:
    os.truncate(folder / "valid.bin", 10)


def remove(folder: Path) -> None:
    (folder / "test.bin").unlink()


def garble(folder: Path) -> None:
    (folder / "manifest.json").write_text("{")


def empty(folder: Path) -> None:
    (folder / "manifest.json").write_text("[]")


def forget(folder: Path) -> None:
    manifest = json.loads((folder / "manifest.json").read_text())
    del manifest["splits"]["test"]
    (folder / "manifest.json").write_text(json.dumps(manifest))


@pytest.mark.parametrize("damage", [truncate, remove, garble, empty, forget])
def test_damaged_tokens_are_refused(
    text: Path, prepared: Path, tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    shutil.copytree(prepared / "txl_jax", tmp_path / "txl_jax")
    config = DataConfig("text", str(text), str(tmp_path))
    folder = prepare(config).folder
    damage(folder)
    with pytest.raises(
        UserError, match="delete the folder and prepare again"
    ) as caught:
        prepare(config)
    assert str(folder) in str(caught.value)
    shutil.rmtree(folder)
    assert prepare(config, say=lambda _: None).split("valid").size > 10


def test_tokens_without_a_manifest_are_made_again(
    text: Path, prepared: Path, tmp_path: Path
) -> None:
    shutil.copytree(prepared / "txl_jax", tmp_path / "txl_jax")
    config = DataConfig("text", str(text), str(tmp_path))
    (prepare(config).folder / "manifest.json").unlink()
    assert prepare(config, say=lambda _: None).manifest["corpus"] == "text"


def test_config_that_cannot_work_is_refused(
    text: Path, prepared: Path, tmp_path: Path
) -> None:
    file = tmp_path / "file"
    file.write_text("in the way")
    cases = {
        DataConfig(corpus="txt"): "data.corpus='txt' is unknown, did you mean 'text'",
        DataConfig(vocab="bite"): "vocabulary 'bite' is unknown, did you mean 'byte'",
        DataConfig(data_dir=str(file)): "cannot write .*file.* set data.data_dir",
        DataConfig(data_dir="/proc/nope"): "cannot write /proc/nope",
        DataConfig(data_dir="gs://bucket"): "'gs://bucket' is not a local folder",
    }
    for config, message in cases.items():
        with pytest.raises(UserError, match=message) as caught:
            prepare(config)
        assert "\n" not in str(caught.value)
    made = prepare(DataConfig("text", str(text), str(prepared)))
    with pytest.raises(UserError, match="'tests' is unknown, did you mean 'test'"):
        made.split("tests")
