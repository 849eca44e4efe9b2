"""TFDS stores the bytes of a corpus exactly, in order, quietly, without TensorFlow."""

import json
import random
import shutil
from pathlib import Path

import pytest
import tensorflow_datasets as tfds

from tests.support.refusal import refused
from txl_jax.data import builder, corpora
from txl_jax.data.byte_ranges import blocks
from txl_jax.data.options import SPLITS


@pytest.fixture
def text(tmp_path: Path) -> Path:
    folder = tmp_path / "text"
    folder.mkdir()
    for seed, name in enumerate(("train.bin", "valid.bin", "test.bin")):
        (folder / name).write_bytes(random.Random(seed).randbytes(4001 - seed * 1999))
    return folder


def test_blocks_cross_shards_exactly(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(builder, "BLOCK_BYTES", 64)
    monkeypatch.setattr(builder, "SHARD_BYTES", 1000)  # no multiple of a block
    source = corpora.find("text", str(text))
    stored = builder.prepare(source, tmp_path)
    assert stored.info.splits["train"].num_shards == 5
    for split in SPLITS:
        parts, expected = list(builder.read(stored, split)), text / f"{split}.bin"
        assert b"".join(parts) == expected.read_bytes()
        assert max(map(len, parts)) == min(64, expected.stat().st_size)
    # TFDS reads the folder without this package.
    folder = tmp_path / "txl_jax" / source.config / source.corpus.version
    plain = tfds.builder_from_directory(folder).as_data_source("test")
    assert plain[0]["bytes"].tobytes() == (text / "test.bin").read_bytes()[:64]


def test_damaged_blocks_are_refused(text: Path, tmp_path: Path) -> None:
    source = corpora.find("text", str(text))
    folder = Path(builder.prepare(source, tmp_path).data_path)
    for name in ("*train*00000-of-*", "dataset_info.json"):
        (path,) = folder.glob(name)
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
        with refused("is damaged .*: delete it and prepare again"):
            list(builder.read(builder.prepare(source, tmp_path), "train"))


def test_full_disk_is_one_line(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fill(self: builder.CorpusBuilder) -> None:
        raise RuntimeError("write() failed: No space left on device\nand a trace")

    monkeypatch.setattr(builder.CorpusBuilder, "download_and_prepare", fill)
    with refused(r"No space left on device\): make room"):
        builder.prepare(corpora.find("text", str(text)), tmp_path)


class Poems(tfds.core.GeneratorBasedBuilder):
    """A text dataset as TFDS prepares one."""

    VERSION = tfds.core.Version("1.2.0")

    def _info(self) -> tfds.core.DatasetInfo:
        text = tfds.features.Text()
        return tfds.core.DatasetInfo(
            builder=self,
            disable_shuffling=True,
            features=tfds.features.FeaturesDict({"text": text, "title": text}),
        )

    def _split_generators(self, dl_manager: object) -> dict[str, object]:
        return {split: self._lines(split) for split in ("train", "validation", "test")}

    def _generate_examples(self) -> None:
        """Exists because the base class declares it abstract."""

    def _lines(self, split: str) -> object:
        for number in range(30):
            end = "\n" if number % 2 else ""
            yield number, {"text": f"{split} líne {number}{end}", "title": "no"}


@pytest.fixture(scope="module")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("shelf")
    Poems(data_dir=path, file_format="array_record").download_and_prepare()
    return path


def test_texts_of_a_tfds_dataset_are_joined(
    shelf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("txl_jax.data.dataset.READ_BYTES", 100)
    for name in ("poems", "poems:1.2.0"):
        source = corpora.find(f"tfds:{name}", data_dir=shelf)
        assert source.config.startswith("tfds-poems-1.2.0-")
    splits = source.split(tmp_path)
    for ours, theirs in {"train": "train", "valid": "validation"}.items():
        lines = [f"{theirs} líne {number}\n" for number in range(30)]
        assert b"".join(blocks(splits[ours], 99)) == "".join(lines).encode()


def test_other_tfds_datasets_are_refused_with_the_reason(
    shelf: Path, tmp_path: Path
) -> None:
    def refuse(name: str, message: str) -> None:
        with refused(message):
            corpora.find(f"tfds:{name}", data_dir=tmp_path).split(tmp_path)

    for version in ("1.2.0", "2.0.0"):
        shutil.copytree(shelf / "poems/1.2.0", tmp_path / "poems" / version)
    refuse("poems", "names poems/1.2.0, poems/2.0.0 in .*: give one as")
    path = tmp_path / "poems/2.0.0/dataset_info.json"
    info = json.loads(path.read_text())
    path.write_text(json.dumps(info | {"splits": info["splits"][:1]}))
    refuse("poems:2.0.0", "has the splits train, so valid, test is missing")
    features = tmp_path / "poems/1.2.0/features.json"
    both = features.read_text()
    features.write_text(both.replace('"text": {\n                "py', '"line": {"py'))
    refuse("poems:1.2.0", r"2 text features \(line, title\)")
