"""Checkpoints of the paper's TensorFlow code, read without TensorFlow.

A checkpoint is a "tensor bundle": `<prefix>.index` is a table of protocol buffers that
locate each variable in a data file `<prefix>.data-00000-of-0000N`. All checksums are
verified.

Dims: V vocabulary, E embedding, G clusters.
"""

import itertools
import os
import re
import struct
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

import google_crc32c
import ml_dtypes  # noqa: F401, it adds bfloat16 to NumPy
import numpy as np
from google.protobuf.empty_pb2 import Empty
from google.protobuf.message import DecodeError
from google.protobuf.unknown_fields import UnknownFieldSet
from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto

from txl_jax.convert import pytorch
from txl_jax.convert.pytorch import Keys
from txl_jax.errors import UserError, prefixed, refuse
from txl_jax.model import config as models
from txl_jax.model.config import ModelConfig
from txl_jax.model.modules import Params
from txl_jax.runtime.storage import DAMAGE

ROOT = "transformer/"
EMBED, SOFTMAX = f"{ROOT}adaptive_embed/", f"{ROOT}adaptive_softmax/"
LAYER = f"{ROOT}layer_{{}}/"
BIAS = f"{SOFTMAX}cutoff_{{}}/b"
# The variables, by the names in the paper's PyTorch code.
NAMES = {
    "r_w_bias": f"{ROOT}r_w_bias",
    "r_r_bias": f"{ROOT}r_r_bias",
    "layers.{}.dec_attn.qkv_net.weight": f"{LAYER}rel_attn/qkv/kernel",
    "layers.{}.dec_attn.r_net.weight": f"{LAYER}rel_attn/r/kernel",
    "layers.{}.dec_attn.o_net.weight": f"{LAYER}rel_attn/o/kernel",
    "layers.{}.dec_attn.layer_norm.weight": f"{LAYER}rel_attn/LayerNorm/gamma",
    "layers.{}.dec_attn.layer_norm.bias": f"{LAYER}rel_attn/LayerNorm/beta",
    "layers.{}.pos_ff.CoreNet.0.weight": f"{LAYER}ff/layer_1/kernel",
    "layers.{}.pos_ff.CoreNet.0.bias": f"{LAYER}ff/layer_1/bias",
    "layers.{}.pos_ff.CoreNet.3.weight": f"{LAYER}ff/layer_2/kernel",
    "layers.{}.pos_ff.CoreNet.3.bias": f"{LAYER}ff/layer_2/bias",
    "layers.{}.pos_ff.layer_norm.weight": f"{LAYER}ff/LayerNorm/gamma",
    "layers.{}.pos_ff.layer_norm.bias": f"{LAYER}ff/LayerNorm/beta",
    "word_emb.emb_layers.{}.weight": f"{EMBED}cutoff_{{}}/lookup_table",
    "word_emb.emb_projs.{}": f"{EMBED}cutoff_{{}}/proj_W",
    "crit.out_layers.{}.bias": BIAS,
    "crit.out_projs.{}": f"{SOFTMAX}cutoff_{{}}/proj",
    "crit.cluster_weight": f"{SOFTMAX}cutoff_0/cluster_W",
    "crit.cluster_bias": f"{SOFTMAX}cutoff_0/cluster_b",
}
TRANSPOSED = ("kernel", "proj_W", "proj")
CLUSTERS = ("cluster_W", "cluster_b")
# Arrays that are not split into clusters are read as the first cluster's.
UNSPLIT = {
    f"{EMBED}lookup_table": f"{EMBED}cutoff_0/lookup_table",
    f"{EMBED}proj_W": f"{EMBED}cutoff_0/proj_W",
    f"{SOFTMAX}bias": BIAS.format(0),
}
STEP = "global_step"
# Adam's variables: two for each variable of the model, and two scalars.
ADAM = ("/Adam", "/Adam_1", "beta1_power", "beta2_power")


def read_checkpoint(
    source: str | Path, *, mem_len: int, clamp_len: int = 0, same_length: bool = False
) -> tuple[ModelConfig, Params, int]:
    """Returns the model of a checkpoint, its parameters, and its step or 0.

    `source` is the checkpoint's folder, the prefix of its files or its .index. Sizes,
    clusters and ties are inferred from the variables.
    """
    prefix = find_prefix(source)
    variables = read_variables(prefix, ADAM)
    step = variables.pop(STEP, np.int64(0))
    refuse(step.shape or step.dtype.kind != "i", f"{prefix}: {STEP} is no whole number")
    state, cutoffs = _arrange(variables)
    with prefixed(prefix):
        config, params = pytorch.from_keys(
            Keys(state, _rename),
            cutoffs,
            models.tensorflow,
            mem_len=mem_len,
            clamp_len=clamp_len,
            same_length=same_length,
        )
    return config, params, int(step)


def _rename(name: str) -> str:
    """Returns the variable for a name of the paper's PyTorch code."""
    pattern = re.sub(r"\.\d+", ".{}", name, count=1)
    return NAMES.get(pattern, name).format(*re.findall(r"\.(\d+)", name))


def _arrange(variables: dict[str, np.ndarray]) -> tuple[Params, tuple[int, ...]]:
    """Returns the arrays in the layout of the paper's PyTorch code, and cutoffs.

    The cutoffs are () if there are no clusters or the tables are split. In TensorFlow's
    code kernels are [in, out], the rows of clusters are in order, and the biases are
    split even if the tables are not.
    """
    state: Params = {}
    for name, x in variables.items():
        x = x[::-1] if name.endswith(CLUSTERS) and x.shape else x
        state[UNSPLIT.get(name, name)] = x.T if name.endswith(TRANSPOSED) else x
    if f"{EMBED}lookup_table" not in variables:
        return state, ()
    names = [name for name in map(BIAS.format, range(len(state))) if name in state]
    biases = [np.ravel(state.pop(name)).astype(np.float32) for name in names]
    if biases:
        state[BIAS.format(0)] = np.concatenate(biases)
    sizes = [len(bias) for bias in biases]
    return state, tuple(itertools.accumulate(sizes[:-1]))


# Tensor bundles

# By TensorFlow's enumeration values.
DTYPES = {1: "float32", 3: "int32", 9: "int64", 14: "bfloat16", 19: "float16"}
MAGIC = struct.pack("<Q", 0xDB4775248B80FB57)
FOOTER = 48  # bytes: two locations, padded to 40, and the magic number


def find_prefix(source: str | Path) -> Path:
    """Returns the prefix of a checkpoint.

    `source` is the prefix, its .index, or a folder whose file `checkpoint` names the
    latest one.
    """
    prefix = Path(str(source).removesuffix(".index"))
    prefixes = [prefix]
    if (state := prefix / "checkpoint").is_file():
        text = state.read_text("utf-8", "replace")
        names = re.findall(r'^ *model_checkpoint_path: *"([^"\\]+)"', text, re.M)
        # The file may name a folder that has been moved.
        prefixes += [prefix / x for name in names for x in (name, Path(name).name)]
    for prefix in prefixes:
        if os.path.isfile(f"{prefix}.index"):  # False if too long
            return prefix
    raise UserError(
        f"no file '{prefix}.index': give the prefix of a checkpoint's files, such as "
        "model/ckpt-0, or a folder whose file 'checkpoint' names it"
    )


def read_variables(
    source: str | Path, omit: tuple[str, ...] = ()
) -> dict[str, np.ndarray]:
    """Returns the variables by name, without those whose names end as in `omit`."""
    prefix = find_prefix(source)
    path = Path(f"{prefix}.index")
    try:
        records = _read_table(path.read_bytes())
        shards = _fields(records.pop(b"", b"")).get(1, 0)
        # Keys that begin with 0 are slices of another variable.
        variables = {k.decode("utf-8"): x for k, x in records.items() if k[0]}
        room: dict[Path, int] = {}
        return {
            name: _read_variable(prefix, shards, name, _fields(record), room)
            for name, record in variables.items()
            if not name.endswith(omit)
        }
    except (*DAMAGE, DecodeError, OSError, struct.error) as error:
        raise UserError(
            f"cannot read the checkpoint {path}: {error}; copy it again"
        ) from error


def _fields(record: bytes) -> dict[int, Any]:
    """Returns the fields of a protocol buffer by number, without those that are 0."""
    fields = UnknownFieldSet(Empty.FromString(record))
    return {field.field_number: field.data for field in fields}


def _read_variable(
    prefix: Path, shards: int, name: str, fields: dict[int, Any], room: dict[Path, int]
) -> np.ndarray:
    """Returns a variable by its BundleEntryProto; raises ValueError or OSError."""
    dtype, dims, shard, offset, size, checksum = (fields.get(n, 0) for n in range(1, 7))
    if dtype not in DTYPES:
        raise ValueError(f"{name} has TensorFlow's data type {dtype}")
    shape = [dim.size for dim in TensorShapeProto.FromString(dims or b"").dim]
    path = Path(f"{prefix}.data-{shard:05d}-of-{shards:05d}")
    room[path] = room.get(path, path.stat().st_size) - size  # bytes of no variable yet
    data = np.memmap(path, np.uint8, "r")[offset : offset + size]
    if room[path] < 0 or masked_crc32c(data) != checksum:
        raise ValueError(f"{name} in {path.name} does not match its checksum")
    return np.array(data).view(DTYPES[dtype]).reshape(shape)


def _read_table(data: bytes) -> dict[bytes, bytes]:
    """Returns LevelDB's table: a footer locates the index, which locates the blocks."""
    if not data.endswith(MAGIC):
        raise ValueError("it lacks the footer of a table")
    footer, blocks = BytesIO(data[-FOOTER:]), BytesIO(data)
    for _ in range(2):  # skips the location of an index that is always empty
        _varint(footer)
    return {
        key: value
        for _, location in _entries(BytesIO(data), footer)
        for key, value in _entries(blocks, BytesIO(location))
    }


def _varint(stream: BytesIO) -> int:
    """Reads a number of at most 70 bits, 7 per byte, the lowest first."""
    value = shift = 0
    while shift < 70 and (byte := stream.read(1)):
        value |= (byte[0] & 0x7F) << shift
        shift += 7
        if byte[0] < 0x80:
            return value
    raise ValueError("a variable-length number has no end")


def _entries(data: BytesIO, location: BytesIO) -> Iterator[tuple[bytes, bytes]]:
    """Yields the keys and values of the block at a location.

    Keys omit the prefix that they share with the key before. The block ends with
    offsets for searching; its compression, in one byte, and its checksum follow.
    """
    start, size, last = _varint(location), _varint(location), data.tell()
    data.seek(start)
    whole, (checksum,) = data.read(size + 1), struct.unpack("<I", data.read(4))
    if start < last or masked_crc32c(whole) != checksum:
        raise ValueError(f"{size} bytes at {start} do not match their checksum")
    (offsets,) = struct.unpack_from("<I", whole, size - 4)
    block, stop = BytesIO(whole), size - 4 * (offsets + 1)
    key = b""
    while block.tell() < stop:
        shared, unshared, size = (_varint(block) for _ in range(3))
        key = key[: min(shared, 1000)] + block.read(unshared)  # more would multiply
        yield key, block.read(size)


def masked_crc32c(data: np.ndarray | bytes) -> int:
    """Returns the CRC-32C as stored: rotated and offset, so that it can be nested."""
    crc = google_crc32c.value(data)
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF
