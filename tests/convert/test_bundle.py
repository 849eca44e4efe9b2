"""TensorFlow's checkpoints are read bit for bit, or refused in one line.

TensorFlow itself wrote the files in tests/convert/tensorflow_checkpoints; the folder
`kinds` has a variable of every dtype and a partitioned one.
"""

import contextlib
import shutil
import struct
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from tests.support.refusal import refused
from txl_jax.convert import tensorflow
from txl_jax.errors import UserError

GOLDEN = Path(__file__).with_name("tensorflow_checkpoints")


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


def test_reads_every_dtype_and_refuses_others() -> None:
    with np.load(GOLDEN / "kinds.npz") as file:
        expected = dict(file)
    others = {
        "float64": "float64 has .* data type 2",
        "string": "string has .* data type 7",
        "partitioned": "partitioned in .* does not match its checksum",
    }
    result = tensorflow.read_variables(GOLDEN / "kinds", tuple(others))
    assert result["bfloat16"].dtype == ml_dtypes.bfloat16
    result["bfloat16"] = result["bfloat16"].astype(np.float32)
    assert_same(result, {name: expected[name] for name in expected.keys() - others})
    for name, message in others.items():
        with refused(message):
            tensorflow.read_variables(GOLDEN / "kinds", tuple(others.keys() - {name}))


def test_finds_a_checkpoint_by_each_of_its_names(
    prefix: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for source in (prefix, prefix.parent, Path(f"{prefix}.index"), str(prefix)):
        assert tensorflow.find_prefix(source) == prefix
    text = 'model_checkpoint_path: "/moved/ckpt-0"\n'
    (prefix.parent / "checkpoint").write_text(text, "utf-8")
    assert tensorflow.find_prefix(prefix.parent) == prefix
    monkeypatch.chdir(GOLDEN / "kinds")  # whose name has a dot
    for name in (".", "model.ckpt-7", "model.ckpt-7.index"):
        assert tensorflow.find_prefix(name) == Path("model.ckpt-7")


# Missing and damaged files


def test_a_missing_file_is_named(prefix: Path) -> None:
    with refused("no file .*ckpt-1.index': give the prefix"):
        tensorflow.read_variables(prefix.parent / "ckpt-1")
    Path(f"{prefix}.data-00001-of-00002").unlink()
    with refused("No such file .*data-00001-of-00002'"):
        tensorflow.read_variables(prefix)
    checkpoint = prefix.parent / "checkpoint"
    name = 'model_checkpoint_path: "%s"'
    texts = (name[:-4] + "ckpt-0", name % ("x" * 5000), name % "x\0y", "\n" * 10**6)
    for text in (*texts, "\xff", None):
        checkpoint.unlink() if text is None else checkpoint.write_text(text, "latin-1")
        with refused("no file '.*index': give .* whose file 'checkpoint'"):
            tensorflow.read_variables(prefix.parent)


@pytest.mark.parametrize("step", [101, pytest.param(3, marks=pytest.mark.long)])
def test_a_flipped_bit_changes_nothing_or_is_refused(tmp_path: Path, step: int) -> None:
    shutil.copytree(GOLDEN / "narrow", tmp_path, dirs_exist_ok=True)
    expected, harmless = tensorflow.read_variables(tmp_path), 0
    for path in tmp_path.glob("ckpt-0.*"):
        whole = path.read_bytes()
        for bit in range(0, 8 * len(whole), step):
            changed = bytearray(whole)
            changed[bit // 8] ^= 1 << bit % 8
            path.write_bytes(changed)
            try:
                assert_same(tensorflow.read_variables(tmp_path), expected)
                harmless += 1
            except UserError as error:
                assert path.name in str(error) and "\n" not in str(error)
        path.write_bytes(whole)
    # Harmless places in the index: an empty block, its location, the footer's padding.
    assert harmless < 8 * 64 / step


def varint(value: int) -> bytes:
    """Returns a number in groups of 7 bits, the lowest first."""
    low, high = value % 128, value // 128
    return bytes([low + 128]) + varint(high) if high else bytes([low])


def field(number: int, value: int | bytes) -> bytes:
    """Returns a field of a protocol buffer: a number or bytes."""
    if isinstance(value, bytes):
        return varint(number * 8 + 2) + varint(len(value)) + value
    return varint(number * 8) + varint(value)


X = np.arange(6, dtype=np.float32).reshape(2, 3)
HEADER = (b"", field(1, 1))


def shape(*sizes: int) -> bytes:
    """Returns the field of a variable's shape."""
    return field(2, b"".join(field(2, field(1, size)) for size in sizes))


def entry(*more: bytes) -> tuple[bytes, bytes]:
    """Returns the record of a variable x; a later field replaces an earlier one."""
    checksum = struct.pack("<I", tensorflow.masked_crc32c(X.tobytes()))
    record = field(1, 1) + shape(2, 3) + field(5, X.nbytes) + b"\x35" + checksum
    return b"x", record + b"".join(more)


@pytest.mark.parametrize(
    "records, match",
    [
        ([HEADER, (b"x", b"\x0b")], "cannot read"),  # an unknown kind of field
        ([HEADER, entry(field(4, 2**62))], "x in .* does not match its checksum"),
        ([HEADER, entry(shape(*[2**62] * 3001))], "cannot read"),
        # Two variables in the same bytes.
        ([HEADER, entry(), (b"y", entry()[1])], "y in .* does not match its checksum"),
        # A slice of another variable is skipped.
        ([HEADER, (b"\0\1slice", entry()[1]), entry()], ""),
    ],
)
def test_malformed_records_are_refused(
    tmp_path: Path,
    records: list[tuple[bytes, bytes]],
    match: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The checksums of the table are correct."""
    (tmp_path / "ckpt.data-00000-of-00001").write_bytes(X.tobytes())
    (tmp_path / "ckpt.index").touch()
    monkeypatch.setattr(tensorflow, "_read_table", lambda _: dict(records))
    with refused(match) if match else contextlib.nullcontext():
        assert_same(tensorflow.read_variables(tmp_path / "ckpt"), {"x": X})


def table_of(block: bytes, times: int) -> bytes:
    """Returns a table whose index has the location of its only block many times."""
    offsets = struct.pack("<II", 0, 1)

    def seal(entries: bytes) -> bytes:
        content = entries + offsets + b"\0"
        return content + struct.pack("<I", tensorflow.masked_crc32c(content))

    sealed = seal(block)
    location = varint(0) + varint(len(sealed) - 5)
    row = varint(0) + varint(0) + varint(len(location)) + location
    index = seal(row * times)
    footer = varint(0) * 2 + varint(len(sealed)) + varint(len(index) - 5)
    return sealed + index + footer.ljust(40, b"\0") + tensorflow.MAGIC


def test_a_table_takes_memory_proportional_to_its_size() -> None:
    """Keys share their starts, and an index could name a block many times."""
    long = varint(0) + varint(9000) + varint(1) + b"k" * 9000 + b"x"
    more = [varint(9000) + varint(2) + varint(0) + b"%02d" % n for n in range(99)]
    table = tensorflow._read_table(table_of(long + b"".join(more), 1))
    assert len(table) == 100 and max(map(len, [*table][1:])) == 1002
    with pytest.raises(ValueError, match="do not match their checksum"):
        tensorflow._read_table(table_of(long, 2))
