"""Bits per byte of a file that a model learns while it reads it.

    python -m experiments.figures.online --path=FILE [--bytes=1000000]

A Transformer-XL with random parameters reads the file once and scores each byte before
it learns from it (`online_step`). The first byte, without a context, counts as 8 bits.
The state is saved every minute, so the same command resumes after a kill, with the same
numbers. Prints one JSON line, also in the workdir; its seconds exclude compilation.

Dims: T bytes of the file, S segments of a call, L segment.
"""

import argparse
import hashlib
import json
import lzma
import sys
import time
from pathlib import Path
from typing import Any

import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np

from experiments.figures import program
from experiments.figures.online_step import Options, State, learn_segments, start
from txl_jax.errors import BadNumbers, UserError
from txl_jax.report import provenance
from txl_jax.report.log import say, to_json
from txl_jax.runtime import allocator
from txl_jax.runtime.storage import write_atomically

RESULT, STATE = "online.json", "state.msgpack"
SAVE_SECONDS = 60
OPTIONS = Options()


def learn(
    options: Options, bytes_T: np.ndarray, seed: int, folder: Path
) -> tuple[np.ndarray, float]:
    """Returns (nll of all bytes but the first, in nats; seconds of all starts).

    Continues from the folder's state, which it saves every SAVE_SECONDS.
    """
    targets = len(bytes_T) - 1
    in_call = options.segments_per_call * options.tgt_len
    calls = -(-targets // in_call)
    # The padding is scored and learned after all bytes, and then left out.
    text_T = jnp.asarray(np.pad(bytes_T, (0, calls * in_call - targets)), jnp.int32)
    state, key = start(options, seed), jax.random.key(seed + 1)
    nll, seconds = np.zeros(0, np.float32), 0.0
    if (file := folder / STATE).exists():
        saved = flax.serialization.from_bytes((state, nll, seconds), file.read_bytes())
        state, nll, seconds = saved
        state = jax.tree.map(jnp.asarray, state)
    say(f"online: {folder}, from byte {len(nll)}")
    learn_call = learn_segments.lower(
        options, text_T, key, state, jnp.array(0)
    ).compile()
    started = saved_at = time.perf_counter()
    for call in range(len(nll) // in_call, calls):
        first = jnp.array(call * options.segments_per_call)
        state, nll_SL = learn_call(text_T, key, state, first)
        if not np.isfinite(nll_SL).all():
            raise BadNumbers(f"a loss after byte {len(nll)} is not finite")
        nll = np.append(nll, nll_SL)
        now = time.perf_counter()
        if now - saved_at >= SAVE_SECONDS:
            save(file, (state, nll, seconds + now - started))
            saved_at = now
            say(f"online: {len(nll)} bytes, {to_bits(nll) / (len(nll) + 1):.3f} bits")
    return nll[:targets], seconds + time.perf_counter() - started


def save(file: Path, saved: tuple[State, np.ndarray, float]) -> None:
    """Writes the state from which a later start continues."""
    content = flax.serialization.to_bytes(jax.device_get(saved))
    write_atomically(file, content)


def to_bits(nll: np.ndarray) -> float:
    """Returns the bits of the bytes with these nlls in nats, and of the first byte."""
    return 8 + float(nll.sum(dtype=np.float64) / np.log(2))


def main() -> int:
    parser = program.make_parser(__doc__)
    parser.add_argument("--path", type=Path, required=True)
    parser.add_argument("--bytes", type=int, default=0, help="how many; 0 = all")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--workdir", type=Path, default=Path("runs/figures/online"))
    args = parser.parse_args()
    allocator.keep_freed()
    return program.run(lambda: measure(args))


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Returns the result of a file, which is learned unless that is on disk."""
    try:
        data = args.path.read_bytes()[: args.bytes or None]
    except OSError as error:
        raise UserError(f"--path={args.path}: {error.strerror}") from error
    if len(data) < max(args.bytes, 2):
        raise UserError(
            f"--path={args.path} has {len(data)} bytes, fewer than --bytes or 2"
        )
    checksum = hashlib.sha256(data).hexdigest()
    folder = args.workdir / f"bytes={len(data)}-{checksum[:8]}-seed={args.seed}"
    if (path := folder / RESULT).exists():
        return json.loads(path.read_text("utf-8"))
    folder.mkdir(parents=True, exist_ok=True)
    bytes_T = np.frombuffer(data, np.uint8)
    nll, seconds = learn(OPTIONS, bytes_T, args.seed, folder)
    xz = lzma.compress(data, preset=9 | lzma.PRESET_EXTREME)
    shapes = jax.eval_shape(lambda: start(OPTIONS, args.seed).params)
    result = {
        "program": "online",
        "file": args.path.name,
        "sha256": checksum,
        "bytes": len(data),
        "bits_per_byte": to_bits(nll) / len(data),
        "xz_bits_per_byte": 8 * len(xz) / len(data),
        "seconds": seconds,
        "bytes_per_second": len(data) / seconds,
        "parameters": sum(x.size for x in jax.tree.leaves(shapes)),
        "seed": args.seed,
        "provenance": provenance.describe_result(),
    }
    line = to_json(result)
    write_atomically(path, line + "\n")
    return result


if __name__ == "__main__":
    sys.exit(main())
