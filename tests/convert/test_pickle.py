"""Files of torch.save and pickle are read without executing their content."""

import builtins
import io
import os
import pickle
import pickletools
import struct
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.convert import recorded
from txl_jax.convert.keys import arrays
from txl_jax.convert.pickle import MAGIC, Object, Unpickler, read
from txl_jax.errors import UserError

RECORDED = recorded.FOLDER


def refusal(call: Callable[..., Any], *args: Any) -> str:
    """Returns the message of the UserError that call(*args) raises: one line."""
    with pytest.raises(UserError) as caught:
        call(*args)
    message = str(caught.value)
    assert message and "\n" not in message and len(message) < 1000
    return message


# What torch.save writes


@pytest.mark.parametrize("layout", ["stream", "zip"])
@pytest.mark.parametrize("kind", ["", ".module"])
@pytest.mark.parametrize("name", recorded.PAPER)
def test_weights_come_back_bit_for_bit(name: str, kind: str, layout: str) -> None:
    path = RECORDED / f"{name}{kind}.{layout}.pt"
    result, expected = arrays(read(path), path), recorded.paper_state(name)
    assert set(result) == set(expected)
    for key, array in expected.items():
        assert result[key].dtype == np.float32
        assert result[key].tobytes() == array.tobytes(), key


@pytest.mark.parametrize("layout", ["stream", "zip"])
def test_every_kind_of_number_and_a_view(layout: str) -> None:
    path = RECORDED / f"kinds.{layout}.pt"
    result = arrays(read(path), path)
    for kind in ("float16", "bfloat16", "float64", "int64"):
        np.testing.assert_array_equal(result[f"torch.{kind}"], np.arange(-3, 3))
    np.testing.assert_array_equal(result["torch.bool"], np.arange(-3, 3) != 0)
    view = np.arange(24).reshape(4, 6)[1:3, ::2]
    np.testing.assert_array_equal(result["view"], view)
    assert result["none"].shape == (0, 4)


def test_nothing_of_the_file_was_imported() -> None:
    read(RECORDED / "plain.module.stream.pt")
    read(RECORDED / "nvidia.pt")
    assert not {"mem_transformer", "utils", "utils.vocabulary"} & set(sys.modules)


def test_unknown_classes_are_inert_and_keep_their_state() -> None:
    saved = read(RECORDED / "nvidia.pt")
    assert isinstance(saved["args"], Object)
    assert saved["args"].name == "argparse.Namespace"
    assert saved["args"].state == {"dataset": "wt103", "lr": 0.01, "cuda": True}
    assert saved["vocab"].name == "utils.vocabulary.Vocab"
    assert saved["vocab"].state["idx2sym"] == recorded.WORDS
    assert saved["vocab"].state["counter"] == dict.fromkeys(recorded.WORDS, 1)
    assert isinstance(saved["best_val_loss"], Object)
    moment = saved["optimizer_state"]["state"][0]["exp_avg"]
    assert moment.open(RECORDED / "nvidia.pt").shape == (2, 3)


@pytest.mark.parametrize("protocol", [1, 2])
def test_pickles_of_python_2(protocol: int) -> None:
    vocab = read(RECORDED / f"cache{protocol}.pkl")
    assert vocab.state["idx2sym"] == recorded.WORDS
    assert list(vocab.state["sym2idx"]) == recorded.WORDS
    assert vocab.state["lower_case"] is False
    assert isinstance(vocab.state["old"], Object)
    *_, large, number, text = vocab.state["odd"]
    assert (large, number, text) == (2**70, 1.5, "café")


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_plain_values_come_back(protocol: int, tmp_path: Path) -> None:
    value = {
        "numbers": [0, 1, -1, 255, 256, 65536, 2**31, -(2**40), 2**2100, 1.5, -0.0],
        "texts": ["", "a\nb", "é", "\ud800", "'", "x" * 300],
        "others": [None, True, False, (), (1,), (1, 2), (1, 2, 3), tuple(range(9))],
        3: {},
        None: [[]],
    }
    value["again"] = [value["texts"], value["texts"]]
    path = tmp_path / "value.pkl"
    path.write_bytes(pickle.dumps(value, protocol))
    result = read(path)
    assert result == value
    assert result["again"][0] is result["texts"]


# What would run


class Evil:
    """Unpickles to a call of anything."""

    def __init__(self, *reduced: Any) -> None:
        self.reduced = reduced

    def __reduce__(self) -> Any:
        return self.reduced


def stacked(module: str, name: str, *args: str) -> bytes:
    """Returns a pickle that calls module.name(*args) through STACK_GLOBAL."""

    def text(value: str) -> bytes:
        return b"\x8c" + bytes([len(value)]) + value.encode()

    return (
        b"\x80\x04" + text(module) + text(name) + b"\x93("
        b"" + b"".join(map(text, args)) + b"tR."
    )


def payloads(mark: str) -> dict[str, bytes]:
    """Returns pickles each of which makes the file `mark` where a pickle may run."""
    touch = f"touch {mark}"
    code = f"open({mark!r}, 'w')"
    line = touch.encode()
    written = code.encode()
    return {
        "os.system": pickle.dumps(Evil(os.system, (touch,))),
        "eval": pickle.dumps(Evil(builtins.eval, (code,)), 0),
        "exec": pickle.dumps(Evil(builtins.exec, (code,)), 2),
        "subprocess": pickle.dumps(Evil(subprocess.call, (["touch", mark],))),
        "nested": pickle.dumps(
            Evil(getattr, (Evil(__import__, ("os",)), "system")), 2
        ).removesuffix(b".")
        + b"(X" + struct.pack("<I", len(line)) + line + b"tR.",
        "state": pickle.dumps(Evil(Evil, (1,), None, None, iter([(1, 2)]))),
        "stack": stacked("posix", "system", touch),
        "stack qualified": stacked("builtins", "eval.__call__", code),
        "inst": b"(S'" + line + b"'\nios\nsystem\n.",
        "obj": b"(cos\nsystem\nS'" + line + b"'\no.",
        "newobj": b"\x80\x02cos\nsystem\nS'" + line + b"'\n\x85\x81.",
        "newobj_ex": b"\x80\x04cos\nsystem\nS'" + line + b"'\n\x85}\x92.",
        "build": b"\x80\x02ccollections\nOrderedDict\n)R}S'__setstate__'\ncos\nsystem"
        b"\nsbS'" + line + b"'\nb.",
        "build slots": b"\x80\x02ccollections\nOrderedDict\n(N}S'__class__'\ncos\n"
        b"system\nstb.",
        "build on a function": b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n(N}S"
        b"'__code__'\nS'x'\nstb.",
        "copyreg": b"\x80\x02ccopyreg\n_reconstructor\ncos\nsystem\nS'" + line + b"'\n"
        b"N\x87R.",
        "copyreg extension": b"\x80\x02ccopyreg\nadd_extension\n(S'os'\nS'system'\n"
        b"K\x01tR0\x82\x01S'" + line + b"'\n\x85R.",
        "extension 2": b"\x80\x02\x83\x01\x00.",
        "extension 4": b"\x80\x02\x84\x01\x00\x00\x00.",
        "append": b"\x80\x02cos\nsystem\n)\x81}S'append'\ncos\nsystem\nsbS'" + line
        + b"'\na.",
        "key": b"\x80\x02}cos\nsystem\nS'" + line + b"'\n\x85RK\x01s.",
        "partial": b"\x80\x02cfunctools\npartial\n(cos\nsystem\nS'" + line
        + b"'\ntR)R.",
        "torch": b"\x80\x02ctorch.serialization\nload\n(S'" + written + b"'\ntR.",
    }  # fmt: skip


NAMES = list(payloads(""))


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


@pytest.mark.parametrize("name", NAMES)
def test_the_payloads_are_live(name: str, tmp_path: Path) -> None:
    """At least those that pickle itself runs to the end; the others are oddities."""
    dead = {"state", "build", "build slots", "build on a function", "copyreg"}
    dead |= {"extension 2", "extension 4", "append", "torch", "newobj", "newobj_ex"}
    dead |= {"copyreg extension", "obj"}
    mark = tmp_path / "mark"
    script = "import pickle, sys; pickle.loads(sys.stdin.buffer.read())"
    payload = payloads(str(mark))[name]
    subprocess.run(
        [sys.executable, "-c", script], input=payload, stderr=subprocess.DEVNULL
    )
    assert mark.exists() or name in dead


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", NAMES)
def test_nothing_runs(name: str, layout: str, tmp_path: Path) -> None:
    mark, path = tmp_path / "mark", tmp_path / "file"
    path.write_bytes(LAYOUTS[layout](payloads(str(mark))[name]))
    modules = set(sys.modules)
    try:
        value = read(path)
    except UserError as error:
        assert "\n" not in str(error)
    else:
        assert "neither a state dict" in refusal(arrays, value, path)
    assert not mark.exists()
    assert set(sys.modules) == modules


def test_only_reviewed_opcodes_are_interpreted() -> None:
    calls = {"EXT1", "EXT2", "EXT4", "NEWOBJ_EX"}
    allocate = {"BYTEARRAY8", "NEXT_BUFFER", "READONLY_BUFFER"}
    known = {ord(opcode.code): opcode.name for opcode in pickletools.opcodes}
    handled = {known[code] for code in Unpickler.dispatch}
    assert handled == set(known.values()) - calls - allocate


# What is damaged, or claims too much


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


def file_of(
    layout: str, main: bytes, floats: int, declared: int | None = None
) -> bytes:
    """Returns a file of a pickle and a storage of so many floats."""
    numbers = np.arange(floats, dtype="<f4").tobytes()
    if layout == "zip":
        return zip_of(main, [("data/0", numbers)])
    declared = floats if declared is None else declared
    return stream_of(main, ["0"], struct.pack("<q", declared) + numbers)


@pytest.mark.parametrize("layout", ["stream", "zip"])
def test_the_honest_file(layout: str, tmp_path: Path) -> None:
    (path := tmp_path / "file").write_bytes(file_of(layout, tensor_of(6), 6))
    expected = np.arange(6).reshape(2, 3)
    np.testing.assert_array_equal(arrays(read(path), path)["x"], expected)


HUGE = 2**62


@pytest.mark.parametrize("layout", ["stream", "zip"])
@pytest.mark.parametrize(
    "view, reason",
    [
        ({"shape": (2, 4), "strides": (4, 1)}, "exceeds its storage"),
        ({"offset": 1}, "exceeds its storage"),
        ({"offset": HUGE}, "exceeds its storage"),
        ({"shape": (HUGE, HUGE), "strides": (0, 0)}, "exceeds its storage"),
        (
            {"shape": (1, 1), "strides": (HUGE, HUGE), "offset": 6},
            "exceeds its storage",
        ),
        ({"shape": (7, 1), "strides": (0, 0)}, "exceeds its storage"),
        ({"strides": (-3, 1)}, "negative"),
        ({"shape": (-2, 3)}, "negative"),
        ({"offset": -1}, "negative"),
        ({"shape": (2, 3, 1)}, "3 sizes, 2 strides"),
        ({"shape": (2.0, 3)}, "not an integer"),
        ({"shape": 6}, "no storage or no shape"),
    ],
)
def test_a_view_outside_its_storage(
    layout: str, view: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    (path := tmp_path / "file").write_bytes(file_of(layout, tensor_of(6, **view), 6))
    message = refusal(lambda: arrays(read(path), path))
    assert str(path) in message and reason in message


@pytest.mark.parametrize("layout", ["stream", "zip"])
@pytest.mark.parametrize("claim", [5, 7, 2**40, HUGE, 2**70, -1, 6.0, "6", None])
def test_a_storage_that_lies_about_its_size(
    layout: str, claim: Any, tmp_path: Path
) -> None:
    (path := tmp_path / "file").write_bytes(file_of(layout, tensor_of(claim), 6))
    assert str(path) in refusal(lambda: arrays(read(path), path))


@pytest.mark.parametrize("declared", [5, 7, 2**60, -1, -(2**63)])
def test_a_stream_that_lies_about_a_storage(declared: int, tmp_path: Path) -> None:
    main = tensor_of(declared) if declared > 0 else tensor_of(6)
    (path := tmp_path / "file").write_bytes(file_of("stream", main, 6, declared))
    assert str(path) in refusal(lambda: arrays(read(path), path))


@pytest.mark.parametrize("name", ["plain.zip.pt", "plain.module.stream.pt"])
@pytest.mark.parametrize("kept", [0, 1, 7, 60, 0.3, 0.7, 0.97, -1])
def test_a_cut_file(name: str, kept: float, tmp_path: Path) -> None:
    whole = (RECORDED / name).read_bytes()
    end = int(kept * len(whole)) if 0 < kept < 1 else int(kept)
    (path := tmp_path / "cut.pt").write_bytes(whole[:end])
    assert str(path) in refusal(lambda: arrays(read(path), path))


def test_damaged_bytes_are_told_or_read(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    for name in ("kinds.zip.pt", "kinds.stream.pt", "cache2.pkl", "vocab.bin"):
        whole = (RECORDED / name).read_bytes()
        for number in range(150):
            damaged = bytearray(whole)
            for place in rng.integers(0, len(whole), 3):
                damaged[place] = rng.integers(0, 256)
            (path := tmp_path / f"{number}.{name}").write_bytes(damaged)
            try:
                arrays(read(path), path)
            except UserError as error:
                assert "\n" not in str(error)


CLAIMS = {
    "bytes": b"\x80\x04\x8e" + struct.pack("<Q", 2**40) + b"x.",
    "bytearray": b"\x80\x05\x96" + struct.pack("<Q", 2**62) + b"x.",
    "text": b"\x80\x04\x8d" + struct.pack("<Q", 2**63 - 1) + b"x.",
    "old text": b"\x80\x02X" + struct.pack("<I", 2**32 - 1) + b"x.",
    "integer": b"\x80\x02\x8b" + struct.pack("<i", 2**31 - 1) + b"x.",
    "negative": b"\x80\x02\x8b" + struct.pack("<i", -1) + b"x.",
    "frame": b"\x80\x04\x95" + struct.pack("<Q", 2**62) + b"N.",
    "memory": b"\x80\x02Nr" + struct.pack("<I", 2**32 - 1) + b".",
    "decimal": b"L" + b"9" * 100_000 + b"L\n.",
    "empty": b".",
    "no end": b"\x80\x02N",
    "underflow": b"\x80\x020.",
    "no mark": b"\x80\x02t.",
    "half a pair": b"\x80\x02}(K\x01u.",
    "list as key": b"\x80\x02}]K\x01s.",
    "opcode": b"\xff.",
    "buffer": b"\x80\x05\x97.",
    "id": b"\x80\x02K\x01Q.",
    "text id": b"Pfile\n.",
}


@pytest.mark.parametrize("name", CLAIMS)
def test_claims_cost_nothing(name: str, tmp_path: Path) -> None:
    import tracemalloc

    for layout, wrap in LAYOUTS.items():
        (path := tmp_path / layout).write_bytes(wrap(CLAIMS[name]))
        tracemalloc.start()
        try:
            value = read(path)
        except UserError as error:
            assert str(path) in str(error) and "\n" not in str(error)
        else:
            assert "neither a state dict" in refusal(arrays, value, path)
        finally:
            peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
        assert peak < 5_000_000


DEEP = 200_000


@pytest.mark.parametrize(
    "main",
    [
        b"\x80\x02" + b"]" * DEEP + b"a" * (DEEP - 1) + b".",
        b"\x80\x02)" + b"\x85" * DEEP + b".",
        b"\x80\x02}N" + b"\x85" * DEEP + b"K\x01s.",
        b"(" * DEEP + b"l" * DEEP + b".",
        b"\x80\x02cx\ny\n" + b")\x81" * 9 + b"\x85R" * 9 + b".",
        # A list of pairs, made into a dict again and again.
        b"\x80\x02](" + b"]K\x01aK\x02a" * 1000 + b"eq\x00"
        b"" + b"ccollections\nOrderedDict\nh\x00\x85R0" * 1000 + b".",
    ],
    ids=["lists", "tuples", "key", "marks", "objects", "dicts"],
)
def test_depth_and_repetition(main: bytes, tmp_path: Path) -> None:
    (path := tmp_path / "deep").write_bytes(main)
    try:
        value = read(path)
    except UserError:
        return
    assert "neither a state dict" in refusal(arrays, value, path)


def test_a_module_within_itself(tmp_path: Path) -> None:
    main = (
        b"\x80\x02cm\nM\n)\x81q\x00}(S'_parameters'\n}S'_modules'\n}S'me'\nh\x00s"
        b"S'_buffers'\n}ub."
    )
    (path := tmp_path / "file").write_bytes(main)
    assert "neither a state dict" in refusal(lambda: arrays(read(path), path))


@pytest.mark.parametrize(
    "content",
    [
        zip_of(tensor_of(6), [("data/0", b"x" * 24)], compression=zipfile.ZIP_DEFLATED),
        zip_of(tensor_of(6)),
        zip_of(tensor_of(6), [("data/1", b"x" * 24)]),
        zip_of(tensor_of(6), [("byteorder", "big"), ("data/0", b"x" * 24)]),
        stream_of(tensor_of(6), ["1"], struct.pack("<q", 6) + b"x" * 24),
        stream_of(tensor_of(6), [["0"]], struct.pack("<q", 6) + b"x" * 24),
        stream_of(tensor_of(6)),
        pickle.dumps(MAGIC, 2),
        b"PK\x05\x06" + bytes(18),
        b"model",
        b"",
    ],
)
def test_other_files(content: bytes, tmp_path: Path) -> None:
    (path := tmp_path / "file").write_bytes(content)
    assert str(path) in refusal(lambda: arrays(read(path), path))


def test_what_is_no_file(tmp_path: Path) -> None:
    assert "no file" in refusal(read, tmp_path / "missing")
    assert str(tmp_path) in refusal(read, tmp_path)
