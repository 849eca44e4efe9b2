"""Damaged, hostile and impossible inputs of every reader, each refused in one line.

A row of hostile.txt is a reader, the damage to its valid input, and a part of the
error:

    reader  field=JSON     the JSON object with one field set; a.b is a field in a field
    reader  -field         without the field
    reader  !NAME          the content NAME of CONTENTS instead of the file
    reader  text           for readers of values: this value
"""

import dataclasses
import gzip
import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from tests.convert import bundles
from tests.convert.test_huggingface import folder_of
from tests.convert.test_pickle import files_of, tensor_of
from tests.convert.test_pytorch import saved_case
from txl_jax import config as configs
from txl_jax.checkpoint import manifest
from txl_jax.cli import flags, run, table
from txl_jax.convert import bundle, huggingface, keys, pickle, words
from txl_jax.data import copying, dataset, files, remote_cache, tokens
from txl_jax.data import vocab as vocabulary
from txl_jax.data.vocab import ByteVocab
from txl_jax.data.word import Lines, WordVocab
from txl_jax.generate import texts
from txl_jax.generate.options import GenerateConfig
from txl_jax.report import curve
from txl_jax.report.checksum import with_checksum
from txl_jax.tables.options import TableConfig
from txl_jax.workdir import claim
from txl_jax.workdir.fit import fit_mesh, fit_vocab

ROWS = [
    tuple(cell.strip() for cell in line.split(" | "))
    for line in Path(__file__).with_suffix(".txt").read_text("utf-8").splitlines()
    if line and not line.startswith("#")
]
DEEP = 100_000
CONTENTS: dict[str, bytes] = {
    "nothing": b"",
    "half": b"{",
    "number": b"3",
    "text": b'"model"',
    "null": b"null",
    "list": b"[]",
    "deep list": b"[" * DEEP,
    "deep object": b'{"a":' * DEEP,
    "long number": b"1" * 5000,
    "long line": b"<unk>\n" + b"x" * 10**6,
    "NUL": b"\0",
    "Latin-1": b'{"a": "caf\xe9"}',
    "UTF-16": '{"kind": "byte"}'.encode("utf-16"),
    "a byte-order mark": b'\xef\xbb\xbf{"kind": "byte"}',
    "two objects": b"{}{}",
    "garbage": bytes(range(256)) * 4,
    "fake": b"no compressed text\n",
    "empty members": gzip.compress(b"") * 3 + b"x",
    "bomb": gzip.compress(bytes(20_000_000)),
    "a number beyond 2^32": b'{"model":{"type":"BPE","vocab":{"a":9e9},"merges":[]}}',
    "a number of 4e9": b'{"model":{"type":"WordLevel","unk_token":"a","vocab":'
    b'{"a":4000000000}}}',
    "no tokens": b'{"model":{"type":"BPE","vocab":{},"merges":[]}}',
    "no end of line": b'{"model":{"type":"WordLevel","unk_token":"a","vocab":{"a":0}}}',
    "no unknown": b'{"model":{"type":"WordLevel","unk_token":"b","vocab":{"a":0}}}',
}

# What stands at the path of an input instead of a file.
SPECIAL: dict[str, Callable[[Path], object]] = {
    "pipe": os.mkfifo,
    "device": lambda path: path.symlink_to("/dev/zero"),
    "broken": lambda path: path.symlink_to("/no/where"),
    "loop": lambda path: path.symlink_to(path.name),
    "folder": Path.mkdir,
}


# Readers

Read = Callable[[Path], object]


class Reader:
    """Reads a file whose valid content is `base`, an object or bytes."""

    def __init__(self, name: str, base: Any, read: Read, checksummed: bool = False):
        self.name, self.base, self.read = name, base, read
        self.checksummed = checksummed

    def damaged(self, damage: str) -> bytes:
        """Returns the content after the damage."""
        if damage.startswith("!"):
            return CONTENTS[damage[1:]]
        state = json.loads(json.dumps(self.base))
        field, _, value = damage.removeprefix("-").partition("=")
        *parents, key = field.split(".")
        place = state
        for parent in parents:
            place = place[int(parent) if isinstance(place, list) else parent]
        if damage.startswith("-"):
            del place[key]
        else:
            place[int(key) if isinstance(place, list) else key] = json.loads(value)
        return json.dumps(with_checksum(state) if self.checksummed else state).encode()


POINT = {"step": 30, "valid_ppl": 20.0, "spread": 0.5}
CURVE = {"source": "a test", "points": [POINT, {**POINT, "step": 31}]}
WORDS = {"kind": "word", "words": ["<eos>", "a"], **Lines()._asdict()}
CHARS = {"kind": "char", "of_bytes": False, "symbols": "ab c\n"}
SUBWORDS = {"kind": "subword", "tokenizer": {"model": {}}}
PIECES = {"kind": "subword", "sentencepiece": "AAAA"}
COUNTS = dict.fromkeys(("tokens", "bytes", "original_bytes", "words", "lines"), 4)
SPLITS = {name: {**COUNTS, "sha256": "x"} for name in ("train", "valid", "test")}
# The SHA-256 of the vocabulary of bytes.
BYTES = "0e07b234d1bbe1a816b71128728bc7a08b720d01f1641f726c54f999fb5d8a8a"
MANIFEST = {"splits": SPLITS, "files": {"vocab.json": BYTES}}
RECORD: dict[str, Any] = {
    "step": 3,
    "position": {"epoch": 0, "segment": 1, "token_offset": 2},
    "valid_nll": 1.5,
    "arrays": {"params/a": ["float32", [3], "0" * 16]},
}
CONFIG = json.loads(json.dumps(dataclasses.asdict(configs.Config())))
RUN = {"config": CONFIG, "data": {"splits": {}}, "starts": [{}]}
ROW = table.row_config("wt103_128m", TableConfig(), {"train.num_steps": "40"})
LENGTHS = {str(length): 1.0 for length in table.lengths(ROW)}
FINISHED = {"asked": table.identity(ROW), "nll_nats": LENGTHS}
HUGE = [2**62] * 3001


def read_tokens(path: Path) -> object:
    """Opens prepared tokens with the file as their manifest."""
    folder = path.parent
    vocabulary.save(ByteVocab(), folder / "vocab.json")
    for name in SPLITS:
        (folder / f"{name}.bin").write_bytes(b"text")
    return tokens.load(folder)


def read_model(path: Path) -> object:
    """Imports a Hugging Face folder with the file as its config."""
    folder = folder_of(path.parent / "model")
    (folder / "config.json").unlink()
    (folder / "config.json").symlink_to(path)
    return huggingface.from_pretrained(folder)


def read_weights(kind: str, path: Path) -> object:
    """Imports a Hugging Face folder whose safetensors have some damage."""
    weights = folder_of(path.parent) / "model.safetensors"
    whole = weights.read_bytes()
    size = 8 + struct.unpack_from("<Q", whole)[0]
    weights.write_bytes(damage_weights(kind, json.loads(whole[8:size]), whole[size:]))
    return huggingface.from_pretrained(path.parent)


def damage_weights(kind: str, head: dict[str, Any], data: bytes) -> bytes:
    """Returns a safetensors file with the damage: TYPE BYTES, FIELD JSON or a name."""
    names = [name for name in head if name != "__metadata__"]
    field, _, value = kind.partition(" ")
    if value.isdecimal() and field != "dtype":  # all arrays of another type
        at = 0
        for name in names:
            end = at + int(np.prod(head[name]["shape"])) * int(value)
            head[name] |= {"dtype": field, "data_offsets": [at, end]}
            at = end
        data = bytes(at)
    elif field in ("dtype", "shape", "data_offsets"):
        head[names[0]][field] = HUGE if value == "HUGE" else json.loads(value)
    elif kind == "overlap":
        head[names[1]]["data_offsets"] = head[names[0]]["data_offsets"]
    elif kind == "missing":
        del head[names[0]]
    elif kind == "extra":
        place = {"data_offsets": [len(data), len(data) + 4]}
        head["\x1b[2Jmore"] = {"dtype": "F32", "shape": [1], **place}
        data += bytes(4)
    elif kind == "scalar":
        place = {"data_offsets": [len(data), len(data) + 4]}
        head["crit.extra"] = {"dtype": "F32", "shape": [], **place}
        data += bytes(4)
    elif kind == "trailing":
        data += b"more"
    text = json.dumps(head).encode()
    sizes = {"size 0": 0, "size 2^62": 2**62, "size short": len(text) - 9}
    return struct.pack("<Q", sizes.get(kind, len(text))) + text + data


def read_pickle(view: str, path: Path) -> object:
    """Reads the tensor of a file of torch.save with another view of its storage."""
    fields = {name: eval(x) for name, x in (y.split("=") for y in view.split(" "))}
    fields = {name: tuple(x) if x is HUGE else x for name, x in fields.items()}
    path.write_bytes(files_of(tensor_of(6, **fields))[0])
    return keys.arrays(pickle.read(path), path)


def read_bundle(entry: str, path: Path) -> object:
    """Reads a TensorFlow checkpoint of one variable: KIND SIZES BYTES."""
    kind, shape, size = (eval(part) for part in entry.split(" "))
    sizes = b"".join(bundles.field(2, bundles.field(1, n)) for n in shape)
    record = bundles.field(1, kind) + bundles.field(2, sizes) + bundles.field(5, size)
    header = bundles.field(1, 1) + bundles.field(3, bundles.field(1, 1))
    path.with_suffix(".index").write_bytes(
        bundles.table([(b"", header), (b"x", record)])
    )
    return bundle.read(path.with_suffix(""))


def read_sizes(fields: str, _: Path) -> None:
    """Checks the memory that a run would need, by arithmetic."""
    config = configs.default()
    for field in fields.split(" "):
        configs.override(config, *field.split("="))
    parsed = fit_vocab(configs.parse(config), ByteVocab())
    run.check_memory(parsed, fit_mesh(parsed))


def read_copy(name: str, path: Path) -> None:
    """Copies a prepared corpus from a store whose manifest lists this file."""
    text = json.dumps({"files": json.loads(name)})
    remote_cache.fetch(path.parent, text, path.parent)


def read_text(path: Path) -> object:
    """Reads the user's text, as `prepare` does."""
    (scratch := path.parent / "scratch").mkdir()
    return files.split_text(str(path), scratch)


JSON_READERS: dict[str, Reader] = {
    "curve": Reader("c.json", CURVE, lambda path: curve.load(str(path))),
    "words": Reader("vocab.json", WORDS, vocabulary.load, True),
    "characters": Reader("vocab.json", CHARS, vocabulary.load, True),
    "subwords": Reader("vocab.json", SUBWORDS, vocabulary.load, True),
    "pieces": Reader("vocab.json", PIECES, vocabulary.load, True),
    "data.vocab_path": Reader("w.json", {}, lambda x: vocabulary.read(x, WordVocab)),
    "list of words": Reader("w.txt", {}, lambda x: vocabulary.read(x, WordVocab)),
    "SentencePiece": Reader("w.model", {}, lambda x: vocabulary.read(x, WordVocab)),
    "imported words": Reader("vocab.txt", {}, words.read),
    "imported pickle": Reader("vocab.bin", {}, words.read),
    "manifest": Reader("manifest.json", MANIFEST, read_tokens, True),
    "record": Reader(
        "record/metadata", RECORD, lambda x: manifest.read(x.parents[1], 3), True
    ),
    "config.json": Reader("config.json", CONFIG, configs.load_json, True),
    "run.json": Reader(
        "run.json", RUN, lambda x: claim.check_trainable(x.parent, configs.Config())
    ),
    "lengths.json": Reader(
        "lengths.json", FINISHED, lambda x: table.finished(ROW, x.parent)
    ),
    "TFDS": Reader(
        "name/1.0.0/dataset_info.json",
        {"fileFormat": "array_record"},
        lambda x: dataset.find("name", x.parents[2]),
    ),
    "Hugging Face": Reader("fields.json", saved_case("div_val_2")[0], read_model),
    "prompts": Reader(
        "p.txt",
        {},
        lambda x: texts.read_prompts(GenerateConfig(prompt=f"@{x}"), ByteVocab()),
    ),
    "text": Reader("text.txt", {}, read_text),
    "text.gz": Reader("text.gz", {}, read_text),
    "text.bz2": Reader("text.bz2", {}, read_text),
    "text.xz": Reader("text.xz", {}, read_text),
    "state dict": Reader("model.pt", {}, lambda x: keys.arrays(pickle.read(x), x)),
    "TensorFlow": Reader("m.index", {}, bundle.read),
}
VALID = [
    name
    for name, reader in JSON_READERS.items()
    if reader.base not in ({}, SUBWORDS, PIECES)
]
# Readers of values: the damage is an argument.
VALUE_READERS: dict[str, Callable[[str, Path], object]] = {
    "safetensors": read_weights,
    "tensor": read_pickle,
    "variable": read_bundle,
    "sizes": read_sizes,
    "copied": read_copy,
    "copying": lambda text, _: copying.Task.parse(f"copying:{text}"),
    "flags": lambda text, _: flags.parse(["--config=quickstart", *text.split(" ")]),
    "mode": lambda text, _: flags.parse([f"--mode={text.split(' ')[0]}"]
                                        + text.split(" ")[1:]),
    "path": lambda text, path: files.text_files(
        text and str(path.parent / text), "score.path"
    ),
}  # fmt: skip


def refuse(reader: str, damage: str, folder: Path, ready: Callable[[], object]) -> None:
    """Reads the damaged input in an empty folder; it must raise UserError.

    ready() is called when the input is there.
    """
    if value_reader := VALUE_READERS.get(reader):
        if reader == "path":
            for name, make in SPECIAL.items():
                make(folder / name)
        value_reader(damage, folder / "file")
        return
    known = JSON_READERS[reader]
    path = folder / known.name
    path.parent.mkdir(parents=True, exist_ok=True)
    if damage in SPECIAL:
        SPECIAL[damage](path)
    else:
        path.write_bytes(known.damaged(damage))
    ready()
    known.read(path)


def read_valid(reader: str, folder: Path) -> object:
    """Reads the undamaged input of a reader of JSON objects."""
    known = JSON_READERS[reader]
    (path := folder / known.name).parent.mkdir(parents=True, exist_ok=True)
    state = with_checksum(known.base) if known.checksummed else known.base
    path.write_text(json.dumps(state))
    return known.read(path)
