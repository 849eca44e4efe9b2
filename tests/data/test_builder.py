"""TFDS stores the bytes of a corpus exactly, in order, quietly, without TensorFlow."""

import json
import random
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import tensorflow_datasets as tfds

from tests.data import miniatures
from tests.support.refusal import refused
from txl_jax.data import builder, catalog, corpora
from txl_jax.data.options import SPLITS


@pytest.fixture
def text(tmp_path: Path) -> Path:
    folder = tmp_path / "text"
    folder.mkdir()
    for seed, name in enumerate(("train.bin", "valid.bin", "test.bin")):
        (folder / name).write_bytes(random.Random(seed).randbytes(4001 - seed * 1999))
    return folder


def joined(stored: builder.CorpusBuilder, split: str) -> bytes:
    return b"".join(builder.read(stored, split))


def test_blocks_are_exact_over_shards(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(builder, "BLOCK_BYTES", 64)
    monkeypatch.setattr(builder, "SHARD_BYTES", 1000)  # no multiple of a block
    source = corpora.find("text", str(text))
    stored = builder.prepare(source, tmp_path)
    assert stored.info.splits["train"].num_shards == 5
    for split in SPLITS:
        blocks = list(builder.read(stored, split))
        assert b"".join(blocks) == (text / f"{split}.bin").read_bytes()
        assert max(map(len, blocks)) == min(64, (text / f"{split}.bin").stat().st_size)
    again = builder.prepare(source, tmp_path)
    assert list(builder.read(again, "train")) == list(builder.read(stored, "train"))
    # TFDS reads the folder without this package.
    folder = tmp_path / "txl_jax" / source.config / "1.0.0"
    assert stored.data_path == folder
    plain = tfds.builder_from_directory(folder).as_data_source("test")
    assert plain[0]["bytes"].tobytes() == (text / "test.bin").read_bytes()[:64]


@pytest.mark.parametrize("damage", ["train*00000-of-*", "dataset_info.json"])
def test_damaged_blocks_are_refused(text: Path, tmp_path: Path, damage: str) -> None:
    source = corpora.find("text", str(text))
    folder = builder.prepare(source, tmp_path).data_path
    (victim,) = Path(folder).glob(f"*{damage}")
    victim.write_bytes(victim.read_bytes()[: victim.stat().st_size // 2])
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


@pytest.mark.parametrize("name", miniatures.NAMES)
def test_published_corpora_are_stored_as_they_are(
    name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    corpus = miniatures.install(name, tmp_path, monkeypatch)
    source = corpora.find(name, data_dir=tmp_path)
    stored = builder.prepare(source, tmp_path)
    for split, expected in miniatures.splits(name).items():
        assert joined(stored, split) == expected
    output = capsys.readouterr().err.splitlines()
    assert output and all("using" in line for line in output)
    # Stored once: neither the archive nor what was unpacked from it is needed again.
    assert [path.name for path in (tmp_path / "txl_jax" / name).iterdir()] == ["1.0.0"]
    types = corpora.vocab_file(corpus, tmp_path)
    assert (types is None) == (name != "lm1b")
    if types:
        assert types.read_bytes() == miniatures.types()
        types.write_bytes(b"the\n")
        with refused("1b_word_vocab.txt is a different file"):
            corpora.vocab_file(corpus, tmp_path)
    shutil.rmtree(tmp_path / "downloads")
    again = builder.prepare(source, tmp_path)
    assert joined(again, "test") == miniatures.splits(name)["test"]


def test_failed_unpacking_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    corpus = miniatures.install("wikitext2", tmp_path, monkeypatch)
    (archive,) = corpus.archives
    bad = replace(archive.members[2], digest="0" * 64)
    archive = replace(archive, members=(*archive.members[:2], bad))
    bad_corpus = replace(corpus, archives=(archive,))
    monkeypatch.setitem(catalog.CORPORA, "wikitext2", bad_corpus)
    with refused("wiki.test.tokens is a different file"):
        builder.prepare(corpora.find("wikitext2", data_dir=tmp_path), tmp_path)
    assert not list((tmp_path / "txl_jax" / "wikitext2").iterdir())


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
        """Is asked for by TFDS."""

    def _lines(self, split: str) -> object:
        for number in range(30):
            end = "\n" if number % 2 else ""
            yield number, {"text": f"{split} líne {number}{end}", "title": "no"}


@pytest.fixture
def shelf(tmp_path: Path) -> Path:
    Poems(data_dir=tmp_path, file_format="array_record").download_and_prepare()
    return tmp_path


def test_tfds_datasets_are_joined_text_by_text(
    shelf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("txl_jax.data.dataset.READ_BYTES", 100)
    for name in ("poems", "poems:1.2.0"):
        source = corpora.find(f"tfds:{name}", data_dir=shelf)
        assert source.config.startswith("tfds-poems-1.2.0-")
        stored = builder.prepare(source, shelf)
        for ours, theirs in {"train": "train", "valid": "validation"}.items():
            lines = [f"{theirs} líne {number}\n" for number in range(30)]
            assert joined(stored, ours) == "".join(lines).encode()


def test_other_tfds_datasets_are_refused_with_the_reason(shelf: Path) -> None:
    def refuse(name: str, message: str) -> None:
        with refused(message):
            builder.prepare(corpora.find(f"tfds:{name}", data_dir=shelf), shelf)

    shutil.copytree(shelf / "poems/1.2.0", shelf / "poems/2.0.0")
    refuse("poems", "is ambiguous, one of poems/1.2.0, poems/2.0.0: specify")
    path = shelf / "poems/2.0.0/dataset_info.json"
    info = json.loads(path.read_text())
    path.write_text(json.dumps(info | {"splits": info["splits"][:1]}))
    refuse("poems:2.0.0", "has the splits train, so valid, test is missing")
    path.write_text(json.dumps(info | {"fileFormat": "tfrecord"}))
    refuse("poems:2.0.0", "stored as tfrecord .*without TensorFlow")
    path.write_text("{")
    refuse("poems:2.0.0", "is damaged")
    features = shelf / "poems/1.2.0/features.json"
    both = features.read_text()
    features.write_text(both.replace('"text": {\n                "py', '"line": {"py'))
    refuse("poems:1.2.0", r"2 text features \(line, title\)")
