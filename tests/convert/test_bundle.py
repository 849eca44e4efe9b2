"""TensorFlow's checkpoints are read bit for bit, or refused in one line.

The files in tests/convert/tensorflow_checkpoints were written by TensorFlow itself: see
`tests.convert.golden_tensorflow`.
"""

import shutil
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from tests.convert import bundles
from tests.convert.bundles import field, table
from tests.support.refusal import refused
from txl_jax.convert import bundle, sstable
from txl_jax.errors import UserError

GOLDEN = Path(__file__).with_name("tensorflow_checkpoints")
CASES = sorted(path.stem for path in GOLDEN.glob("*.npz") if path.stem != "kinds")

rng = np.random.default_rng(0)
VARIABLES: dict[str, Any] = {
    "global_step": np.int64(-5),
    "empty": np.zeros((0, 3), np.float32),
    "layer/a": rng.normal(size=(3, 4)).astype(np.float32),
    "layer/b": rng.normal(size=7).astype(ml_dtypes.bfloat16),
    **{f"many/{i}": np.full((i, 2), i, np.int32) for i in range(1, 9)},
}


def assert_same(result: dict[str, Any], expected: dict[str, Any]) -> None:
    """Compares two sets of variables: types, shapes and bits."""
    assert set(result) == set(expected)
    for name, value in expected.items():
        assert (result[name].dtype, result[name].shape) == (value.dtype, value.shape)
        assert result[name].tobytes() == value.tobytes(), name


@pytest.fixture
def prefix(tmp_path: Path) -> Path:
    """Returns the prefix of a copy of TensorFlow's checkpoint in two data files."""
    shutil.copytree(GOLDEN / "wt103_large", tmp_path / "model")
    return tmp_path / "model" / "ckpt-0"


# Whole checkpoints


@pytest.mark.parametrize("name", CASES)
def test_reads_checkpoints_of_tensorflow(name: str) -> None:
    expected = np.load(GOLDEN / f"{name}.npz")
    result = bundle.read(GOLDEN / name)
    assert set(result) == set(expected["names"])
    row = np.concatenate([result[name].ravel() for name in expected["names"]])
    assert row.dtype == expected["values"].dtype
    assert row.tobytes() == expected["values"].tobytes()


def test_reads_every_dtype_and_refuses_others() -> None:
    with np.load(GOLDEN / "kinds.npz") as file:
        expected = dict(file)
    wanted = ("float32", "float16", "bfloat16", "int32", "int64", "scalar", "empty")
    result = bundle.read(GOLDEN / "kinds", wanted.__contains__)
    assert result["bfloat16"].dtype == ml_dtypes.bfloat16
    result["bfloat16"] = result["bfloat16"].astype(np.float32)
    assert_same(result, {name: expected[name] for name in wanted})
    for name, message in (
        ("float64", "float64 has .* data type 2; supp"),
        ("string", "string has .* data type 7; supp"),
        ("partitioned", "partitioned has 0 bytes, which is not the size"),
    ):
        with refused(message):
            bundle.read(GOLDEN / "kinds", name.__eq__)


@pytest.mark.parametrize("shards", [1, 3])
def test_reads_checkpoints_of_the_tests(tmp_path: Path, shards: int) -> None:
    bundles.write(tmp_path / "ckpt", VARIABLES, shards)
    assert_same(bundle.read(tmp_path), VARIABLES)


def test_finds_a_checkpoint_by_each_of_its_names(prefix: Path) -> None:
    for source in (prefix, prefix.parent, Path(f"{prefix}.index"), str(prefix)):
        assert bundle.find(source) == prefix
    text = 'model_checkpoint_path: "/moved/ckpt-0"\n'
    (prefix.parent / "checkpoint").write_text(text, "utf-8")
    assert bundle.find(prefix.parent) == prefix


def test_finds_a_checkpoint_with_dots_in_the_working_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundles.write(tmp_path / "model.ckpt-7", VARIABLES)
    monkeypatch.chdir(tmp_path)
    for source in (".", "model.ckpt-7", "model.ckpt-7.index"):
        assert bundle.find(source) == Path("model.ckpt-7")


# Missing and damaged files


def test_a_missing_file_is_named(prefix: Path) -> None:
    with refused("no file .*ckpt-1.index': give the folder"):
        bundle.read(prefix.parent / "ckpt-1")
    Path(f"{prefix}.data-00001-of-00002").unlink()
    with refused("cannot read .*data-00001-of-00002'.*has 2 data files"):
        bundle.read(prefix)
    checkpoint = prefix.parent / "checkpoint"
    for text in ("", "model_checkpoint_path: ckpt-0", "\xff"):
        checkpoint.write_text(text, "latin-1")
        with refused("checkpoint is missing or names no checkpoint: give"):
            bundle.read(prefix.parent)
    checkpoint.unlink()
    with refused("checkpoint is missing or names no checkpoint: give"):
        bundle.read(prefix.parent)


def flip(data: bytes, bit: int) -> bytes:
    changed = bytearray(data)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


@pytest.mark.parametrize("step", [101, pytest.param(3, marks=pytest.mark.long)])
def test_a_flipped_bit_in_the_index_changes_nothing_or_is_refused(
    tmp_path: Path, step: int
) -> None:
    bundles.write(tmp_path / "ckpt", VARIABLES)
    path = tmp_path / "ckpt.index"
    whole, harmless = path.read_bytes(), 0
    for bit in range(0, 8 * len(whole), step):
        path.write_bytes(flip(whole, bit))
        try:
            assert_same(bundle.read(path), VARIABLES)
            harmless += 1
        except UserError as error:
            assert "ckpt.index" in str(error) and "\n" not in str(error)
    # An empty block, its location, and the zeros that fill the footer.
    assert harmless < 8 * 64 / step


@pytest.mark.parametrize("step", [211, pytest.param(7, marks=pytest.mark.long)])
def test_a_flipped_bit_in_the_data_is_refused(tmp_path: Path, step: int) -> None:
    bundles.write(tmp_path / "ckpt", VARIABLES, shards=2)
    for path in tmp_path.glob("ckpt.data-*"):
        whole = path.read_bytes()
        for bit in range(0, 8 * len(whole), step):
            path.write_bytes(flip(whole, bit))
            with refused(f"{path.name} is damaged: .* does not match"):
                bundle.read(tmp_path)
        path.write_bytes(whole)


def test_truncated_files_are_refused(prefix: Path) -> None:
    index = Path(f"{prefix}.index")
    whole = index.read_bytes()
    for size in (0, 7, 47, 48, len(whole) // 2, len(whole) - 1):
        index.write_bytes(whole[:size])
        with refused("ckpt-0.index is not the index of a checkpoint, or is damaged"):
            bundle.read(prefix)
    index.write_bytes(whole)
    for data in prefix.parent.glob("*.data-*"):
        whole = data.read_bytes()
        for size in (0, len(whole) // 2, len(whole) - 1):
            data.write_bytes(whole[:size])
            with refused(f"{data.name} is truncated within"):
                bundle.read(prefix)
        data.write_bytes(whole)


def test_random_bytes_are_refused(tmp_path: Path) -> None:
    random, magic = np.random.default_rng(3), table([])[-8:]
    for size in (0, 7, 8, 47, 48, 200):
        for end in (b"", magic):
            (tmp_path / "ckpt.index").write_bytes(random.bytes(size) + end)
            with refused("ckpt.index is not the index of a checkpoint"):
                bundle.read(tmp_path / "ckpt")


@pytest.mark.parametrize("count", [60, pytest.param(1000, marks=pytest.mark.long)])
def test_damage_with_valid_checksums_is_a_user_error(
    tmp_path: Path, count: int
) -> None:
    random = np.random.default_rng(4)

    def damaged(records: bundles.Records) -> bytes:
        data = bundles.block(records)
        return flip(data, int(random.integers(8 * len(data))))

    records = bundles.write(tmp_path / "ckpt", VARIABLES)
    refusals = 0
    for _ in range(count):
        (tmp_path / "ckpt.index").write_bytes(table(records, block=damaged))
        try:
            bundle.read(tmp_path)
        except UserError:
            refusals += 1
    assert refusals > count / 2


X = np.arange(6, dtype=np.float32).reshape(2, 3)
HEADER = (b"", field(1, 1))
ENTRY = bundles.entry(X, bundles.KINDS["float32"], 0, 0)


def entry(*more: bytes) -> tuple[bytes, bytes]:
    """Returns the record of a variable x; a later field replaces an earlier one."""
    return b"x", ENTRY + b"".join(more)


MALFORMED: dict[str, tuple[bytes, str]] = {
    "no header": (table([entry()]), "it has no data files"),
    "big-endian": (table([(b"", field(1, 1) + field(2, 1))]), "or big-endian ones"),
    "shard": (table([HEADER, entry(field(3, 4))]), "x is in data file 4 of 1"),
    "kind of field": (table([HEADER, (b"x", b"\x0b")]), "is damaged"),
    "cut field": (table([HEADER, (b"x", b"\x12\x05a")]), "is damaged"),
    "unknown rank": (table([HEADER, entry(field(2, field(3, 1)))]), "unknown shape"),
    "negative": (table([HEADER, entry(field(4, 2**64 - 1))]), "a negative offset"),
    "name": (table([HEADER, (b"\xff", ENTRY)]), "can't decode"),
    "size": (
        table([HEADER, entry(field(5, 20))]),
        r"x has 20 bytes, which is not the size of \(2, 3\) float32",
    ),
    "dtype": (table([HEADER, entry(field(1, 10))]), "x has TensorFlow's data type 10"),
    "offset": (table([HEADER, entry(field(4, 2**62))]), "is truncated within x"),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_malformed_records_are_refused(tmp_path: Path, name: str) -> None:
    index, match = MALFORMED[name]
    (tmp_path / "ckpt.data-00000-of-00001").write_bytes(X.tobytes())
    (tmp_path / "ckpt.index").write_bytes(index)
    with refused(match):
        bundle.read(tmp_path / "ckpt")


def test_slices_of_other_variables_are_skipped(tmp_path: Path) -> None:
    (tmp_path / "ckpt.data-00000-of-00001").write_bytes(X.tobytes())
    records = [HEADER, (b"\0\1slice", ENTRY), entry()]
    (tmp_path / "ckpt.index").write_bytes(table(records))
    assert_same(bundle.read(tmp_path / "ckpt"), {"x": X})


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"", 0),
        (b"123456789", 0xE3069283),
        # RFC 3720, appendix B.4.
        (bytes(32), 0x8A9136AA),
        (b"\xff" * 32, 0x62A8AB43),
        (bytes(range(32)), 0x46DD794E),
    ],
)
def test_checksums_have_the_published_values(data: bytes, expected: int) -> None:
    assert bundles.crc32c(data) == expected
    assert sstable.masked_crc32c(data) == bundles.masked(data)
