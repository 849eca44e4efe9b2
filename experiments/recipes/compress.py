"""Compresses a file with a model that learns while it reads it.

    pip install 'txl_jax[recipes]'
    python -m txl_jax.experiments.recipes.compress encode FILE OUT
    python -m txl_jax.experiments.recipes.compress decode OUT COPY

The file is cut into streams. A Transformer-XL, random at first, predicts the next byte
of each, and an arithmetic coder spends -log2 p bits on it. After each segment, the
model learns from it and from segments at random places before (Bellard 2021, NNCP v2).
An average of its parameters predicts. The predictions, those of a continuous cache and
of `counts` enter a geometric mixture, whose weights learn too (Mattern 2012).

Dims: B streams of W bytes (T = W + 1, after a zero, at least a segment), R segments
read again, Y = B + R, X predictions to mix, C cache entries.
"""

import dataclasses
import hashlib
import importlib.metadata
import os
import resource
import sys
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from etils import epy
from jax import Array

from txl_jax.errors import BadNumbers, refuse
from txl_jax.model.config import ModelConfig
from txl_jax.model.fixed import FixedTransformerXL, lay_out
from txl_jax.model.memory import Memory
from txl_jax.model.modules import Params
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
from . import counts

with epy.lazy_imports():  # of an extra
    import constriction

RSS_UNIT = 1 if sys.platform == "darwin" else 1024  # bytes, of ru_maxrss
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
THETA = 0.3  # inverse temperature of the cache
WEIGHTS = 0.35, 0.15, *[0.0] * 10, 0.4  # the model's and the match's, at first
WEIGHT_RATE = 0.001
# A memory; the cache: h_CD, the bytes that follow, or V, and the slot of the newest.
State = tuple[RingMemory, Array, Array, Array]


def open_memory(params: Params, memory: Memory) -> tuple[Params, RingMemory]:
    """Returns parameters and a memory for calls of one token."""
    memory, params = Memory(memory.h_NBMD[:, :B], memory.filled_B[:B]), lay_out(params)
    return params, RingMemory.of(MODEL, params, memory)


def learn(state: TrainState, segment: Segment) -> tuple[TrainState, tuple]:
    """Makes an update; returns (state, (parameters, memory) to predict with)."""
    state, _ = STEP(state, segment)
    keep = jnp.minimum(AVERAGE_DECAY, state.step / (state.step + 9))  # less at first
    mean = optax.incremental_update(state.params, state.average.params, 1 - keep)
    state = dataclasses.replace(state, average=Average(mean, state.step))
    return state, open_memory(mean, state.memory)


def predict(before: State, params: Params, byte_B: Array) -> tuple[State, Array]:
    """Returns (state, log_p_BXV) after one byte of every stream."""
    (memory, cache_h_CD, follows_C, slot), put = before, jax.lax.dynamic_update_slice
    follows_C = put(follows_C, byte_B, (slot,))
    slot = (slot + B) % C
    model = FixedTransformerXL(MODEL, params)
    h_B1D, memory = model(byte_B[:, None], memory)
    h_BD, log_p_BV = h_B1D[:, 0], model.embedding.log_probs(h_B1D)[:, 0]
    score_BC = THETA * h_BD @ cache_h_CD.T
    match_BC = jax.nn.softmax(jnp.where(follows_C < V, score_BC, -1e30))
    cached_BV = jax.ops.segment_sum(match_BC.T, follows_C, V).T
    log_cached_BV = jnp.logaddexp(jnp.log(cached_BV), log_p_BV + jnp.log(0.01))
    cache_h_CD = put(cache_h_CD, h_BD, (slot, 0))
    log_p_XBV = log_p_BV, log_cached_BV
    return (memory, cache_h_CD, follows_C, slot), jnp.stack(log_p_XBV, axis=1)


class Coder:
    """The compiled programs that encoder and decoder share, and their state."""

    def __init__(self, size: int, seed: int, no_model: bool) -> None:
        refuse(not 0 <= seed < 2**32, f"seed = {seed} must be from 0 to 2**32 - 1")
        backend = jax.default_backend()  # GPUs add in an order that varies
        refuse(backend != "cpu", "compress runs on CPUs only: set JAX_PLATFORMS=cpu")
        self.size, self.W, self.no_model = size, -(-size // B), no_model
        self.text_BT = np.zeros((B, 1 + max(self.W, L)), np.int32)  # starts with 0
        self.random = np.random.default_rng(seed)
        self.stream_Y, self.start_Y = np.zeros((2, B + R), int)
        mesh = make_mesh(MeshConfig(data=1), jax.devices()[:1])
        init, _ = init_state(MODEL, OPTIMIZER, B + R, seed, mesh, averages=True)
        self.state = init()
        self.params, ring = jax.jit(open_memory)(self.state.params, self.state.memory)
        self.before = ring, jnp.zeros((C, MODEL.d_model)), jnp.full(C, V), jnp.int32(0)
        self.learn = Program("the update", learn, carries=True, donates=True)
        self.predict = Program("the prediction", predict, carries=True, donates=True)
        lowered = [self.learn.lower(self.state, self.choose_segments(0))]  # also draws
        lowered.append(self.predict.lower(self.before, self.params, self.text_BT[:, 0]))
        parts = [x.as_text().encode() for x in lowered]
        parts += [np.asarray(x).tobytes() for x in jax.tree.leaves(self.params)]
        parts += [Path(x).read_bytes() for x in (__file__, counts.__file__)]
        parts += [f(np.arange(1, 999) / 99).tobytes() for f in (np.exp, np.log)]
        # What predictions depend on, besides the bytes.
        self.needs = provenance.versions() | {
            "constriction": importlib.metadata.version("constriction"),
            "usable cores": str(programs.usable_cores()),
            "processor": programs.processor()[:8],
            "program": hashlib.sha256(b"".join(parts)).hexdigest()[:8],
            "XLA_FLAGS": f"{zlib.crc32(os.environ.get('XLA_FLAGS', '').encode()):x}",
        }

    def run(self, code: Callable[[Any, int, int], int]) -> bytes:
        """Predicts and learns the whole file; returns it.

        code(model, b, t) writes or reads byte t of stream b, and returns it.
        """
        Categorical = constriction.stream.model.Categorical
        state, params, before = self.state, self.params, self.before
        weight_X, counted = np.array(WEIGHTS), counts.Counts(B)
        log_model_BXV = np.zeros((B, 2, V))  # constant, so it changes no mixture
        with Progress("coded", self.size, unit="bytes") as bar:
            for t in range(self.W):
                byte_B = self.text_BT[:, t]
                if not self.no_model:  # XLA predicts while bytes are counted
                    before, log_model_BXV = self.predict(before, params, byte_B)
                log_p_BXV = np.hstack([log_model_BXV, counted.predict(byte_B)])
                if not np.isfinite(log_p_BXV).all():
                    raise BadNumbers(f"the predictions of byte {t} are not finite")
                for b, log_p_XV in enumerate(log_p_BXV):
                    score_V = weight_X @ log_p_XV
                    p_V = np.exp(score_V - score_V.max())
                    p_V /= p_V.sum()
                    byte = code(Categorical(p_V, perfect=False), b, t)
                    weight_X += WEIGHT_RATE * (log_p_XV[:, byte] - log_p_XV @ p_V)
                    self.text_BT[b, t + 1] = byte
                bar(min(B * (t + 1), self.size))
                if (t + 1) % L == 0 and not self.no_model:
                    segment = self.choose_segments(t // L)
                    state, (params, memory) = self.learn(state, segment)
                    before = memory, *before[1:]
        return self.text_BT[:, 1 : 1 + self.W].astype(np.uint8).tobytes()[: self.size]

    def choose_segments(self, k: int) -> Segment:
        """Returns segment k of every stream, and R older ones, which go on or jump."""
        front, draw = k * L, self.random.integers
        jumps_Y = (self.random.random(B + R) < JUMP) | (self.start_Y + L > front)
        self.stream_Y = np.where(jumps_Y, draw(B, size=B + R), self.stream_Y)
        self.start_Y = np.where(jumps_Y, draw(1 + front, size=B + R), self.start_Y + L)
        self.stream_Y[:B], self.start_Y[:B], jumps_Y[:B] = np.arange(B), front, False
        stream_Y1 = self.stream_Y[:, None]
        place_YL = self.start_Y[:, None] + np.arange(L)
        first_YL = (np.arange(L) == 0) & jumps_Y[:, None]
        return Segment(
            self.text_BT[stream_Y1, place_YL][None],
            self.text_BT[stream_Y1, place_YL + 1][None],
            np.ones((1, B + R, L), np.float32),
            first_YL[None],
            np.full((1, B + R), L, np.int32),
        )


def encode(data: bytes, seed: int, no_model: bool = False) -> bytes:
    """Returns a compressed file."""
    encoder = constriction.stream.queue.RangeEncoder()
    coder = Coder(len(data), seed, no_model)
    byte_BW = np.frombuffer(data + bytes(-len(data) % B), np.uint8).reshape(B, -1)

    def code(model: Any, b: int, t: int) -> int:
        encoder.encode(int(byte_BW[b, t]), model)
        return byte_BW[b, t]

    coder.run(code)
    digest = hashlib.sha256(data).hexdigest()[:16]
    fields = str(len(data)), str(seed), f"{no_model:d}", digest, *coder.needs.values()
    head = zlib.compress("\n".join(fields).encode(), wbits=-15)
    body = encoder.get_compressed().astype("<u4").tobytes()
    content = len(head).to_bytes(2, "little") + head + body
    return content + zlib.crc32(content).to_bytes(4, "little")


def decode(content: bytes, file: Path) -> bytes:
    """Returns the original; raises UserError for damage or other predictions."""
    content, checksum = content[:-4], content[-4:]
    is_damaged = zlib.crc32(content).to_bytes(4, "little") != checksum
    refuse(is_damaged, f"{file} is damaged, or `compress encode` did not write it")
    with refusing_damage(file, "another version may have written it", zlib.error):
        end = 2 + int.from_bytes(content[:2], "little")
        head = zlib.decompress(content[2:end], wbits=-15).decode()
        *numbers, digest = (lines := head.split("\n"))[:4]
        size, seed, no_model = map(int, numbers)
        body = np.frombuffer(content[end:], "<u4").astype(np.uint32)
        if not 0 <= size <= len(body) << 21:  # no probability is above 1 - 2^-16
            raise ValueError(f"{size} bytes are not in {len(content)}")
    coder = Coder(size, seed, bool(no_model))
    before = dict(zip(coder.needs, lines[4:], strict=False))
    changes = "; ".join(
        f"{name} was {before.get(name)}, is now {now}"
        for name, now in coder.needs.items()
        if before.get(name) != now
    )
    refuse(changes, f"{file} can only be decoded where it was encoded: {changes}")
    decoder = constriction.stream.queue.RangeDecoder(body)
    try:
        data = coder.run(lambda model, *_: decoder.decode(model))
    except AssertionError:  # constriction: no encoder with these predictions wrote it
        data = b""
    is_wrong = hashlib.sha256(data).hexdigest()[:16] != digest
    refuse(is_wrong, f"{file}: the predictions differ from the encoder's")
    return data


def convert(
    direction: str, file: Path, out: Path, seed: int, no_model: bool = False
) -> dict[str, Any]:
    """Writes a file, and returns its figures; the seconds include compilation."""
    programs.keep()
    started, data = time.perf_counter(), file.read_bytes()
    packs = direction == "encode"
    with replacing(out) as new:
        new.write(made := encode(data, seed, no_model) if packs else decode(data, file))
    plain, packed = map(len, (data, made) if packs else (made, data))
    return {
        "direction": direction,
        "bytes": plain,
        "compressed_bytes": packed,
        "bits_per_byte": 8 * packed / max(plain, 1),
        "seconds": time.perf_counter() - started,
        "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * RSS_UNIT,
        "provenance": provenance.describe_result(),
    }


def main(argv: list[str] | None = None) -> int:
    parser = program.make_parser(__doc__)
    parser.add_argument("direction", choices=["encode", "decode"])
    parser.add_argument("file", type=program.path)
    parser.add_argument("out", type=program.new_path)
    parser.add_argument("--seed", type=int, default=1, help="of a new file")
    parser.add_argument("--no_model", action="store_true", help="mix only the counts")
    return program.run(parser, lambda args: convert(**vars(args)), argv)


if __name__ == "__main__":
    sys.exit(main())
