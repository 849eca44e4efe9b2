"""Corpora are found whole, in order, and split the same way every time."""

import os
import random
import subprocess
import sys
from pathlib import Path
from typing import IO, Any

import pytest

from txl_jax.data import corpora
from txl_jax.data.corpora import Piece, blocks, cut, find, size
from txl_jax.errors import UserError

ROOT = Path(__file__).parents[2]


def joined(pieces: corpora.Pieces) -> bytes:
    return b"".join(blocks(pieces, 1000))


def write(folder: Path, **files: bytes) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name.replace("_", ".")).write_bytes(content)
    return folder


def test_import_is_cheap() -> None:
    heavy = "{'numpy', 'jax', 'tensorflow_datasets'}"
    code = (
        f"import sys, txl_jax.data.corpora; sys.exit(bool({heavy} & set(sys.modules)))"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def test_cut_and_blocks_agree_with_slices(tmp_path: Path) -> None:
    rng = random.Random(0)
    parts = [rng.randbytes(n) for n in (7, 0, 1, 30, 12)]
    pieces, whole = [], b""
    for number, part in enumerate(parts):
        path = tmp_path / str(number)
        path.write_bytes(b"xx" + part + b"yyy")
        pieces.append(Piece(path, 2, 2 + len(part)))
        whole += part
    assert size(pieces) == len(whole) == 50
    for start in range(51):
        for stop in range(start, 51):
            assert joined(cut(pieces, start, stop)) == whole[start:stop]
    for block_size in (1, 3, 8, 50, 99):
        got = list(blocks(pieces, block_size))
        assert b"".join(got) == whole
        assert {len(block) for block in got[:-1]} <= {block_size}
        assert 0 < len(got[-1]) <= block_size


def test_stdlib_splits_are_whole_files_of_fair_size() -> None:
    source = find("stdlib")
    assert source.config.startswith("stdlib-3.")
    for split in corpora.SPLITS:
        names = [piece.path.as_posix() for piece in source.splits[split]]
        assert names == sorted(names)
        assert all(piece.start == 0 for piece in source.splits[split])
        assert not any("/test/" in name or "/idlelib/" in name for name in names)
    for split in ("valid", "test"):
        pieces = source.splits[split]
        assert 150_000 < size(pieces) < 350_000
        assert max(piece.stop for piece in pieces) < 0.25 * size(pieces)
    files = {piece.path for pieces in source.splits.values() for piece in pieces}
    assert len(files) == sum(map(len, source.splits.values()))
    library = Path(os.__file__).parent
    assert {library / "os.py", library / "json" / "__init__.py"} <= files
    assert library / "test" / "__init__.py" not in files


def test_stdlib_split_is_fixed() -> None:
    split = {
        name: corpora.stdlib_split(name) for name in ("os.py", "base64.py", "a.py")
    }
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
    assert tuple(size(splits[split]) for split in corpora.SPLITS) == lengths
    assert b"".join(joined(splits[split]) for split in corpora.SPLITS) == text


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
        ("stdlb", ""): "did you mean 'stdlib'.*known are: stdlib, text",
        ("stdlib", "x.txt"): "data.path='x.txt' is for data.corpus='text'",
        ("text", ""): "needs data.path",
        ("text", "/nowhere/at/all"): "'/nowhere/at/all' does not exist",
        ("text", f"{tmp_path}/*.nope"): "matches no file",
        ("text", f"{tmp_path}/none"): "folder without files",
        ("text", f"{tmp_path}/empty"): "no text in it",
        ("text", f"{tmp_path}/small"): "its valid split would have 1 bytes",
        ("text", str(folder)): "1 more files",
    }
    for (name, path), message in cases.items():
        with pytest.raises(UserError, match=message) as caught:
            find(name, path)
        assert "\n" not in str(caught.value)


def test_unreadable_and_shrunken_files_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"x" * 100)
    with pytest.raises(UserError, match=r"a\.txt became shorter"):
        joined((Piece(path, 0, 101),))

    # A mode of 0 would not stop the tests when they run as root.
    def refuse(self: Path, *_: Any, **__: Any) -> IO[bytes]:
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(UserError, match=r"cannot read .*a\.txt \(Permission denied\)"):
        find("text", str(path))
