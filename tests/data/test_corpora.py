"""Corpora are found whole, in order, and split the same way every time."""

import bz2
import gzip
import lzma
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import IO, Any

import pytest

from tests.data import miniatures
from tests.support.refusal import quiet, refused
from txl_jax.data import corpora
from txl_jax.data.byte_ranges import ByteRange, ByteRanges, blocks, cut, size
from txl_jax.data.corpora import find, unpack
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


def test_import_is_cheap() -> None:
    heavy = "{'numpy', 'jax', 'tensorflow_datasets', 'requests'}"
    code = (
        f"import sys, txl_jax.data.corpora; sys.exit(bool({heavy} & set(sys.modules)))"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def test_cut_and_blocks_agree_with_slices(tmp_path: Path) -> None:
    rng = random.Random(0)
    parts = [rng.randbytes(n) for n in (7, 0, 1, 30, 12)]
    ranges, whole = [], b""
    for number, part in enumerate(parts):
        path = tmp_path / str(number)
        path.write_bytes(b"xx" + part + b"yyy")
        ranges.append(ByteRange(path, 2, 2 + len(part)))
        whole += part
    assert size(ranges) == len(whole) == 50
    for start in range(51):
        for stop in range(start, 51):
            assert joined(cut(ranges, start, stop)) == whole[start:stop]
    for block_size in (1, 3, 8, 50, 99):
        got = list(blocks(ranges, block_size))
        assert b"".join(got) == whole
        assert {len(block) for block in got[:-1]} <= {block_size}
        assert 0 < len(got[-1]) <= block_size


def test_stdlib_splits_are_whole_files_of_fair_size() -> None:
    source = find("stdlib")
    assert source.config.startswith("stdlib-3.")
    for split in SPLITS:
        names = [part.path.as_posix() for part in source.splits[split]]
        assert names == sorted(names)
        assert all(part.start == 0 for part in source.splits[split])
        assert not any("/test/" in name or "/idlelib/" in name for name in names)
    for split in ("valid", "test"):
        ranges = source.splits[split]
        assert 150_000 < size(ranges) < 350_000
        assert max(part.stop for part in ranges) < 0.25 * size(ranges)
    files = {part.path for ranges in source.splits.values() for part in ranges}
    assert len(files) == sum(map(len, source.splits.values()))
    library = Path(os.__file__).parent
    assert {library / "os.py", library / "json" / "__init__.py"} <= files
    assert library / "test" / "__init__.py" not in files


def test_stdlib_split_is_fixed() -> None:
    split = {name: stdlib_split(name) for name in ("os.py", "base64.py", "a.py")}
    assert split == {"os.py": "valid", "base64.py": "test", "a.py": "train"}


def test_text_takes_named_splits(tmp_path: Path) -> None:
    folder = write(tmp_path, train_txt=b"aaa", valid_txt=b"bb", test_md=b"cc")
    (folder / ".hidden").write_bytes(b"no")
    splits = find("text", str(folder)).splits
    assert {k: joined(v) for k, v in splits.items()} == {
        "train": b"aaa",
        "valid": b"bb",
        "test": b"cc",
    }
    assert find("text", f"{folder}/*").splits == splits


def test_text_takes_the_names_of_wikitext(tmp_path: Path) -> None:
    names = {f"wiki.{split}.tokens": split.encode() for split in SPLITS}
    for name, text in names.items():
        (tmp_path / name).write_bytes(text)
    splits = find("text", str(tmp_path)).splits
    assert {k: joined(v) for k, v in splits.items()} == {
        split: split.encode() for split in SPLITS
    }


def test_text_joins_sorted_files_and_cuts_at_line_ends(tmp_path: Path) -> None:
    lines = [b"line %04d\n" % number for number in range(300)]
    write(tmp_path / "b", one_txt=b"".join(lines[200:]))
    write(tmp_path, a_txt=b"".join(lines[:100]), b_txt=b"".join(lines[100:200]))
    write(tmp_path / ".git", secret=b"not this\n" * 99)
    # "a.txt" < "b.txt" < "b/one.txt" as strings.
    splits = find("text", str(tmp_path)).splits
    assert joined(splits["train"]) == b"".join(lines[:270])
    assert joined(splits["valid"]) == b"".join(lines[270:285])
    assert joined(splits["test"]) == b"".join(lines[285:])


@pytest.mark.parametrize(
    "text, lengths",
    [
        (b"x" * 1000, (900, 50, 50)),  # no line end at all: cut at the byte
        (b"x" * 910 + b"\n" + b"x" * 89, (911, 39, 50)),
        (b"x" * 899 + b"\n" + b"x" * 100, (900, 50, 50)),  # a line ends on the spot
        (b"x" * 949 + b"\n" + b"x" * 50, (900, 50, 50)),  # would empty valid
        (b"x" * 999 + b"\n", (900, 50, 50)),  # would empty test
    ],
)
def test_text_cut_is_at_most_one_split_late(
    tmp_path: Path, text: bytes, lengths: tuple[int, ...]
) -> None:
    path = tmp_path / "text"
    path.write_bytes(text)
    splits = find("text", str(path)).splits
    assert tuple(size(splits[split]) for split in SPLITS) == lengths
    assert b"".join(joined(splits[split]) for split in SPLITS) == text


def test_text_edition_follows_names_sizes_and_times(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"x" * 100)
    first = find("text", str(path)).edition
    assert first == find("text", str(tmp_path)).edition
    os.utime(path, ns=(0, 1))
    second = find("text", str(path)).edition
    path.write_bytes(b"x" * 101)
    os.utime(path, ns=(0, 1))
    third = find("text", str(path)).edition
    path.rename(tmp_path / "b")
    fourth = find("text", str(tmp_path)).edition
    assert len({first, second, third, fourth}) == 4


def test_find_refuses_with_one_line(tmp_path: Path) -> None:
    folder = write(tmp_path / "mix", train_txt=b"a", valid_txt=b"b", test_txt=b"c")
    write(folder, readme_md=b"d")
    (tmp_path / "none").mkdir()
    write(tmp_path / "empty", a_txt=b"")
    write(tmp_path / "small", a_txt=b"x" * 20)
    cases = {
        (
            "stdlb",
            "",
        ): "did you mean 'stdlib'.*known are: stdlib, text, copying, .*, tfds:<name>$",
        ("tfds", ""): "'tfds' is unknown",
        ("stdlib", "x.txt"): "data.path='x.txt' is for data.corpus='text'",
        ("text", ""): "needs data.path",
        ("text", "/nowhere/at/all"): "'/nowhere/at/all' does not exist",
        ("text", f"{tmp_path}/*.nope"): "matches no file",
        ("text", f"{tmp_path}/none"): "folder without files",
        ("text", f"{tmp_path}/empty"): "has no text",
        ("text", f"{tmp_path}/small"): "its valid split has 1 bytes",
        ("text", str(folder)): "1 more files",
    }
    for (name, path), message in cases.items():
        with refused(message):
            find(name, path)


def test_facts_are_complete() -> None:
    for name, corpus in corpora.CORPORA.items():
        assert corpus.name == name
        assert corpus.about and corpus.licence and corpus.version and corpus.vocab
        for archive in corpus.archives:
            remote = archive.remote
            assert len(remote.sha256) == 64 and remote.size > 0 and remote.urls
            secure = [url.startswith("https://") for url in remote.urls]
            assert secure[0] and secure == sorted(secure, reverse=True)
            assert all(f"/{remote.name}" in url for url in remote.urls)
        for member in corpus.members:
            assert set(member.splits) <= set(SPLITS)
    published = {name for name, corpus in corpora.CORPORA.items() if corpus.archives}
    assert published == set(miniatures.NAMES)
    facts = corpora.CORPORA
    assert facts["enwik8"].conventions == ("newlines_deleted", "newlines_kept")
    assert facts["lm1b"].conventions == ("tensorflow", "words")
    assert facts["wikitext103"].vocab_splits == ("train",)
    assert [name for name in facts if facts[name].lower] == ["ptb"]
    assert find("enwik8").bytes == 100_000_000 and find("lm1b").bytes == 0
    assert find("wikitext2").config == "wikitext2"


def test_compressed_text_is_read_as_it_is(tmp_path: Path) -> None:
    lines = [b"line %04d\n" % number for number in range(300)]
    parts = [b"".join(lines[start : start + 75]) for start in range(0, 300, 75)]
    plain = write(tmp_path / "plain", a=parts[0], b=parts[1], c=parts[2], d=parts[3])
    packed = write(
        tmp_path / "packed",
        a_gz=gzip.compress(parts[0]),
        b_bz2=bz2.compress(parts[1]),
        c_xz=lzma.compress(parts[2]),
        d_txt=parts[3],
    )
    source = find("text", str(packed))
    assert source.splits == {} and source.bytes == 0
    unpacked = unpack(source, tmp_path, tmp_path / "scratch", quiet)
    assert unpacked.config == source.config and unpacked.bytes == 3000
    for split, ranges in find("text", str(plain)).splits.items():
        assert joined(unpacked.splits[split]) == joined(ranges)


def test_compressed_text_keeps_named_splits(tmp_path: Path) -> None:
    folder = write(tmp_path / "a", train_txt_gz=gzip.compress(b"aaa"))
    write(folder, valid_txt=b"bb", test_txt_xz=lzma.compress(b"cc"))
    source = unpack(find("text", str(folder)), tmp_path, tmp_path / "s", quiet)
    got = {split: joined(ranges) for split, ranges in source.splits.items()}
    assert got == {"train": b"aaa", "valid": b"bb", "test": b"cc"}


def test_damaged_compressed_text_is_refused(tmp_path: Path) -> None:
    good = random.Random(0).randbytes(5000)
    bad = {
        "a.gz": gzip.compress(good)[:-100],
        "b.gz": b"no gzip at all",
        "c.bz2": bz2.compress(good)[:-100],
        "d.bz2": b"no bzip2 at all",
        "e.xz": lzma.compress(good)[:-100],
        "f.xz": b"no xz at all",
        "g.gz": gzip.compress(good)[:50] + bytes(20) + gzip.compress(good)[70:],
    }
    for name, content in bad.items():
        (tmp_path / name).write_bytes(content)
        source = find("text", str(tmp_path / name))
        with refused(rf"cannot read .*{name} as \."):
            unpack(source, tmp_path, tmp_path / f"scratch {name}", quiet)
    (tmp_path / "small.gz").write_bytes(gzip.compress(b"x" * 20))
    source = find("text", str(tmp_path / "small.gz"))
    with refused("its valid split has 1 bytes"):
        unpack(source, tmp_path, tmp_path / "scratch", quiet)


def test_unreadable_and_shrunken_files_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"x" * 100)
    with refused(r"a\.txt became shorter"):
        joined((ByteRange(path, 0, 101),))

    # A mode of 0 would not stop the tests when they run as root.
    def refuse(self: Path, *_: Any, **__: Any) -> IO[bytes]:
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "open", refuse)
    with refused(r"cannot read .*a\.txt \(Permission denied\)"):
        find("text", str(path))
