"""Compresses a file with a model that learns while it reads it.

    python -m experiments.recipes.compress encode FILE OUT
    python -m experiments.recipes.compress decode OUT COPY

The file is cut into streams. A Transformer-XL with random parameters predicts the next
byte of every stream, and an arithmetic coder spends -log2 p bits on it. After each
segment, the model learns from it and from segments at random places before (Bellard
2021, "NNCP v2"). The decoder runs the same compiled programs on the bytes that it has
decoded, so it makes the same predictions; it refuses a file from another kind of
machine.

Predictions come from a moving average of the parameters and from continuous caches
with several temperatures, mixed with weights that follow from the bytes before (fixed
share, Herbster and Warmuth 1998).

Dims: B streams of W bytes, R segments that are read again, X predictions that are
mixed, C entries of the cache.
"""

import dataclasses
import functools
import hashlib
import importlib.metadata
import json
import sys
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import constriction
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from experiments.figures import program
from txl_jax.errors import BadNumbers, UserError
from txl_jax.model.calls import fixed_model
from txl_jax.model.config import ModelConfig
from txl_jax.model.initializers import Params
from txl_jax.model.memory import Memory
from txl_jax.model.memory.kinds import choose_kind
from txl_jax.model.memory.protocol import MemoryLike
from txl_jax.model.segment import Segment
from txl_jax.model.txl import TransformerXL
from txl_jax.report import provenance
from txl_jax.report.log import Progress
from txl_jax.runtime import allocator
from txl_jax.runtime.programs import Program
from txl_jax.runtime.storage import write_atomically
from txl_jax.sharding.mesh import make_mesh
from txl_jax.sharding.options import MeshConfig
from txl_jax.update.options import OptimConfig, TrainConfig
from txl_jax.update.step import make_updater

MAGIC = b"TXLC"
BYTES = 256
MODEL = ModelConfig(
    vocab_size=BYTES, n_layer=3, d_model=128, n_head=4, d_head=32, d_inner=512,
    mem_len=128, dropout=0.0, feed_forward="swiglu", qk_norm=True, unroll=3,
)  # fmt: skip
OPTIM = OptimConfig(lr=3e-3, schedule="constant", warmup_steps=50, clip=0.5)
B, R, L = 4, 12, 32
AVERAGE_DECAY = 0.98
JUMP = 0.05  # the probability that a stream reads again from another place
C = 2000
FIXED_MODEL, lay_out = fixed_model(MODEL)
THETAS = 0.15, 0.3, 0.6
PRIOR = 0.7, 0.1, 0.1, 0.1
SHARE = 0.05  # the part of each weight that returns to the prior after a byte


class Prediction(NamedTuple):
    """The predictions of the next bytes, and what they follow from."""

    memory: MemoryLike
    h_BD: Array
    log_p_XBV: Array
    log_weight_BX: Array
    cache_h_CD: Array
    follows_CV: Array  # one-hot: the bytes that followed these states
    slot: Array  # the oldest entries of the cache, which the next ones replace


def first_prediction(memory: MemoryLike) -> Prediction:
    """Returns the prediction before the first bytes."""
    X = len(PRIOR)
    return Prediction(
        memory=memory,
        h_BD=jnp.zeros((B, MODEL.d_model)),
        log_p_XBV=jnp.zeros((X, B, BYTES)),
        log_weight_BX=jnp.tile(jnp.log(jnp.array(PRIOR)), (B, 1)),
        cache_h_CD=jnp.zeros((C, MODEL.d_model)),
        follows_CV=jnp.zeros((C, BYTES)),
        slot=jnp.zeros((), jnp.int32),
    )


def predict(
    before: Prediction, params: Params, is_first: Array, byte_B: Array
) -> tuple[Prediction, Array]:
    """Returns (prediction, p_BV) after one byte of every stream.

    is_first: the bytes stand before those of the file.
    """
    log_hit_XB1 = jnp.take_along_axis(before.log_p_XBV, byte_B[None, :, None], axis=2)
    weight_BX = jax.nn.softmax(before.log_weight_BX + log_hit_XB1[..., 0].T)
    log_weight_BX = jnp.log((1 - SHARE) * weight_BX + SHARE * jnp.array(PRIOR))
    follows_BV = jnp.where(is_first, 0, jax.nn.one_hot(byte_B, BYTES))
    put = functools.partial(jax.lax.dynamic_update_slice_in_dim, axis=0)
    cache_h_CD = put(before.cache_h_CD, before.h_BD, before.slot)
    follows_CV = put(before.follows_CV, follows_BV, before.slot)

    result: Any = FIXED_MODEL.apply(
        {"params": params}, byte_B[:, None], before.memory, method=read_byte
    )
    (h_BD, log_p_BV), memory = result
    score_BC = h_BD @ cache_h_CD.T
    score_BC = jnp.where(jnp.any(follows_CV, axis=1), score_BC, -1e30)
    match_XBC = jax.nn.softmax(jnp.array(THETAS)[:, None, None] * score_BC)
    cached_XBV = 0.99 * (match_XBC @ follows_CV) + 0.01 * jnp.exp(log_p_BV)
    log_p_XBV = jnp.concatenate([log_p_BV[None], jnp.log(cached_XBV)])
    mixed_BV = jax.nn.logsumexp(log_weight_BX.T[..., None] + log_p_XBV, axis=0)
    slot = (before.slot + B) % C
    after = Prediction(
        memory, h_BD, log_p_XBV, log_weight_BX, cache_h_CD, follows_CV, slot
    )
    return after, jax.nn.softmax(mixed_BV)


def read_byte(
    model: TransformerXL, byte_B1: Array, memory: MemoryLike
) -> tuple[tuple[Array, Array], MemoryLike]:
    """Returns ((h_BD, log_p_BV), memory) after one token of every stream."""
    h_B1D, memory = model(byte_B1, memory)
    return (h_B1D[:, 0], model.embedding.log_probs(h_B1D)[:, 0]), memory


def follow(
    average: Params, params: Params, memory: Memory, updates: Array
) -> tuple[Params, tuple[Params, MemoryLike]]:
    """Returns (the moving average, (its layout for one token, its memory))."""
    # At first, the average covers few updates.
    keep = jnp.minimum(AVERAGE_DECAY, updates / (updates + 9))
    average = jax.tree.map(lambda a, x: a + (1 - keep) * (x - a), average, params)
    memory = Memory(memory.h_NBMD[:, :B], memory.filled_B[:B])
    laid_out = lay_out(average)
    return average, (laid_out, choose_kind(MODEL).one_token(laid_out, memory))


class Text:
    """What is known of the file, and the segments to learn from.

    text_BW: a zero, then the bytes of each stream.
    """

    def __init__(self, size: int, seed: int) -> None:
        W = -(-size // B)
        self.sizes_B = np.clip(size - W * np.arange(B), 0, W)
        self.text_BW = np.zeros((B, 1 + (W // L + 1) * L), np.int32)
        self.random = np.random.default_rng(seed)
        self.stream_R, self.start_R = np.zeros((2, R), int)

    def learnable(self, k: int) -> Segment:
        """Returns segment k of every stream, and R that are read again."""
        front = k * L
        last = max(front - L, 0)
        jumps_R = self.random.random(R) < JUMP
        jumps_R |= self.start_R + L > last
        self.stream_R = np.where(
            jumps_R, self.random.integers(B, size=R), self.stream_R
        )
        self.start_R = np.where(
            jumps_R, self.random.integers(last + 1, size=R), self.start_R + L
        )
        stream_Y = np.concatenate([np.arange(B), self.stream_R])[:, None]
        start_Y = np.concatenate([np.full(B, front), self.start_R])
        place_YL = start_Y[:, None] + np.arange(L)
        weights_YL = place_YL < self.sizes_B[stream_Y]
        weights_YL[B:] &= front >= L
        first_YL = np.zeros(place_YL.shape, bool)
        first_YL[B:, 0] = jumps_R
        return Segment(
            self.text_BW[stream_Y, place_YL][None],
            self.text_BW[stream_Y, place_YL + 1][None],
            weights_YL[None].astype(np.float32),
            first_YL[None],
            np.full((1, B + R), L, np.int32),
        )


class Coder:
    """The compiled programs that encoder and decoder share, and their state."""

    def __init__(self, size: int, seed: int) -> None:
        self.text = Text(size, seed)
        train = TrainConfig(seed=seed, batch_size=B + R, tgt_len=L)
        mesh = make_mesh(MeshConfig(data=1), jax.devices()[:1])
        updater = make_updater(MODEL, train, OPTIM, mesh)
        self.state = updater.init()
        self.average = jax.tree.map(jnp.copy, self.state.params)
        self.follow = Program("the average", follow, carries=True, donates=True)
        self.learn = Program("the update", updater.step, carries=True, donates=True)
        self.predict = Program("the prediction", predict, carries=True, donates=True)
        self.open_memory(0)
        self.prediction = jax.jit(first_prediction)(self.memory)
        lowered = (
            self.follow.lower(self.average, self.state.params, self.state.memory, 0),
            self.learn.lower(self.state, Text(size, seed).learnable(0)),
            self.predict.lower(self.prediction, self.params, True, np.zeros(B, int)),
        )
        text = "".join(x.as_text() for x in lowered)
        self.fingerprint = hashlib.sha256(text.encode()).hexdigest()[:16]

    def open_memory(self, updates: int) -> None:
        """Moves the average to the newest parameters, and opens its memory."""
        self.average, (self.params, self.memory) = self.follow(
            self.average, self.state.params, self.state.memory, updates
        )

    def run(self, choose: Callable[[np.ndarray, np.ndarray], np.ndarray]) -> np.ndarray:
        """Predicts and learns the whole file; returns its bytes.

        choose(p_YV, place_Y) codes a byte of each stream that has one left, at these
        places of the file, and returns them.
        """
        text, sizes_B = self.text, self.text.sizes_B
        with Progress("coded", int(sizes_B.sum()), unit="bytes") as bar:
            for t in range(sizes_B[0]):
                self.prediction, p_BV = self.predict(
                    self.prediction, self.params, t == 0, text.text_BW[:, t]
                )
                stream_Y = np.flatnonzero(t < sizes_B)
                p_YV, place_Y = np.asarray(p_BV)[stream_Y], sizes_B[0] * stream_Y + t
                if not np.isfinite(p_YV).all():
                    raise BadNumbers(f"the predictions of byte {t} are not finite")
                text.text_BW[stream_Y, t + 1] = choose(p_YV, place_Y)
                if (t + 1) % L == 0:
                    self.learn_segment(t // L)
                    bar(int(np.minimum(sizes_B, t + 1).sum()))
        rows = zip(text.text_BW, sizes_B, strict=True)
        return np.concatenate([row[1 : 1 + n] for row, n in rows]).astype(np.uint8)

    def learn_segment(self, k: int) -> None:
        """Makes an update with segment k, and opens the memory after it."""
        self.state, _ = self.learn(self.state, self.text.learnable(k))
        self.open_memory(k + 1)
        self.prediction = self.prediction._replace(memory=self.memory)


def describe(seed: int, fingerprint: str) -> dict[str, Any]:
    """Returns what has to be equal where a file is decoded."""
    here = provenance.describe_result()
    versions = {"constriction": importlib.metadata.version("constriction")}
    defaults, model = ModelConfig(), dataclasses.asdict(MODEL)
    return {
        "seed": seed,
        "model": {k: x for k, x in model.items() if x != getattr(defaults, k)},
        **{name: here[name] for name in provenance.EXACT},
        "versions": here["versions"] | versions,
        "program": fingerprint,
    }


def encode(file: Path, out: Path, seed: int) -> dict[str, Any]:
    """Writes the compressed file and returns its figures."""
    data = np.frombuffer(file.read_bytes(), np.uint8)
    coder, started = Coder(len(data), seed), time.perf_counter()
    family = constriction.stream.model.Categorical(perfect=False)
    encoder = constriction.stream.queue.RangeEncoder()

    def choose(p_YV: np.ndarray, place_Y: np.ndarray) -> np.ndarray:
        encoder.encode(data[place_Y].astype(np.int32), family, p_YV)
        return data[place_Y]

    coder.run(choose)
    digest = hashlib.sha256(data.tobytes()).hexdigest()
    header = {"bytes": len(data), "sha256": digest, **describe(seed, coder.fingerprint)}
    head = zlib.compress(json.dumps(header, separators=(",", ":")).encode(), 9)
    body = encoder.get_compressed().astype("<u4").tobytes()
    content = MAGIC + len(head).to_bytes(4, "little") + head + body
    content += hashlib.sha256(content).digest()
    write_atomically(out, content)
    return figures(len(data), len(content), started)


def decode(file: Path, out: Path) -> dict[str, Any]:
    """Writes the original file and returns its figures.

    Raises UserError for a damaged file, and on a machine or with a program whose
    predictions may differ.
    """
    content = file.read_bytes()
    if content[:4] != MAGIC:
        raise UserError(f"{file} was not written by `compress encode`")
    content, checksum = content[:-32], content[-32:]
    if hashlib.sha256(content).digest() != checksum:
        raise UserError(f"{file} is truncated or damaged: copy it again")
    end = 8 + int.from_bytes(content[4:8], "little")
    header = json.loads(zlib.decompress(content[8:end]))
    size, digest = header.pop("bytes"), header.pop("sha256")
    coder, started = Coder(size, header["seed"]), time.perf_counter()
    if differing := [
        f"{name} was {header[name]}, is now {value}"
        for name, value in describe(header["seed"], coder.fingerprint).items()
        if header[name] != value
    ]:
        raise UserError(
            f"{file} can only be decoded where it was encoded: {'; '.join(differing)}"
        )
    family = constriction.stream.model.Categorical(perfect=False)
    body = np.frombuffer(content[end:], "<u4").astype(np.uint32)
    decoder = constriction.stream.queue.RangeDecoder(body)
    data = coder.run(lambda p_YV, _: decoder.decode(family, p_YV))
    if hashlib.sha256(data.tobytes()).hexdigest() != digest:
        raise UserError(f"{file}: the decoded bytes differ from the original's")
    write_atomically(out, data.tobytes())
    return figures(size, len(content) + 32, started)


def figures(size: int, compressed: int, started: float) -> dict[str, Any]:
    """Returns the figures of one direction; the seconds exclude compilation."""
    seconds = time.perf_counter() - started
    return {
        "bytes": size,
        "compressed_bytes": compressed,
        "bits_per_byte": 8 * compressed / max(size, 1),
        "seconds": seconds,
        "bytes_per_second": size / seconds,
        "provenance": provenance.describe_result(),
    }


def main() -> int:
    parser = program.make_parser(__doc__)
    parser.add_argument("direction", choices=["encode", "decode"])
    parser.add_argument("file", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seed", type=int, default=1, help="of the encoder")
    args = parser.parse_args()
    allocator.keep_freed()
    if args.direction == "decode":
        return program.run(lambda: decode(args.file, args.out))
    return program.run(lambda: encode(args.file, args.out, args.seed))


if __name__ == "__main__":
    sys.exit(main())
