"""Compresses a file with a model that learns while it reads it.

    pip install 'txl_jax[recipes]'
    python -m txl_jax.experiments.recipes.compress encode FILE OUT
    python -m txl_jax.experiments.recipes.compress decode OUT COPY

The file is cut into streams. A Transformer-XL, random at first, predicts the next byte
of each, and an arithmetic coder spends -log2 p bits on it. After each segment, the
model learns from it and from segments at random places before (Bellard 2021, NNCP v2).
The decoder runs the same programs, and refuses a file from another kind of machine.

Predictions of an average of the parameters and of a continuous cache, at several
temperatures, are mixed by fixed share (Herbster and Warmuth 1998).

Dims: B streams of W bytes (T = W + 1, after a zero, at least a segment), R segments
read again, Y = B + R, U temperatures, X = 1 + U predictions to mix, C cache entries.
"""

import argparse
import dataclasses
import hashlib
import importlib.metadata
import json
import os
import sys
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from etils import epy
from jax import Array

from txl_jax.errors import BadNumbers, UserError, refuse
from txl_jax.model.config import ModelConfig
from txl_jax.model.fixed import FixedTransformerXL, lay_out
from txl_jax.model.initializers import Params
from txl_jax.model.memory import Memory
from txl_jax.model.ring import RingMemory
from txl_jax.model.segment import Segment
from txl_jax.model.txl import TransformerXL
from txl_jax.report import provenance
from txl_jax.report.progress import Progress
from txl_jax.runtime import programs
from txl_jax.runtime.programs import Program
from txl_jax.runtime.storage import refusing_damage, replacing
from txl_jax.sharding.mesh import make_mesh
from txl_jax.sharding.options import MeshConfig
from txl_jax.update.optim import clip
from txl_jax.update.options import TrainConfig
from txl_jax.update.state import Average, TrainState, init_state
from txl_jax.update.step import TrainStep

from ..figures import program

with epy.lazy_imports():  # of an extra
    import constriction

B, R, L, C, V = 2, 10, 32, 2000, 256
MODEL = ModelConfig(
    vocab_size=V, n_layer=3, d_model=128, n_head=4, d_head=32, d_inner=512,
    mem_len=128, dropout=0.0, feed_forward="swiglu", qk_norm=True, unroll=3,
)  # fmt: skip
RISE = optax.linear_schedule(0.0, 3e-3, 50)  # then 3e-3, falling from 4,050
RATE = optax.join_schedules([RISE, lambda k: 0.19 * jnp.maximum(k, 4000) ** -0.5], [50])
OPTIMIZER = optax.chain(clip(0.5), optax.scale_by_adam(b2=0.98))  # adapts faster
TRAIN = TrainConfig(batch_size=B + R, tgt_len=L)
STEP = TrainStep(TransformerXL(MODEL), OPTIMIZER, RATE, TRAIN)
AVERAGE_DECAY = 0.98
JUMP = 0.05  # the probability that a segment is read again at a new random place
THETAS = 0.15, 0.3, 0.6  # inverse temperatures of the cache
PRIOR = 0.7, 0.1, 0.1, 0.1  # weights of the model and of each temperature
SHARE = 0.05  # the part of each weight that returns to the prior after a byte
HEADER = 1 << 16  # bytes at most; about 1,000 are used
DENSEST = 1 << 21  # bytes in a word of 32 bits: no probability is above 1 - 2^-16


class Prediction(NamedTuple):
    """The predictions of the next bytes, and the state behind them."""

    memory: RingMemory
    h_BD: Array
    log_p_XBV: Array
    log_weight_BX: Array
    cache_h_CD: Array
    follows_C: Array  # the bytes that followed these states, or V
    slot: Array  # the oldest entries of the cache, which the next ones replace


def open_memory(params: Params, memory: Memory) -> tuple[Params, RingMemory]:
    """Returns parameters and a memory for calls of one token."""
    memory, params = Memory(memory.h_NBMD[:, :B], memory.filled_B[:B]), lay_out(params)
    return params, RingMemory.of(MODEL, params, memory)


def start(state: TrainState) -> tuple[Params, Prediction]:
    """Returns the parameters and the prediction before the first bytes."""
    params, memory = open_memory(state.params, state.memory)
    return params, Prediction(
        memory=memory,
        h_BD=jnp.zeros((B, MODEL.d_model)),
        log_p_XBV=jnp.zeros((len(PRIOR), B, V)),
        log_weight_BX=jnp.tile(jnp.log(jnp.array(PRIOR)), (B, 1)),
        cache_h_CD=jnp.zeros((C, MODEL.d_model)),
        follows_C=jnp.full(C, V),
        slot=jnp.zeros((), jnp.int32),
    )


def learn(state: TrainState, segment: Segment) -> tuple[TrainState, tuple]:
    """Makes an update; returns (state, (parameters, memory) to predict with)."""
    state, _ = STEP(state, segment)
    keep = jnp.minimum(AVERAGE_DECAY, state.step / (state.step + 9))  # less at first
    mean = optax.incremental_update(state.params, state.average.params, 1 - keep)
    state = dataclasses.replace(state, average=Average(mean, state.step))
    return state, open_memory(mean, state.memory)


def predict(
    before: Prediction, params: Params, byte_B: Array
) -> tuple[Prediction, Array]:
    """Returns (prediction, p_BV) after one byte of every stream."""
    log_hit_XB1 = jnp.take_along_axis(before.log_p_XBV, byte_B[None, :, None], axis=2)
    weight_BX = jax.nn.softmax(before.log_weight_BX + log_hit_XB1[..., 0].T)
    log_weight_BX = jnp.log((1 - SHARE) * weight_BX + SHARE * jnp.array(PRIOR))
    put, slot = jax.lax.dynamic_update_slice, before.slot
    cache_h_CD = put(before.cache_h_CD, before.h_BD, (slot, 0))
    follows_C = put(before.follows_C, byte_B, (slot,))

    model = FixedTransformerXL(MODEL, params)
    h_B1D, memory = model(byte_B[:, None], before.memory)
    h_BD, log_p_BV = h_B1D[:, 0], model.embedding.log_probs(h_B1D)[:, 0]
    score_BC = jnp.where(follows_C < V, h_BD @ cache_h_CD.T, -1e30)
    match_CUB = jax.nn.softmax(score_BC.T[:, None] * jnp.array(THETAS)[:, None], axis=0)
    cached_UBV = jnp.moveaxis(jax.ops.segment_sum(match_CUB, follows_C, V), 0, 2)
    cached_UBV = 0.99 * cached_UBV + 0.01 * jnp.exp(log_p_BV)
    log_p_XBV = jnp.concatenate([log_p_BV[None], jnp.log(cached_UBV)])
    mixed_BV = jax.nn.logsumexp(log_weight_BX.T[..., None] + log_p_XBV, axis=0)
    return Prediction(
        memory, h_BD, log_p_XBV, log_weight_BX, cache_h_CD, follows_C, (slot + B) % C
    ), jax.nn.softmax(mixed_BV)


class Coder:
    """The compiled programs that encoder and decoder share, and their state."""

    def __init__(self, size: int, seed: int) -> None:
        refuse(not 0 <= seed < 2**32, f"seed = {seed} must be from 0 to 2**32 - 1")
        backend = jax.default_backend()  # GPUs add in an order that varies
        refuse(backend != "cpu", "compress runs on CPUs only: set JAX_PLATFORMS=cpu")
        self.family = constriction.stream.model.Categorical(perfect=False)
        self.size, self.W = size, -(-size // B)
        self.text_BT = np.zeros((B, 1 + max(self.W, L)), np.int32)  # starts with 0
        self.random = np.random.default_rng(seed)
        self.stream_R, self.start_R = np.zeros((2, R), int)
        mesh = make_mesh(MeshConfig(data=1), jax.devices()[:1])
        init, _ = init_state(MODEL, OPTIMIZER, B + R, seed, mesh, averages=True)
        self.state = init()
        self.params, self.prediction = jax.jit(start)(self.state)
        self.learn = Program("the update", learn, carries=True, donates=True)
        self.predict = Program("the prediction", predict, carries=True, donates=True)
        lowered = (
            self.learn.lower(self.state, self.choose_segments(0)),  # also draws
            self.predict.lower(self.prediction, self.params, self.text_BT[:, 0]),
        )
        parts = [x.as_text().encode() for x in lowered]
        parts += [np.asarray(x).tobytes() for x in jax.tree.leaves(self.params)]
        # What predictions depend on, besides the bytes.
        self.needs = provenance.versions() | {
            "constriction": importlib.metadata.version("constriction"),
            "usable cores": programs.usable_cores(),
            "processor": programs.processor(),
            "XLA_FLAGS": os.environ.get("XLA_FLAGS", ""),
            "model": repr(MODEL),
            "program": hashlib.sha256(b"".join(parts)).hexdigest()[:16],
        }

    def run(self, code: Callable[[np.ndarray, int], np.ndarray]) -> bytes:
        """Predicts and learns the whole file; returns it.

        code(p_BV, t) writes or reads byte t of each stream, and returns these bytes.
        """
        W, state, params, prediction = self.W, self.state, self.params, self.prediction
        with Progress("coded", self.size, unit="bytes") as bar:
            for t in range(W):
                prediction, p_BV = self.predict(prediction, params, self.text_BT[:, t])
                if not np.isfinite(p_BV := np.asarray(p_BV)).all():
                    raise BadNumbers(f"the predictions of byte {t} are not finite")
                self.text_BT[:, t + 1] = code(p_BV, t)
                if (t + 1) % L == 0:
                    segment = self.choose_segments(t // L)
                    state, (params, memory) = self.learn(state, segment)
                    prediction = prediction._replace(memory=memory)
                    bar(min(B * (t + 1), self.size))
        return self.text_BT[:, 1 : 1 + W].astype(np.uint8).tobytes()[: self.size]

    def choose_segments(self, k: int) -> Segment:
        """Returns segment k of every stream, and R older ones, which go on or jump."""
        front, draw = k * L, self.random.integers
        jumps_R = (self.random.random(R) < JUMP) | (self.start_R + L > front)
        self.stream_R = np.where(jumps_R, draw(B, size=R), self.stream_R)
        self.start_R = np.where(jumps_R, draw(1 + front, size=R), self.start_R + L)
        stream_Y1 = np.concatenate([np.arange(B), self.stream_R])[:, None]
        start_Y = np.concatenate([np.full(B, front), self.start_R])
        place_YL = start_Y[:, None] + np.arange(L)
        first_YL = np.zeros(place_YL.shape, bool)
        first_YL[B:, 0] = jumps_R
        return Segment(
            self.text_BT[stream_Y1, place_YL][None],
            self.text_BT[stream_Y1, place_YL + 1][None],
            np.ones((1, B + R, L), np.float32),
            first_YL[None],
            np.full((1, B + R), L, np.int32),
        )


def encode(data: bytes, seed: int) -> bytes:
    """Returns a compressed file."""
    coder = Coder(len(data), seed)
    encoder = constriction.stream.queue.RangeEncoder()
    byte_BW = np.frombuffer(data + bytes(-len(data) % B), np.uint8).reshape(B, -1)

    def code(p_BV: np.ndarray, t: int) -> np.ndarray:
        encoder.encode(byte_BW[:, t].astype(np.int32), coder.family, p_BV)
        return byte_BW[:, t]

    coder.run(code)
    digest = hashlib.sha256(data).hexdigest()
    header = {"bytes": len(data), "seed": seed, "sha256": digest, **coder.needs}
    head = zlib.compress(json.dumps(header, separators=(",", ":")).encode(), 9)
    body = encoder.get_compressed().astype("<u4").tobytes()
    content = len(head).to_bytes(4, "little") + head + body
    return content + hashlib.sha256(content).digest()


def decode(content: bytes, file: Path) -> bytes:
    """Returns the original; raises UserError for damage or other predictions."""
    content, checksum = content[:-32], content[-32:]
    is_damaged = hashlib.sha256(content).digest() != checksum
    refuse(is_damaged, f"{file} is damaged, or `compress encode` did not write it")
    with refusing_damage(file, "another version may have written it", zlib.error):
        end = 4 + int.from_bytes(content[:4], "little")
        header = json.loads(zlib.decompressobj().decompress(content[4:end], HEADER))
        body = np.frombuffer(content[end:], "<u4").astype(np.uint32)
        size, seed, sha256 = (header[name] for name in ("bytes", "seed", "sha256"))
        if [type(x) for x in (size, seed, sha256)] != [int, int, str]:
            raise TypeError("its header has values of other types")
        if not 0 <= size <= DENSEST * len(body):
            raise ValueError(f"{size} bytes are not in {len(content)}")
    try:
        coder = Coder(size, seed)
    except MemoryError as error:
        raise UserError(f"out of memory: {file} has {size} bytes") from error
    changes = "; ".join(
        f"{name} was {header.get(name)}, is now {value}"
        for name, value in coder.needs.items()
        if header.get(name) != value
    )
    refuse(changes, f"{file} can only be decoded where it was encoded: {changes}")
    decoder = constriction.stream.queue.RangeDecoder(body)
    try:
        data = coder.run(lambda p_BV, _: decoder.decode(coder.family, p_BV))
    except AssertionError:  # constriction: no encoder with these predictions wrote it
        data = b""
    is_wrong = hashlib.sha256(data).hexdigest() != sha256
    refuse(is_wrong, f"{file}: the predictions differ from the encoder's")
    return data


def convert(direction: str, file: Path, out: Path, seed: int) -> dict[str, Any]:
    """Writes a file, and returns its figures; the seconds include compilation."""
    started, source = time.perf_counter(), file.read_bytes()
    encodes = direction == "encode"
    with replacing(out) as new:
        result = encode(source, seed) if encodes else decode(source, file)
        new.write(result)
    plain, packed = (source, result) if encodes else (result, source)
    return {
        "direction": direction,
        "bytes": len(plain),
        "compressed_bytes": len(packed),
        "bits_per_byte": 8 * len(packed) / max(len(plain), 1),
        "seconds": time.perf_counter() - started,
        "provenance": provenance.describe_result(),
    }


def main(argv: list[str] | None = None) -> int:
    parser = program.make_parser(__doc__)
    parser.add_argument("direction", choices=["encode", "decode"])
    parser.add_argument("file", type=program.path)
    parser.add_argument("out", type=program.new_path)
    parser.add_argument("--seed", type=int, default=1, help="of a new file")

    def measure(args: argparse.Namespace) -> dict[str, Any]:
        programs.keep()
        return convert(**vars(args))

    return program.run(parser, measure, argv)


if __name__ == "__main__":
    sys.exit(main())
