"""The text of each corpus is complete, in order, and always split the same way."""

import bz2
import gzip
import lzma
import os
import random
from pathlib import Path
from typing import Any

import pytest

from tests.data import miniatures
from tests.support.refusal import refused
from txl_jax.data import catalog
from txl_jax.data.byte_ranges import ByteRange, ByteRanges, Splits, blocks, cut, size
from txl_jax.data.corpora import find
from txl_jax.data.files import stdlib_split
from txl_jax.data.options import SPLITS

ROOT = Path(__file__).parents[2]


def joined(ranges: ByteRanges) -> bytes:
    return b"".join(blocks(ranges, 1000))


def write(folder: Path, **files: bytes) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name.replace("_", ".")).write_bytes(content)
    return folder


@pytest.fixture
def split(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A function that returns the splits of a corpus."""

    def split(name: str, path: Path | str = "") -> Splits:
        scratch = tmp_path_factory.mktemp("scratch") / "unpacked"
        return find(name, str(path)).unpack(scratch)

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


def test_stdlib_splits_are_whole_files_of_fair_size(split: Any) -> None:
    assert find("stdlib").config.startswith("stdlib-3.")
    splits = split("stdlib")
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
    names: tuple[str, ...], tmp_path: Path, split: Any
) -> None:
    pack: dict[str, Any] = {".gz": gzip.compress, ".xz": lzma.compress}
    expected = {"train": b"aaa", "valid": b"bb", "test": b"cc"}
    for name, text in zip(names, expected.values(), strict=True):
        content = pack.get(Path(name).suffix, bytes)(text)
        (tmp_path / name).write_bytes(content)
    (tmp_path / ".hidden").write_bytes(b"no")
    for path in (tmp_path, f"{tmp_path}/*"):
        assert {k: joined(v) for k, v in split("text", path).items()} == expected


@pytest.mark.parametrize("packed", [False, True])
def test_text_joins_sorted_files_and_cuts_at_line_ends(
    tmp_path: Path, split: Any, packed: bool
) -> None:
    lines = [b"line %04d\n" % number for number in range(300)]
    a, b, c, d = (b"".join(lines[start : start + 75]) for start in range(0, 300, 75))
    if packed:
        a, c, d = gzip.compress(a), bz2.compress(c), lzma.compress(d)
        write(tmp_path, a_gz=a, c_bz2=c, d_xz=d)
    else:
        write(tmp_path, a_txt=a, c_txt=c, d_txt=d)
    write(tmp_path / "b", one_txt=b)  # "a.txt" < "b/one.txt" < "c.txt" as strings
    write(tmp_path / ".git", secret=b"not this\n" * 99)
    expected = {"train": lines[:270], "valid": lines[270:285], "test": lines[285:]}
    for name, ranges in split("text", tmp_path).items():
        assert joined(ranges) == b"".join(expected[name])


@pytest.mark.parametrize(
    "text, lengths",
    [
        (b"x" * 1000, (900, 50, 50)),  # no line end at all: cut at the byte
        (b"x" * 910 + b"\n" + b"x" * 89, (911, 39, 50)),
        (b"x" * 899 + b"\n" + b"x" * 100, (900, 50, 50)),  # a line ends exactly there
        (b"x" * 949 + b"\n" + b"x" * 50, (900, 50, 50)),  # would empty valid
        (b"x" * 999 + b"\n", (900, 50, 50)),  # would empty test
    ],
)
def test_text_cut_is_at_most_one_split_late(
    tmp_path: Path, split: Any, text: bytes, lengths: tuple[int, ...]
) -> None:
    (tmp_path / "text").write_bytes(text)
    splits = split("text", tmp_path / "text")
    assert tuple(size(splits[name]) for name in SPLITS) == lengths
    assert b"".join(joined(splits[name]) for name in SPLITS) == text


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


def test_impossible_sources_are_refused(tmp_path: Path, split: Any) -> None:
    write(tmp_path / "empty", a_txt=b"")
    write(tmp_path / "small", a_txt=b"x" * 20)
    (tmp_path / "small.gz").write_bytes(gzip.compress(b"x" * 20))
    known = "known are: stdlib, text, copying:DELAY,LENGTH,SYMBOLS, .*, tfds:NAME$"
    cases = {
        ("stdlb", ""): f"did you mean 'stdlib'.*{known}",
        ("tfds", ""): "'tfds' is unknown",
        ("text:a", ""): "'text:a' is unknown",
        ("text", ""): "needs data.path",
        ("text", "/nowhere/at/all"): "'/nowhere/at/all' does not exist",
        ("text", f"{tmp_path}/empty"): "has no text",
        ("text", f"{tmp_path}/small"): "its valid split has 1 bytes",
        ("text", f"{tmp_path}/small.gz"): "its valid split has 1 bytes",
    }
    for (name, path), message in cases.items():
        with refused(message):
            split(name, path)


def test_catalog_is_complete() -> None:
    for name, corpus in catalog.CORPORA.items():
        assert corpus.name == name
        assert corpus.about and corpus.licence and corpus.version and corpus.vocab
        for archive in corpus.archives:
            assert len(archive.sha256) == 64 and archive.size > 0 and archive.urls
            secure = [url.startswith("https://") for url in archive.urls]
            assert secure[0] and secure == sorted(secure, reverse=True)
            assert all(f"/{archive.name}" in url for url in archive.urls)
            for member in archive.members:
                assert set(member.splits) <= set(SPLITS)
    corpora = catalog.CORPORA
    published = {name for name, corpus in corpora.items() if corpus.archives}
    assert published == set(miniatures.NAMES)
    assert corpora["enwik8"].conventions == ("newlines_deleted", "newlines_kept")
    assert corpora["lm1b"].conventions == ("tensorflow", "words")
    assert corpora["wikitext103"].vocab_splits == ("train",)
    assert [name for name in corpora if corpora[name].lower] == ["ptb"]
    assert find("wikitext2").config == "wikitext2"


@pytest.mark.parametrize("name", ["a.gz", "a.bz2", "a.xz"])
def test_damaged_compressed_text_is_refused(
    tmp_path: Path, split: Any, name: str
) -> None:
    pack: Any = {"gz": gzip, "bz2": bz2, "xz": lzma}[name[2:]]
    good = pack.compress(random.Random(0).randbytes(5000))
    for bad in (good[:-100], b"not packed at all", good[:50] + bytes(20) + good[70:]):
        (tmp_path / name).write_bytes(bad)
        with refused(rf"cannot read .*{name} as \."):
            split("text", tmp_path / name)


def test_a_file_that_becomes_shorter_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"x" * 100)
    with refused(r"a\.txt became shorter"):
        joined((ByteRange(tmp_path / "a.txt", 0, 101),))
