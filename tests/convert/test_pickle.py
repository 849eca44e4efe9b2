"""Files of torch.save and pickle are read without executing their content."""

import builtins
import contextlib
import io
import pickle
import struct
import subprocess
import sys
import tracemalloc
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.convert import recorded
from tests.support.refusal import refusal
from txl_jax.convert import pickle as reader
from txl_jax.convert.pickle import Object, read_pickle
from txl_jax.convert.pytorch import arrays
from txl_jax.errors import UserError

RECORDED = recorded.FOLDER
MAGIC = 0x1950A86A20F9469CFC6C  # begins torch.save's files before zip archives


@pytest.mark.parametrize("name", ["kinds.stream.pt", "kinds.zip.pt"])
def test_every_dtype_and_a_view(name: str) -> None:
    path = RECORDED / name
    result = arrays(read_pickle(path), path)
    for kind in ("float16", "bfloat16", "float64", "int64"):
        np.testing.assert_array_equal(result[f"torch.{kind}"], np.arange(-3, 3))
    np.testing.assert_array_equal(result["torch.bool"], np.arange(-3, 3) != 0)
    view = np.arange(24).reshape(4, 6)[1:3, ::2]
    np.testing.assert_array_equal(result["view"], view)
    assert result["none"].shape == (0, 4)


def test_unknown_classes_are_inert_and_keep_their_state() -> None:
    saved = read_pickle(RECORDED / "nvidia.pt")
    assert isinstance(saved["args"], Object)
    assert saved["args"].state == {"dataset": "wt103", "lr": 0.01, "cuda": True}
    assert saved["vocab"].state["idx2sym"] == recorded.WORDS
    assert isinstance(saved["vocab"].state["counter"], Object)
    assert isinstance(saved["best_val_loss"], Object)
    assert saved["optimizer_state"]["state"][0]["exp_avg"].shape == (2, 3)
    assert not {"mem_transformer", "utils", "utils.vocabulary"} & set(sys.modules)


@pytest.mark.parametrize("protocol", [1, 2])
def test_pickles_of_python_2(protocol: int) -> None:
    vocab = read_pickle(RECORDED / f"cache{protocol}.pkl")
    assert vocab.state["idx2sym"] == recorded.WORDS
    assert list(vocab.state["sym2idx"]) == recorded.WORDS
    assert vocab.state["lower_case"] is False
    assert isinstance(vocab.state["old"], Object)
    *_, large, number, text = vocab.state["odd"]
    assert (large, number, text) == (2**70, 1.5, "café")


# Files that would execute code


class Evil:
    """Unpickles to a call of any function."""

    def __init__(self, *reduced: Any) -> None:
        self.reduced = reduced

    def __reduce__(self) -> Any:
        return self.reduced


def stacked(module: str, name: str, text: str) -> bytes:
    """Returns a pickle that calls module.name(text) through STACK_GLOBAL."""
    parts = [b"\x8c" + bytes([len(x)]) + x.encode() for x in (module, name, text)]
    return b"\x80\x04" + parts[0] + parts[1] + b"\x93(" + parts[2] + b"tR."


def payloads(mark: str) -> dict[str, bytes]:
    """Returns pickles that call functions to create the file `mark`."""
    touch, code = f"touch {mark}", f"open({mark!r}, 'w')"
    text = b"S'" + touch.encode() + b"'\n"
    return {
        "eval": pickle.dumps(Evil(builtins.eval, (code,)), 0),
        "stack qualified": stacked("builtins", "eval.__call__", code),
        "inst": b"(" + text + b"ios\nsystem\n.",
        "build on a function": b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n(N}S"
        b"'__code__'\nS'x'\nstb.",
        "torch": b"\x80\x02ctorch.serialization\nload\n(" + text + b"tR.",
    }  # fmt: skip


def stream_of(main: bytes, keys: Any = (), storages: bytes = b"") -> bytes:
    """Returns the layout before zip archives, around a pickle."""
    head = (MAGIC, 1001, {"protocol_version": 1001, "little_endian": True})
    parts = [*(pickle.dumps(part, 2) for part in head), main]
    return b"".join([*parts, pickle.dumps(list(keys), 2), storages])


def zip_of(main: bytes, entries: Any = (), **config: Any) -> bytes:
    """Returns the zip layout around a pickle."""
    with io.BytesIO() as file:
        with zipfile.ZipFile(file, "w", **config) as archive:
            archive.writestr("archive/data.pkl", main)
            for name, content in entries:
                archive.writestr(f"archive/{name}", content)
        return file.getvalue()


LAYOUTS: dict[str, Callable[[bytes], bytes]] = {
    "bare": lambda main: main,
    "stream": stream_of,
    "zip": zip_of,
}


def read_or_refuse(path: Path) -> str:
    """Reads a file without weights, or refuses it; returns the error line."""
    message = refusal(lambda: arrays(read_pickle(path), path))
    assert str(path) in message and len(message) < 1000
    return message


@pytest.mark.parametrize("name", payloads(""))
def test_nothing_is_executed(name: str, tmp_path: Path) -> None:
    mark, path = tmp_path / "mark", tmp_path / "file"
    modules = set(sys.modules)
    for layout in LAYOUTS.values():
        path.write_bytes(layout(payloads(str(mark))[name]))
        read_or_refuse(path)
        fresh = set(sys.modules) - modules - {"encodings.cp437"}  # for zip archives
        assert not mark.exists() and not fresh


# Damaged and hostile files


def tensor_of(
    count: int, offset: Any = 0, shape: Any = (2, 3), strides: Any = (3, 1)
) -> bytes:
    """Returns the pickle of {"x": a tensor} over a storage of `count` floats."""

    def plain(value: Any) -> bytes:
        return pickle.dumps(value, 2)[2:-1]

    return (
        b"\x80\x02}X\x01\x00\x00\x00xctorch._utils\n_rebuild_tensor_v2\n("
        b"(X\x07\x00\x00\x00storagectorch\nFloatStorage\nX\x01\x00\x00\x000"
        b"X\x03\x00\x00\x00cpu" + plain(count) + b"tQ"
        b"" + plain(offset) + plain(shape) + plain(strides) + b"\x89}tRs."
    )


def files_of(main: bytes) -> list[bytes]:
    """Returns a stream and an archive of a pickle and six floats."""
    numbers = np.arange(6, dtype="<f4").tobytes()
    stream = stream_of(main, ["0"], struct.pack("<q", 6) + numbers)
    return [stream, zip_of(main, [("data/0", numbers)])]


HUGE = 2**62
OURS, NUMPYS = "exceeds its storage", "or is damaged"
VIEWS: list[tuple[dict[str, Any], str]] = [
    ({}, ""),  # a valid one
    ({"shape": (2, 4), "strides": (4, 1)}, NUMPYS),
    ({"offset": 1}, NUMPYS),
    ({"offset": -1}, NUMPYS),
    ({"shape": (7, 1), "strides": (0, 0)}, OURS),
    ({"shape": (5,), "strides": (2**60,)}, OURS),  # 2^64 bytes to the last one
    ({"shape": (2,), "strides": (-1,), "offset": 1}, OURS),
    ({"shape": (2, 3, 1)}, NUMPYS),
    ({"shape": (HUGE,) * 32, "strides": (HUGE,) * 32}, NUMPYS),
    ({"shape": ("2", 3)}, NUMPYS),
]


@pytest.mark.parametrize("view, reason", VIEWS)
def test_only_views_inside_their_storage_are_read(
    view: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    path = tmp_path / "file"
    for content in files_of(tensor_of(6, **view)):
        path.write_bytes(content)
        if not reason:
            x = arrays(read_pickle(path), path)["x"]
            np.testing.assert_array_equal(x, np.arange(6).reshape(2, 3))
        else:
            message = refusal(lambda: arrays(read_pickle(path), path))
            assert str(path) in message and reason in message


@pytest.mark.parametrize("claim", [5, 7, HUGE, 2**70, -1])
def test_a_wrong_size_of_a_storage_is_refused(claim: Any, tmp_path: Path) -> None:
    for content in files_of(tensor_of(claim)):
        (path := tmp_path / "file").write_bytes(content)
        read_or_refuse(path)


@pytest.mark.parametrize("name", ["plain.zip.pt", "plain.module.stream.pt"])
def test_a_truncated_file_is_refused(name: str, tmp_path: Path) -> None:
    whole = (RECORDED / name).read_bytes()
    for end in (0, 60, len(whole) // 2, -1):
        (path := tmp_path / "cut.pt").write_bytes(whole[:end])
        read_or_refuse(path)


CLAIMS = {
    "text": b"\x80\x04\x8d" + struct.pack("<Q", 2**63 - 1) + b"x.",
    "frame": b"\x80\x04\x95" + struct.pack("<Q", 2**62) + b"N.",
    "memory": b"\x80\x02Nr" + struct.pack("<I", 2**32 - 1) + b".",
    "decimal": b"L" + b"9" * 100_000 + b"L\n.",
    "id": b"\x80\x02K\x01Q.",
    "array": b"\x80\x05\x96" + struct.pack("<Q", 2**33) + b".",
    "storage": tensor_of(577_000_000),
    "storages": b"\x80\x02"
    + b"".join(
        b"(U\x07storageU\x05FloatU\x03" + b"%03d" % n + b"NM\xff\xfftQ0"
        for n in range(300)
    )
    + b"N.",
}


@pytest.mark.parametrize("name", CLAIMS)
def test_memory_is_proportional_to_the_file(name: str, tmp_path: Path) -> None:
    for layout, wrap in LAYOUTS.items():
        (path := tmp_path / layout).write_bytes(wrap(CLAIMS[name]))
        tracemalloc.start()
        try:
            read_or_refuse(path)
        finally:
            peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
        assert peak < 5_000_000


# Opcodes that many times make large values of few bytes.
REPEATED = {
    "mark": b"(",
    "list": b"]",
    "dict": b"}",
    "set": b"\x8f",
    "frozenset": b"(\x91",
    "memo": b"\x94",
    "tuple": b"\x85",
    "instance": b"h\x00)\x81",
    "item": b"}h\x01Ns",
    "view": b"h\x03h\x04R",
}
MULTIPLE = 256  # bytes of memory for a byte of a file
READ_EACH = """
import resource, sys
from pathlib import Path
from txl_jax.convert.pickle import read_pickle
from txl_jax.errors import UserError
for path in map(Path, sys.argv[2:]):
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    limit = used + int(sys.argv[1]) * path.stat().st_size
    resource.setrlimit(resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))
    try:
        print("read", type(read_pickle(path)).__name__)
    except UserError as error:
        print(error)
    resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY,) * 2)
"""


def test_memory_is_a_multiple_of_the_file(tmp_path: Path) -> None:
    dims = b"(" + b"K\x01" * 64 + b"t"
    head = (
        b"\x80\x02cx\ny\nq\x00U\x01aq\x01ctorch._utils\n_rebuild_tensor_v2\nq\x03"
        b"((U\x07storageU\x05FloatU\x010NK\x01tQK\x00" + dims + dims + b"tq\x04"
    )
    for name, opcodes in REPEATED.items():
        main = head + opcodes * (100_000 // len(opcodes)) + b"."
        content = stream_of(main, ["0"], struct.pack("<q", 1) + bytes(4))
        (tmp_path / name).write_bytes(content)
    paths = map(str, sorted(tmp_path.iterdir()))
    command = [sys.executable, "-c", READ_EACH, str(MULTIPLE), *paths]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    lines = done.stdout.splitlines()
    refused = [line for line in lines if not line.startswith("read ")]
    assert len(lines) == len(REPEATED) and "pop from empty" in refused.pop()
    assert not refused


class Counted(Object):
    """An inert instance that counts the work with it."""

    work = 0

    def __init__(self, *args: Any) -> None:
        Counted.work += len(args)

    def __hash__(self) -> int:
        Counted.work += 1
        return 0

    def __repr__(self) -> str:
        Counted.work += 1
        return "x"


def doubled(value: bytes, depth: int, pair: bytes = b"\x86") -> bytes:
    """Returns opcodes of a pair of a pair of .. a value, of 2 bytes for a level."""
    return value + (b"2" + pair) * depth


INSTANCE = b"cx\ny\n)R"
MANY = b"(" + b"N" * 5000 + b"tq\x01"
SLOW = {
    "a key": b"}" + doubled(INSTANCE, 16) + b"Ns",
    "a key in a call": b"ccollections\nOrderedDict\n]" + doubled(INSTANCE, 16)
    + b"N\x86a\x85R",
    "an item of a set": b"\x8f(" + doubled(INSTANCE, 16) + b"\x90",
    "a frozen item": b"(" + doubled(INSTANCE, 16) + b"\x91",
    "arguments": b"cx\ny\nq\x00" + MANY + b"0" + b"h\x00h\x01R0" * 1000,
    "new arguments": b"cx\ny\nq\x00" + MANY + b"0" + b"h\x00h\x01\x810" * 1000,
    "a name": b"(U\x07storageU\x05Float" + doubled(INSTANCE, 16) + b"NK\x00tQ",
}  # fmt: skip


@pytest.mark.parametrize("name", SLOW)
def test_work_is_proportional_to_the_file(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader, "Object", Counted)
    monkeypatch.setattr(Counted, "work", 0)
    content = b"\x80\x02" + SLOW[name] + b"."
    (path := tmp_path / "file").write_bytes(content)
    with contextlib.suppress(UserError):
        read_pickle(path)
    assert Counted.work < 2 * len(content)


def test_arrays_with_many_names_are_refused(tmp_path: Path) -> None:
    """Each submodule or name takes a few bytes of the file."""
    module = b"cx\ny\n)R}U\x08_modules}(U\x01a%sU\x01b%susb"
    levels = b"cx\ny\n)Rq\x000"
    for n in range(1, 40):
        below = b"h" + bytes([n - 1])
        levels += module % (below, below) + b"q" + bytes([n]) + b"0"
    (path := tmp_path / "file").write_bytes(b"\x80\x02" + levels + b"h\x27.")
    saved = read_pickle(path)
    assert "under too many names" in refusal(arrays, saved, path)
    x = np.zeros(path.stat().st_size // 8)
    assert len(arrays(dict.fromkeys("ab", x), path)) == 2, "they may be tied"
    assert "under too many names" in refusal(arrays, dict.fromkeys("abcde", x), path)


def test_keys_that_collide_are_dropped(tmp_path: Path) -> None:
    """A hash of an int is its remainder by 2^61 - 1."""
    keys = (1, 2**64, (2**61 - 1) * 2**9, "a", None, b"b", (1, 2), 1.5)
    (path := tmp_path / "file").write_bytes(pickle.dumps(dict.fromkeys(keys, 0), 4))
    assert read_pickle(path) == {1: 0, "a": 0}


def test_a_list_of_items_is_read_once(tmp_path: Path) -> None:
    called = b"ccollections\nOrderedDict\nq\x00]q\x01U\x01aN\x86a0(h\x00h\x01\x85R"
    (path := tmp_path / "file").write_bytes(b"\x80\x02" + called + b"h\x00h\x01\x85Rt.")
    assert read_pickle(path) == ({"a": None}, {})


def test_arrays_and_functions_do_not_change(tmp_path: Path) -> None:
    """Each such opcode could take as much time as the largest array or dict."""
    storage = b"(U\x07storageU\x05FloatU\x010NK\x01tQ)K\x01s."
    function = b"ctorch._utils\n_rebuild_tensor_v2\n}U\x01aK\x01sb."
    (path := tmp_path / "file").write_bytes(b"\x80\x02" + storage + bytes(4))
    assert "read-only" in read_or_refuse(path)
    path.write_bytes(b"\x80\x02" + function)
    read_or_refuse(path)
    assert not vars(reader._view)


@pytest.mark.parametrize(
    "content",
    [
        zip_of(tensor_of(6), [("data/0", b"x" * 24)], compression=zipfile.ZIP_DEFLATED),
        zip_of(tensor_of(6)),
        stream_of(tensor_of(6), ["1"], struct.pack("<q", 6) + b"x" * 24),
        stream_of(tensor_of(6)),
        pickle.dumps(MAGIC, 2),
        b"PK\x05\x06" + bytes(18),
    ],
)
def test_other_files_are_refused(content: bytes, tmp_path: Path) -> None:
    (path := tmp_path / "file").write_bytes(content)
    read_or_refuse(path)
