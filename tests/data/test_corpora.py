"""The text of each corpus is complete, in order, and always split the same way."""

import bz2
import contextlib
import gzip
import lzma
import os
import random
import re
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.convert.test_pickle import zip_of
from tests.data import miniatures
from tests.support.refusal import refused
from txl_jax.data import catalog, vocab
from txl_jax.data.byte_ranges import ByteRange, ByteRanges, Splits, blocks, cut, size
from txl_jax.data.corpora import find_source
from txl_jax.data.files import corpus_files, require_apart, split_stdlib, split_text
from txl_jax.data.options import SPLITS, DataConfig
from txl_jax.data.word import WordVocab


def joined(ranges: ByteRanges) -> bytes:
    return b"".join(blocks(ranges, 1000))


def write(path: Path, content: bytes) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(content)


Split = Callable[..., Splits]


@pytest.fixture
def split(tmp_path_factory: pytest.TempPathFactory) -> Split:
    """Returns a function that returns the splits of the user's files."""

    def split(path: Path | str, document_end: str = "") -> Splits:
        return split_text(str(path), tmp_path_factory.mktemp("scratch"), document_end)

    return split


def test_cut_and_blocks_agree_with_slices(tmp_path: Path) -> None:
    rng = random.Random(0)
    parts = [rng.randbytes(n) for n in (7, 0, 1, 20, 12)]
    ranges, whole = [], b"".join(parts)
    for number, part in enumerate(parts):
        path = tmp_path / str(number)
        path.write_bytes(b"xx" + part + b"yyy")
        ranges.append(ByteRange(path, 2, 2 + len(part)))
    assert size(ranges) == len(whole) == 40
    for start in range(0, 41, 3):
        for stop in range(start, 41):
            assert joined(cut(ranges, start, stop)) == whole[start:stop]
    for block_size in (1, 3, 8, 40, 99):
        result = list(blocks(ranges, block_size))
        assert b"".join(result) == whole
        assert {len(block) for block in result[:-1]} <= {block_size}
        assert 0 < len(result[-1]) <= block_size


def test_stdlib_splits_are_whole_files_in_the_stated_proportions() -> None:
    assert find_source(DataConfig(), Path()).name.startswith("stdlib-3.")
    splits = split_stdlib()
    for ranges in splits.values():
        names = [part.path.as_posix() for part in ranges]
        assert names == sorted(names)
        assert all(part.start == 0 for part in ranges)
        assert not any("/test/" in name or "/idlelib/" in name for name in names)
    for name in ("valid", "test"):
        assert 150_000 < size(splits[name]) < 350_000
        assert max(part.stop for part in splits[name]) < 0.25 * size(splits[name])
    files = {x: {part.path for part in ranges} for x, ranges in splits.items()}
    assert not files["train"] & files["valid"] and not files["train"] & files["test"]
    library = Path(os.__file__).parent
    places = {"train": "json/__init__.py", "valid": "os.py", "test": "base64.py"}
    assert all(library / name in files[split] for split, name in places.items())


TAR = tarfile.TarInfo("a.txt").tobuf() + bytes(1024)
PACK: dict[str, Any] = {"gz": gzip, "bz2": bz2, "xz": lzma}
NAMES = """
train.txt.gz       valid.txt           test.txt.xz
wiki.train.tokens  dev.txt             TEST.md
ptb.train.txt      my_val2.txt         test-00000-of-00001.txt
train/test.txt     validation/book.txt test/dev.txt.bz2
"""


@pytest.mark.parametrize("names", NAMES.strip().splitlines())
def test_named_splits_of_a_text_are_used(
    names: str, tmp_path: Path, split: Split
) -> None:
    expected = {"train": b"aaa", "valid": b"bb", "test": b"cc"}
    for name, text in zip(names.split(), expected.values(), strict=True):
        pack = PACK.get(name.rpartition(".")[2])
        write(tmp_path / name, pack.compress(text) if pack else text)
    write(tmp_path / ".hidden", b"no")
    for path in (tmp_path, f"{tmp_path}/**"):
        assert {k: joined(v) for k, v in split(path).items()} == expected


@pytest.mark.parametrize(
    "names, listing",
    [
        ("train.txt a/dev/x.txt", "train: train.txt; valid: a/dev/x.txt"),
        ("all.txt Test/1 Test/2", "test: Test/1 and 1 more; no split: all.txt"),
        ("train valid test train_test", "test: test; test or train: train_test"),
        ("news.en-00001-of-2 heldout-0-of-2", "valid: heldout-0-of-2; no split: news"),
        ("corpus_test.txt corpus_train.txt", "train: corpus_train.txt; test: corpus_t"),
        ("all.txt a(test).txt", "test: a(test).txt; no split: all.txt"),
        ("train.txt Hold_Out@1", "train: train.txt; valid: Hold_Out@1"),
        ("train.txt more.txt", ""),
        ("latest.txt protest-1.txt contest/1", ""),
        ("test.txt", ""),
    ],
)
def test_names_of_some_splits_are_refused(
    names: str, listing: str, tmp_path: Path, split: Split
) -> None:
    for name in names.split():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"x" * 100)
    if listing:
        with refused(rf"{re.escape(listing)}.*\): give train, valid and test"):
            split(tmp_path)
    else:
        assert size(split(tmp_path)["train"]) >= 90


def test_runs_and_prepared_copies_are_no_text(tmp_path: Path) -> None:
    """Otherwise a run whose folder is among its text could not resume."""
    write(tmp_path / "a.txt", b"text")
    for name in ("run/config.json", "run/vocab.json", "run/sample.txt", "b/c.txt"):
        write(tmp_path / name, b"{}")
    write(tmp_path / "txl_jax" / "text-1.lock", b"")
    (tmp_path / "txl_jax" / "text-1" / "1").mkdir(parents=True)
    write(tmp_path / "txl_jax" / "text-1" / "1" / "x.txt", b"")
    for path in (tmp_path, tmp_path / "**/*.txt"):
        names = [file.name for file in corpus_files(str(path))]
        assert names == ["a.txt", "c.txt"]
    assert corpus_files(f"{tmp_path}/run/*.txt") == [tmp_path / "run" / "sample.txt"]


@pytest.mark.parametrize(
    "path, workdir, fits",
    [
        (".", ".", False),
        (".", "b", False),
        ("*", ".", False),
        ("**/*.txt", "b", False),
        (".", "runs", True),
        ("b/*.txt", ".", True),
        ("b", ".", True),
        ("a.txt", ".", True),
    ],
)
def test_text_in_the_workdir_is_refused(
    path: str, workdir: str, fits: bool, tmp_path: Path
) -> None:
    write(tmp_path / "a.txt", b"text")
    write(tmp_path / "b" / "c.txt", b"text")
    with contextlib.nullcontext() if fits else refused("files in the workdir"):
        require_apart(str(tmp_path / path), tmp_path / workdir)


@pytest.mark.parametrize("path", ["pipe", "", "/dev/null"])
def test_a_pipe_is_refused(path: str, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with refused("data.path='.*' is a pipe or a device: give a file"):
        find_source(DataConfig("text", str(tmp_path / path)), tmp_path)
    with refused("data.vocab_path='.*' is a pipe or a device"):
        vocab.read_file(tmp_path / "pipe", WordVocab)


def test_files_start_on_lines_of_their_own(tmp_path: Path, split: Split) -> None:
    texts = b"\xef\xbb\xbffour alpha", b"beta\n", b"\xef\xbb\xbf", b"", b"5" * 99
    for name, text in zip("abcde", texts, strict=True):
        write(tmp_path / f"{name}.txt", text)
    write(tmp_path / "b.txt.gz", gzip.compress(b"\xef\xbb\xbfgamma"))
    parts = [b"four alpha", b"beta", b"gamma", b"5" * 99]
    joint = {"": b"\n".join(parts), "<eod>": b"\n<eod>\n".join([*parts, b""])}
    for end, expected in joint.items():
        splits = split(tmp_path, end)
        assert b"".join(joined(splits[name]) for name in SPLITS) == expected


def test_text_joins_sorted_files_and_cuts_at_line_ends(
    tmp_path: Path, split: Split
) -> None:
    lines = [b"line %04d\n" % number for number in range(300)]
    # Files are sorted as strings.
    for start, name in ((0, "a.txt"), (75, "b/one.gz"), (150, "c.bz2"), (225, "d.xz")):
        text = b"".join(lines[start : start + 75])
        pack = PACK.get(name.rpartition(".")[2])
        write(tmp_path / name, pack.compress(text) if pack else text)
    write(tmp_path / ".git" / "secret", b"not this\n" * 99)
    expected = {"train": lines[:270], "valid": lines[270:285], "test": lines[285:]}
    for name, ranges in split(tmp_path).items():
        assert joined(ranges) == b"".join(expected[name])


@pytest.mark.parametrize(
    "text, lengths",
    [
        (b"x" * 1000, (900, 50, 50)),  # no line end at all: cut at the byte
        (b"x" * 910 + b"\n" + b"x" * 89, (911, 39, 50)),
        (b"x" * 899 + b"\n" + b"x" * 100, (900, 50, 50)),  # a line ends exactly there
        (b"x" * 949 + b"\n" + b"x" * 50, (900, 50, 50)),  # would empty valid
        (b"x" * 905 + b"\t" + b"x" * 94, (906, 44, 50)),
        (b"x" + "天".encode() * 333, (901, 51, 48)),  # between characters
        (b"\x80" * 1000, (900, 50, 50)),  # not UTF-8
    ],
)
def test_a_late_line_end_moves_a_cut_by_at_most_one_split(
    tmp_path: Path, split: Split, text: bytes, lengths: tuple[int, ...]
) -> None:
    (tmp_path / "text").write_bytes(text)
    splits = split(tmp_path / "text")
    assert tuple(size(splits[name]) for name in SPLITS) == lengths
    assert b"".join(joined(splits[name]) for name in SPLITS) == text


def test_the_edition_of_a_text_depends_on_names_and_contents(tmp_path: Path) -> None:
    def edition(path: Path, document_end: str = "") -> str:
        config = DataConfig("text", str(path), document_end=document_end)
        return find_source(config, tmp_path).edition

    path = tmp_path / "a"
    path.write_bytes(b"x" * 100)
    editions = [edition(place) for place in (path, tmp_path)]
    for letter in (b"y", b"z"):  # size and date stay the same
        path.write_bytes(letter * 100)
        os.utime(path, ns=(0, 1))
        editions.append(edition(tmp_path))
    path.rename(tmp_path / "b")
    editions.append(edition(tmp_path))
    editions.append(edition(tmp_path, document_end="x"))
    assert editions[0] == editions[1] and len(set(editions)) == 5


def test_catalog_is_complete() -> None:
    """Each archive has its checksum, and the hosts with https come first."""
    for name, corpus in catalog.CORPORA.items():
        assert corpus.name == name
        for archive in corpus.archives:
            assert len(archive.sha256) == 64 and archive.size > 0
            secure = [url.startswith("https://") for url in archive.urls]
            assert secure[0] and secure == sorted(secure, reverse=True)
            assert all(f"/{archive.name}" in url for url in archive.urls)
    published = {name for name, corpus in catalog.CORPORA.items() if corpus.archives}
    assert published == set(miniatures.NAMES)


@pytest.mark.parametrize(
    "name, content, message",
    [
        ("a.txt", zip_of(b"text"), "not text in UTF-8"),
        ("a.tar.gz", gzip.compress(TAR), "not text in UTF-8"),
        ("a.txt", "text".encode("utf-32"), "not text in UTF-8"),
        ("a.jsonl", b'{"text": "a"}', "JSON lines, not text.*jq -r .text"),
    ],
    ids="zip tar.gz UTF-32 jsonl".split(),
)
def test_other_formats_are_refused(
    name: str, content: bytes, message: str, tmp_path: Path, split: Split
) -> None:
    write(tmp_path / name, content)
    with refused(f"{name} is {message}"):
        split(tmp_path / name)
