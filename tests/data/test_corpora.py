"""The text of each corpus is complete, in order, and always split the same way."""

import bz2
import gzip
import lzma
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.data import miniatures
from tests.support.refusal import refused
from txl_jax.data import catalog
from txl_jax.data.byte_ranges import ByteRange, ByteRanges, blocks, cut, size
from txl_jax.data.corpora import find
from txl_jax.data.files import stdlib_split
from txl_jax.data.options import SPLITS


def joined(ranges: ByteRanges) -> bytes:
    return b"".join(blocks(ranges, 1000))


PACK: dict[str, Any] = {".gz": gzip, ".bz2": bz2, ".xz": lzma}


def write(path: Path, text: bytes) -> None:
    """Writes a file, compressed by its suffix."""
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(PACK[path.suffix].compress(text) if path.suffix in PACK else text)


Read = Callable[[Path | str], list[bytes]]


@pytest.fixture
def read(tmp_path_factory: pytest.TempPathFactory) -> Read:
    """A function that returns the splits of the user's text."""

    def read(path: Path | str) -> list[bytes]:
        scratch = tmp_path_factory.mktemp("scratch") / "unpacked"
        splits = find("text", str(path)).unpack(scratch)
        return [joined(splits[name]) for name in SPLITS]

    return read


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


def test_stdlib_splits_are_whole_files_of_fair_size(tmp_path: Path) -> None:
    assert find("stdlib").config.startswith("stdlib-3.")
    splits = find("stdlib").split(tmp_path)
    for ranges in splits.values():
        names = [part.path.as_posix() for part in ranges]
        assert names == sorted(names)
        assert all(part.start == 0 for part in ranges)
        assert not any("/test/" in name or "/idlelib/" in name for name in names)
    for name in ("valid", "test"):
        assert 150_000 < size(splits[name]) < 350_000
        assert max(part.stop for part in splits[name]) < 0.25 * size(splits[name])
    files = {part.path for ranges in splits.values() for part in ranges}
    assert len(files) == sum(map(len, splits.values()))
    library = Path(os.__file__).parent
    assert {library / "os.py", library / "json" / "__init__.py"} <= files
    fixed = {name: stdlib_split(name) for name in ("os.py", "base64.py", "a.py")}
    assert fixed == {"os.py": "valid", "base64.py": "test", "a.py": "train"}


@pytest.mark.parametrize(
    "names",
    [
        ("train.txt", "valid.txt", "test.md"),
        ("wiki.train.tokens", "wiki.valid.tokens", "wiki.test.tokens"),
        ("train.txt.gz", "valid.txt", "test.txt.xz"),
    ],
)
def test_text_takes_named_splits(
    names: tuple[str, ...], tmp_path: Path, read: Read
) -> None:
    texts = [b"aaa", b"bb", b"cc"]
    for name, text in zip(names, texts, strict=True):
        write(tmp_path / name, text)
    write(tmp_path / ".hidden", b"no")
    assert read(tmp_path) == read(f"{tmp_path}/*") == texts


@pytest.mark.parametrize("suffix", [".txt", *PACK])
def test_text_joins_sorted_files_and_cuts_at_line_ends(
    tmp_path: Path, read: Read, suffix: str
) -> None:
    lines = [b"line %04d\n" % number for number in range(300)]
    # "a.txt" < "b/one.txt" < "c.txt" as strings
    for start, name in ((0, "a"), (75, "b/one"), (150, "c"), (225, "d")):
        write(tmp_path / f"{name}{suffix}", b"".join(lines[start : start + 75]))
    write(tmp_path / ".git" / "secret", b"not this\n" * 99)
    parts = lines[:270], lines[270:285], lines[285:]
    assert read(tmp_path) == [b"".join(part) for part in parts]


@pytest.mark.parametrize(
    "text, lengths",
    [
        (b"x" * 1000, [900, 50, 50]),  # no line end at all: cut at the byte
        (b"x" * 910 + b"\n" + b"x" * 89, [911, 39, 50]),
        (b"x" * 899 + b"\n" + b"x" * 100, [900, 50, 50]),  # a line ends exactly there
        (b"x" * 949 + b"\n" + b"x" * 50, [900, 50, 50]),  # would empty valid
        (b"x" * 999 + b"\n", [900, 50, 50]),  # would empty test
    ],
)
def test_text_cut_is_at_most_one_split_late(
    tmp_path: Path, read: Read, text: bytes, lengths: list[int]
) -> None:
    write(tmp_path / "text", text)
    splits = read(tmp_path / "text")
    assert [*map(len, splits)] == lengths and b"".join(splits) == text


def test_text_edition_follows_names_sizes_and_times(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"x" * 100)
    editions = [find("text", str(place)).edition for place in (path, tmp_path)]
    for length in (100, 101):
        path.write_bytes(b"x" * length)
        os.utime(path, ns=(0, 1))
        editions.append(find("text", str(tmp_path)).edition)
    path.rename(tmp_path / "b")
    editions.append(find("text", str(tmp_path)).edition)
    assert editions[0] == editions[1] and len(set(editions)) == 4


@pytest.mark.parametrize("name", ["stdlb", "tfds", "text:a"])
def test_unknown_corpora_are_refused(name: str) -> None:
    with refused(f"'{name}' is unknown.*known are: stdlib, text, copy.*, tfds:NAME$"):
        find(name)


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


@pytest.mark.parametrize("suffix", PACK)
def test_damaged_compressed_text_is_refused(
    tmp_path: Path, read: Read, suffix: str
) -> None:
    path = tmp_path / f"a{suffix}"
    write(path, random.Random(0).randbytes(5000))
    good = path.read_bytes()
    for bad in (good[:-100], b"not packed at all", good[:50] + bytes(20) + good[70:]):
        path.write_bytes(bad)
        with refused(rf"cannot read .*a{suffix} as \."):
            read(path)


def test_a_file_that_becomes_shorter_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"x" * 100)
    with refused(r"a\.txt became shorter"):
        joined((ByteRange(tmp_path / "a.txt", 0, 101),))
