"""TFDS stores the bytes of a corpus exactly, in order, quietly, without TensorFlow."""

import random
import subprocess
import sys
from pathlib import Path

import pytest
import tensorflow_datasets as tfds

from txl_jax.data import builder, corpora
from txl_jax.errors import UserError

ROOT = Path(__file__).parents[2]


@pytest.fixture
def text(tmp_path: Path) -> Path:
    folder = tmp_path / "text"
    folder.mkdir()
    for seed, name in enumerate(("train.bin", "valid.bin", "test.bin")):
        (folder / name).write_bytes(random.Random(seed).randbytes(4001 - seed * 1999))
    return folder


def test_blocks_are_exact_over_shards(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(builder, "BLOCK_BYTES", 64)
    monkeypatch.setattr(builder, "SHARD_BYTES", 1000)  # no multiple of a block
    source = corpora.find("text", str(text))
    stored = builder.prepare(source, tmp_path)
    assert stored.info.splits["train"].num_shards == 5
    for split in corpora.SPLITS:
        got = list(builder.read(stored, split))
        assert b"".join(got) == (text / f"{split}.bin").read_bytes()
        assert max(map(len, got)) == min(64, (text / f"{split}.bin").stat().st_size)
    again = builder.prepare(source, tmp_path)
    assert list(builder.read(again, "train")) == list(builder.read(stored, "train"))


def test_blocks_are_plain_tfds(text: Path, tmp_path: Path) -> None:
    source = corpora.find("text", str(text))
    stored = builder.prepare(source, tmp_path)
    folder = tmp_path / "txl_jax" / source.config / "1.0.0"
    assert stored.data_path == folder
    blocks = tfds.builder_from_directory(folder).as_data_source("test")
    assert len(blocks) == 1
    assert blocks[0]["bytes"].tobytes() == (text / "test.bin").read_bytes()


def test_stdlib_is_stored_quietly_without_tensorflow(tmp_path: Path) -> None:
    code = f"""
import sys
from pathlib import Path
from txl_jax.data import builder, corpora
source = corpora.find("stdlib")
stored = builder.prepare(source, Path({str(tmp_path)!r}))
for split, pieces in source.splits.items():
    expected = b"".join(piece.path.read_bytes() for piece in pieces)
    assert b"".join(builder.read(stored, split)) == expected
assert "tensorflow" not in sys.modules
"""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.parametrize("damage", ["train*00000-of-*", "dataset_info.json"])
def test_damaged_blocks_are_refused(text: Path, tmp_path: Path, damage: str) -> None:
    source = corpora.find("text", str(text))
    folder = builder.prepare(source, tmp_path).data_path
    (victim,) = Path(folder).glob(f"*{damage}")
    victim.write_bytes(victim.read_bytes()[: victim.stat().st_size // 2])
    with pytest.raises(UserError, match="is damaged .*: delete it and prepare again"):
        list(builder.read(builder.prepare(source, tmp_path), "train"))


def test_full_disk_is_one_line(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fill(self: builder.CorpusBuilder) -> None:
        raise RuntimeError("write() failed: No space left on device\nand a trace")

    monkeypatch.setattr(builder.CorpusBuilder, "download_and_prepare", fill)
    with pytest.raises(UserError, match=r"No space left on device\): make room"):
        builder.prepare(corpora.find("text", str(text)), tmp_path)
