"""Published corpora and TFDS datasets: verified, stored and read without TensorFlow."""

import http.server
import json
import shutil
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import tensorflow_datasets as tfds

from tests.data import miniatures
from tests.support.refusal import refused
from txl_jax.data import builder, catalog, corpora
from txl_jax.data.byte_ranges import checksum
from txl_jax.data.catalog import Corpus
from txl_jax.data.options import SPLITS, DataConfig
from txl_jax.data.tokens import prepare


@pytest.fixture
def wikitext(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Corpus:
    """The miniature of WikiText-2, whose archive is in the manual folder."""
    return miniatures.install("wikitext2", tmp_path, monkeypatch)


def read(corpus: Corpus, data_dir: Path) -> dict[str, bytes]:
    """Returns the bytes of each split, and prepares them first if necessary."""
    source = corpora.find_source(DataConfig(corpus.name), data_dir)
    text = source.open(data_dir / "scratch")
    return {split: b"".join(text.read(split)) for split in SPLITS}


def manual(data_dir: Path, name: str = "wikitext-2-v1.zip") -> Path:
    return data_dir / "downloads" / "manual" / name


def stored(data_dir: Path) -> Path:
    return data_dir / "txl_jax" / "wikitext2" / "1.0.0"


@pytest.mark.parametrize("name", miniatures.NAMES)
def test_blocks_cross_shards_exactly(
    name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(builder, "EXAMPLE_BYTES", 64)
    monkeypatch.setattr(builder, "SHARD_BYTES", 1000)  # no multiple of a block
    monkeypatch.setattr(builder, "READ_BYTES", 150)  # two blocks at once
    corpus = miniatures.install(name, tmp_path, monkeypatch)
    assert read(corpus, tmp_path) == miniatures.splits(name)
    assert not capsys.readouterr().out, "TFDS is quiet"
    # TFDS reads the folder without this package.
    folder = tmp_path / "txl_jax" / name / corpus.version
    plain = tfds.builder_from_directory(folder).as_data_source("test")
    assert plain[0]["bytes"].tobytes() == miniatures.splits(name)["test"][:64]


@pytest.mark.parametrize("name", ["*train*00000-of-*", "dataset_info.json"])
@pytest.mark.parametrize("part", [2, 0])
def test_damaged_blocks_are_refused(
    name: str, part: int, wikitext: Corpus, tmp_path: Path
) -> None:
    read(wikitext, tmp_path)
    (path,) = stored(tmp_path).glob(name)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2 * part // 2])
    with refused("is damaged .*: delete it and prepare again"):
        read(wikitext, tmp_path)


def test_a_full_disk_is_one_line(
    wikitext: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("write() failed: No space left on device\nand a trace")

    monkeypatch.setattr(builder.CorpusBuilder, "download_and_prepare", fail)
    with refused(r"No space left on device\): make room"):
        prepare(DataConfig("wikitext2", data_dir=str(tmp_path)))


# Sources of a corpus's files


def test_a_local_archive_is_verified(wikitext: Corpus, tmp_path: Path) -> None:
    (archive,) = wikitext.archives
    paths = builder.find_splits(
        wikitext, None, manual(tmp_path).parent, tmp_path / "scratch"
    )
    for ranges in paths.values():
        assert ranges[0].path.is_relative_to(tmp_path / "scratch")
    names = {path.name for path in ranges[0].path.parent.iterdir()}
    assert names == {f"wiki.{split}.tokens" for split in SPLITS}, "only the members"
    manual(tmp_path).write_bytes(manual(tmp_path).read_bytes()[:-1])
    actual = checksum(manual(tmp_path))
    with refused(f"{manual(tmp_path)} .*SHA-256 is {actual} .* {archive.sha256}"):
        read(wikitext, tmp_path)


@pytest.mark.parametrize("folder", ["wikitext-2", "wikitext2"])
def test_unpacked_files_are_verified(
    wikitext: Corpus, tmp_path: Path, folder: str
) -> None:
    manual(tmp_path).unlink()
    place = manual(tmp_path, folder)
    place.mkdir()
    members = wikitext.archives[0].members
    for member in members:
        content = miniatures.text(member.path)
        (place / Path(member.path).name).write_bytes(content)
    assert read(wikitext, tmp_path) == miniatures.splits("wikitext2")
    shutil.rmtree(stored(tmp_path))
    (place / "wiki.valid.tokens").write_bytes(b"x")
    with refused(f"wiki.valid.tokens is .* a different file: .*{members[1].digest}"):
        read(wikitext, tmp_path)
    (place / "wiki.train.tokens").unlink()
    with refused("cannot download wikitext-2-v1.zip"):
        read(wikitext, tmp_path)


def test_checksum_of_a_git_object(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"hello\n")
    expected = "ce013625030ba8dba906f756967f9e9ca394464a"  # from git hash-object
    assert checksum(tmp_path / "a", "git") == expected


class Host(http.server.BaseHTTPRequestHandler):
    """Serves `data` at every path; `script` lists the faults of its responses."""

    url: str
    data: bytes
    script: list[str]
    requests: int

    def do_GET(self) -> None:
        """Responds with the file, a part of it, another file or an error."""
        type(self).requests += 1
        fault = self.script.pop(0) if self.script else ""
        if fault.isdigit():
            self.send_error(int(fault))
            return
        data = b"x" * len(self.data) if fault == "other" else self.data
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data[: len(data) // 2] if fault == "cut" else data)

    def log_message(self, *_: object) -> None:
        """Keeps the terminal quiet."""


@pytest.fixture
def host(wikitext: Corpus, tmp_path: Path) -> Iterator[type[Host]]:
    """Starts a host, the only source of the miniature."""
    Host.script, Host.requests = [], 0
    Host.data = manual(tmp_path).read_bytes()
    manual(tmp_path).unlink()
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Host) as server:
        Host.url = f"http://127.0.0.1:{server.server_port}/"
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield Host
        server.shutdown()
        thread.join()


def hosted(
    corpus: Corpus, urls: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> Corpus:
    """Returns the corpus with other addresses."""
    archive = replace(corpus.archives[0], urls=urls)
    corpus = replace(corpus, archives=(archive,))
    monkeypatch.setitem(catalog.CORPORA, corpus.name, corpus)
    return corpus


@pytest.mark.parametrize(
    "script, requests",
    [
        ([], 1),
        (["503", "500"], 3),  # tried again
        (["404"], 2),  # the next host
        (["cut"], 2),
        (["other", "other"], 3),  # its checksum is wrong
    ],
)
def test_a_download_is_retried_and_taken_from_the_next_host(
    script: list[str],
    requests: int,
    wikitext: Corpus,
    host: type[Host],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    host.script = list(script)
    urls = tuple(f"{host.url}{name}/wikitext-2-v1.zip" for name in "abc")
    corpus = hosted(wikitext, urls, monkeypatch)
    name = tfds.download.resource.get_dl_fname(urls[0])
    killed = tmp_path / "downloads" / "txl_jax" / f"{name}.tmp.1"
    killed.mkdir(parents=True)
    assert read(corpus, tmp_path) == miniatures.splits("wikitext2")
    assert host.requests == requests and not killed.exists()
    if not script:
        shutil.rmtree(stored(tmp_path))
        read(corpus, tmp_path)
        assert host.requests == 1, "the download is kept"
        shutil.rmtree(stored(tmp_path))
        (kept,) = (tmp_path / "downloads" / "txl_jax").glob("*.zip")
        kept.write_bytes(b"damaged")
        with refused(f"{kept.name} is truncated or a different file"):
            read(corpus, tmp_path)


@pytest.mark.parametrize(
    "fault, message",
    [
        ("404", "HTTP code: 404"),
        ("other", "NonMatchingChecksumError"),
        ("", "no-such-host.invalid"),
    ],
)
def test_a_failed_download_names_the_manual_folder(
    fault: str,
    message: str,
    wikitext: Corpus,
    host: type[Host],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    host.script = [fault] * 99
    url = host.url if fault else "http://no-such-host.invalid/a.zip"
    corpus = hosted(wikitext, (url,), monkeypatch)
    folder = manual(tmp_path).parent
    fix = f"put wikitext-2-v1.zip in {folder}, or its files in {folder / 'wikitext2'}"
    with refused(f"{message}.*{fix}, and run again"):
        read(corpus, tmp_path)
    assert not stored(tmp_path).exists()


# Datasets of TFDS


class Poems(tfds.core.GeneratorBasedBuilder):
    """A text dataset, prepared by TFDS."""

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
    monkeypatch.setattr(builder, "READ_BYTES", 100)
    for name in ("poems", "poems:1.2.0"):
        source = corpora.find_source(DataConfig(f"tfds:{name}"), shelf)
        assert source.name.startswith("tfds-poems-1.2.0-")
    text = source.open(tmp_path)
    for ours, theirs in {"train": "train", "valid": "validation"}.items():
        lines = [f"{theirs} líne {number}\n" for number in range(30)]
        assert b"".join(text.read(ours)) == "".join(lines).encode()


def test_other_tfds_datasets_are_refused_with_the_reason(
    shelf: Path, tmp_path: Path
) -> None:
    def refuse(name: str, message: str) -> None:
        with refused(message):
            corpora.find_source(DataConfig(f"tfds:{name}"), tmp_path).open(tmp_path)

    for version in ("1.2.0", "2.0.0"):
        shutil.copytree(shelf / "poems/1.2.0", tmp_path / "poems" / version)
    refuse("poems", "names poems/1.2.0, poems/2.0.0 in .*: give one as")
    path = tmp_path / "poems/2.0.0/dataset_info.json"
    info = json.loads(path.read_text())
    path.write_text(json.dumps(info | {"splits": info["splits"][:1]}))
    refuse("poems:2.0.0", "has the splits train and .* use a dataset with train, val")
    features = tmp_path / "poems/1.2.0/features.json"
    both = features.read_text()
    features.write_text(both.replace('"text": {\n                "py', '"line": {"py'))
    refuse("poems:1.2.0", "the text features line, title: use .* the feature text")
    info["fileFormat"] = "tfrecord"
    path.write_text(json.dumps(info))
    refuse("poems:2.0.0", "is stored as tfrecord .* file_format='array_record'")
