"""TensorFlow's checkpoints are read bit for bit, or refused by name in one line.

The files in tests/convert/tensorflow_checkpoints were written by TensorFlow itself: see
`tests.convert.golden_tensorflow`.
"""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from tests.convert import bundles
from tests.support.refusal import refused
from txl_jax.convert import bundle
from txl_jax.errors import UserError

GOLDEN = Path(__file__).with_name("tensorflow_checkpoints")
CASES = sorted(path.stem for path in GOLDEN.glob("*.npz") if path.stem != "kinds")

rng = np.random.default_rng(0)
VARIABLES: dict[str, Any] = {
    "global_step": np.int64(-5),
    "empty": np.zeros((0, 3), np.float32),
    "layer/a": rng.normal(size=(3, 4)).astype(np.float32),
    "layer/a/Adam": rng.normal(size=(3, 4)).astype(np.float32),
    "layer/b": rng.normal(size=7).astype(ml_dtypes.bfloat16),
    **{f"many/{i}": np.full((i, 2), i, np.int32) for i in range(1, 12)},
}


def read_all(source: Path) -> dict[str, Any]:
    """Returns every variable of a checkpoint."""
    opened = bundle.read(source)
    return {name: variable.read() for name, variable in opened.items()}


def refuse(source: Path, match: str) -> None:
    """Reads all of a checkpoint, which must fail with one line of a user's error."""
    with refused(match):
        read_all(source)


@pytest.fixture
def prefix(tmp_path: Path) -> Path:
    """Returns the prefix of a copy of a checkpoint of TensorFlow in two data files."""
    shutil.copytree(GOLDEN / "wt103_large", tmp_path / "model")
    return tmp_path / "model" / "ckpt-0"


@pytest.mark.parametrize("name", CASES)
def test_reads_what_tensorflow_wrote(name: str) -> None:
    expected = np.load(GOLDEN / f"{name}.npz")
    result = read_all(GOLDEN / name)
    assert set(result) == set(expected["names"])
    row = np.concatenate([result[name].ravel() for name in expected["names"]])
    assert row.dtype == expected["values"].dtype
    assert row.tobytes() == expected["values"].tobytes()


def test_reads_every_dtype_and_refuses_others() -> None:
    with np.load(GOLDEN / "kinds.npz") as file:
        expected = dict(file)
    opened = bundle.read(GOLDEN / "kinds")
    for name in ("float32", "float16", "int32", "int64", "scalar", "empty"):
        result = opened[name].read()
        assert (result.dtype, result.shape) == (
            expected[name].dtype,
            expected[name].shape,
        )
        assert result.tobytes() == expected[name].tobytes()
    result = opened["bfloat16"].read()
    assert result.dtype == ml_dtypes.bfloat16
    np.testing.assert_array_equal(result.astype(np.float32), expected["bfloat16"])
    for name, kind in (("float64", 2), ("string", 7)):
        with refused(f"{name} has .* data type {kind}; supp"):
            opened[name].read()
    with refused("partitioned is stored in slices: restore"):
        opened["partitioned"].read()


@pytest.mark.parametrize("shards", [1, 3])
def test_reads_what_the_test_writes(tmp_path: Path, shards: int) -> None:
    bundles.write(tmp_path / "ckpt", VARIABLES, shards)
    result = read_all(tmp_path)
    assert set(result) == set(VARIABLES)
    for name, value in VARIABLES.items():
        assert (result[name].dtype, result[name].shape) == (value.dtype, value.shape)
        assert result[name].tobytes() == value.tobytes()


def test_finds_a_checkpoint_by_every_name(prefix: Path) -> None:
    for source in (prefix, prefix.parent, Path(f"{prefix}.index"), str(prefix)):
        assert bundle.find(source) == prefix
    # The folder has been moved since: the name alone is true.
    text = 'model_checkpoint_path: "/gone/ckpt-0"\n'
    (prefix.parent / "checkpoint").write_text(text, "utf-8")
    assert bundle.find(prefix.parent) == prefix


def test_finds_a_checkpoint_with_dots_and_in_the_working_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundles.write(tmp_path / "model.ckpt-7", VARIABLES)
    monkeypatch.chdir(tmp_path)
    for source in (".", "model.ckpt-7", "model.ckpt-7.index"):
        assert bundle.find(source) == Path("model.ckpt-7")


def test_names_what_is_missing(prefix: Path) -> None:
    refuse(prefix.parent / "ckpt-1", "no file .*ckpt-1.index': give the folder")
    Path(f"{prefix}.data-00001-of-00002").unlink()
    refuse(prefix, "cannot read .*data-00001-of-00002'.*has 2 data files")
    for text in ("", "model_checkpoint_path: ckpt-0", "\xff"):
        (prefix.parent / "checkpoint").write_text(text, "latin-1")
        refuse(prefix.parent, "checkpoint is missing or names no checkpoint: give")
    (prefix.parent / "checkpoint").unlink()
    refuse(prefix.parent, "checkpoint is missing or names no checkpoint: give")


def test_refuses_the_first_format(tmp_path: Path) -> None:
    refuse(GOLDEN / "first_format", "first_format/old is .* first format: restore it")
    shutil.copy(GOLDEN / "first_format" / "old", tmp_path / "old-00000-of-00001")
    refuse(tmp_path / "old", "00001 is a checkpoint in .* first format: restore it in")


def test_a_flipped_bit_in_the_index_changes_nothing_unnoticed(tmp_path: Path) -> None:
    bundles.write(tmp_path / "ckpt", VARIABLES)
    for source in (tmp_path / "ckpt", GOLDEN / "wt103" / "ckpt-0"):
        shutil.copytree(source.parent, tmp_path / "copy")
        path = tmp_path / "copy" / f"{source.name}.index"
        whole, expected = path.read_bytes(), bundle.read(path)
        harmless = 0
        for bit in range(0, 8 * len(whole), 3):
            data = bytearray(whole)
            data[bit // 8] ^= 1 << bit % 8
            path.write_bytes(data)
            try:
                assert bundle.read(path) == expected
                harmless += 1
            except UserError as error:
                assert "ckpt.index" in str(error) or "ckpt-0.index" in str(error)
                assert "\n" not in str(error)
        # An empty block, the place of it, and the zeros that fill the footer.
        assert harmless < 8 * 64 / 3
        shutil.rmtree(tmp_path / "copy")


def test_a_flipped_bit_in_the_data_is_refused(tmp_path: Path) -> None:
    bundles.write(tmp_path / "ckpt", VARIABLES, shards=2)
    for path in tmp_path.glob("ckpt.data-*"):
        whole = path.read_bytes()
        for bit in range(0, 8 * len(whole), 7):
            data = bytearray(whole)
            data[bit // 8] ^= 1 << bit % 8
            path.write_bytes(data)
            refuse(tmp_path, f"{path.name} is damaged: .* does not match")
        path.write_bytes(whole)
    read_all(tmp_path)


def test_cut_files_are_refused(prefix: Path) -> None:
    index = Path(f"{prefix}.index")
    whole = index.read_bytes()
    for size in [*range(0, len(whole), 37), len(whole) - 1]:
        index.write_bytes(whole[:size])
        refuse(prefix, "ckpt-0.index is not the index of a checkpoint, or is damaged")
    index.write_bytes(whole)
    for data in prefix.parent.glob("*.data-*"):
        whole = data.read_bytes()
        for size in [*range(0, len(whole), 997), len(whole) - 1]:
            data.write_bytes(whole[:size])
            refuse(prefix, f"{data.name} is truncated within")
        data.write_bytes(whole)


def test_random_bytes_are_refused(tmp_path: Path) -> None:
    random = np.random.default_rng(3)
    for size in (0, 7, 8, 47, 48, 200):
        (tmp_path / "ckpt.index").write_bytes(random.bytes(size))
        refuse(tmp_path / "ckpt", "ckpt.index is not the index of a checkpoint")
        magic = bundles.table([])[-8:]
        (tmp_path / "ckpt.index").write_bytes(random.bytes(size) + magic)
        refuse(tmp_path / "ckpt", "ckpt.index is not the index of a checkpoint")


def header(*fields: bytes) -> tuple[bytes, bytes]:
    """Returns the record of a whole checkpoint."""
    return b"", b"".join(fields)


def one(value: Any, *more: bytes, shard: int = 0) -> tuple[bytes, bytes]:
    """Returns the record of a variable x, whose numbers are the first in their file."""
    kind = bundles.KINDS[value.dtype.name]
    return b"x", bundles.entry(value, kind, shard, 0) + b"".join(more)


X = np.arange(6, dtype=np.float32).reshape(2, 3)
HEADER = header(bundles.field(1, 1))
Change = Callable[[], bytes]
MALFORMED: dict[str, tuple[Change, str]] = {
    "twice": (lambda: bundles.table([HEADER, one(X), one(X)]), "b'x' is duplicate"),
    "order": (lambda: bundles.table([one(X), HEADER]), "out of order"),
    "compressed": (lambda: bundles.table([HEADER, one(X)], 1), "are compressed"),
    "headless": (lambda: bundles.table([one(X)]), "number of data files is missing"),
    "big-endian": (
        lambda: bundles.table([header(bundles.field(1, 1), bundles.field(2, 1))]),
        "its numbers are big-endian",
    ),
    "shard": (lambda: bundles.table([HEADER, one(X, shard=4)]), "data file 4 of 1"),
    "unknown field": (
        lambda: bundles.table([HEADER, one(X, bundles.field(9, 1))]),
        "the unknown field 9",
    ),
    "kind of field": (
        lambda: bundles.table([HEADER, (b"x", b"\x0b")]),
        "a field of kind 3",
    ),
    "cut field": (lambda: bundles.table([HEADER, (b"x", b"\x12\x05a")]), "exceeds its"),
    "cut number": (lambda: bundles.table([HEADER, (b"x", b"\x08\xff")]), "has no end"),
    "unknown rank": (
        lambda: bundles.table([HEADER, one(X, bundles.field(2, bundles.field(3, 1)))]),
        "has an unknown shape",
    ),
    "name": (lambda: bundles.table([HEADER, (b"\xff", one(X)[1])]), "can't decode"),
    "slices": (
        lambda: bundles.table([HEADER, one(X, bundles.field(7, b""))]),
        "x is stored in slices",
    ),
    "size": (
        lambda: bundles.table([HEADER, one(X, bundles.field(5, 20))]),
        r"x has 20 bytes, which is not the size of \(2, 3\) float32",
    ),
    "dtype": (
        lambda: bundles.table([HEADER, one(X, bundles.field(1, 10))]),
        "x has TensorFlow's data type 10",
    ),
    "offset": (
        lambda: bundles.table([HEADER, one(X, bundles.field(4, 2**62))]),
        "is truncated within x",
    ),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_refuses_what_is_whole_but_means_nothing(tmp_path: Path, name: str) -> None:
    make, match = MALFORMED[name]
    (tmp_path / "ckpt.data-00000-of-00001").write_bytes(X.tobytes())
    (tmp_path / "ckpt.index").write_bytes(make())
    refuse(tmp_path / "ckpt", match)


def test_reads_past_the_slices_of_other_variables(tmp_path: Path) -> None:
    (tmp_path / "ckpt.data-00000-of-00001").write_bytes(X.tobytes())
    records = [HEADER, (b"\0\1slice", one(X)[1]), one(X)]
    (tmp_path / "ckpt.index").write_bytes(bundles.table(records))
    np.testing.assert_array_equal(read_all(tmp_path / "ckpt")["x"], X)


def test_damage_under_right_checksums_is_a_users_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = bundles.block
    random = np.random.default_rng(4)

    def damaged(records: bundles.Records) -> bytes:
        data = bytearray(whole(records))
        data[random.integers(len(data))] ^= 1 << random.integers(8)
        return bytes(data)

    records = bundles.write(tmp_path / "ckpt", VARIABLES)
    monkeypatch.setattr(bundles, "block", damaged)
    refused = 0
    for _ in range(300):
        (tmp_path / "ckpt.index").write_bytes(bundles.table(records))
        try:
            read_all(tmp_path)
        except UserError:
            refused += 1
    assert refused > 200
