"""How many segments of an evaluation are computed in one call of the model.

A segment of a single stream has too few rows for the matrix units of any device.
Several segments fill them, with the results of one after the other (see
`TransformerXL`). The kernels `xla` and `cudnn` compute every score of their queries and
keys, also those outside a query's interval. They therefore read a call in windows, one
after the other: parts of a few whole segments, with the M keys before them.

Dims: B streams, L segment, M memory, W tokens of a window.
"""

import math

from jax.sharding import Mesh

from txl_jax.kernels.sharded import device_memory, target_device
from txl_jax.model.config import ModelConfig
from txl_jax.sharding.rules import shards

SKIP_HIDDEN = ("chunked", "tpu")  # kernels that skip keys outside the interval
# Rows of a call on one device. Parameters are read, and the memory is copied, once for
# each call. The products of bfloat16 on a TPU or a GPU are bound by arithmetic from 240
# to 300 rows on; with a memory of 2,100, 960 rows were 5 % faster than 480 on a CPU.
ROWS = 1024
# On a GPU a call must also outweigh the launches of its kernels.
GPU_ROWS = 16 * ROWS
# The share of a GPU's memory that a call may take.
SHARE = 0.25
# Queries of a window on a CPU: enough for the products with keys and values, few enough
# for the scores against some thousand keys to stay in its cache.
CPU_ROWS = 160
# Scores of a window that fill a GPU; longer windows only waste more. With 16 segments
# of 80 tokens in windows of 640, the evaluation of enwik8 was 7 % slower than one by
# one (10 streams, M = 2,100, `xla` on one H200).
GPU_SCORES = 1 << 25


def count_segments(
    config: ModelConfig,
    requested: int,
    B: int,
    L: int,
    mesh: Mesh | None = None,
) -> int:
    """Returns how many segments of L tokens to compute together, at least 1.

    requested: eval.segments_per_step; 0 chooses as many as make ROWS rows, or on a GPU
    a power of two for GPU_ROWS that fits into its memory. Segments are read one by one
    without a memory.
    """
    if not config.mem_len:
        return 1
    if requested:
        return requested
    is_gpu = find_platform(mesh) == "gpu"
    devices = shards(mesh, "B") if mesh else 1
    rows = max(B * L // devices, 1)  # in a segment on one device
    n_segments = max((GPU_ROWS if is_gpu else ROWS) // rows, 1)
    if is_gpu:
        n_segments = 1 << (n_segments.bit_length() - 1)  # for windows of many segments
        memory, streams = SHARE * device_memory() or math.inf, -(-rows // L)
        while n_segments > 1 and call_bytes(config, streams, n_segments, L) > memory:
            n_segments //= 2
    return n_segments


def call_bytes(config: ModelConfig, B: int, n_segments: int, L: int) -> int:
    """Returns an estimate of a call's bytes: keys, values, states and scores.

    B: streams of one device.
    """
    H, A, M, T = config.n_head, config.d_head, config.mem_len, n_segments * L
    W = window_tokens(config, n_segments, B, L)
    numbers = 2 * config.n_layer * H * A * (M + T) + T * (4 * config.d_model)
    numbers += T * config.hidden_size
    scores = 0 if config.kernel in SKIP_HIDDEN else H * W * (M + W)
    return B * (numbers * config.compute_dtype.itemsize + 3 * 4 * scores)


def window_tokens(
    config: ModelConfig, n_segments: int, B: int, L: int, mesh: Mesh | None = None
) -> int:
    """Returns W, the tokens of each stream that share M + W keys in a call.

    At most a quarter of their scores is wasted; a GPU's windows are as short as its
    cores allow. A kernel that skips keys outside the interval reads the whole call as
    one window.
    """
    M, T, platform = config.mem_len, n_segments * L, find_platform(mesh)
    if config.kernel in SKIP_HIDDEN:
        return T
    longest = (M + L) * 4 // 3 - M
    if platform == "cpu":
        longest = min(longest, CPU_ROWS // B)
    parts = [n * L for n in range(1, n_segments + 1) if n_segments % n == 0]
    sizes = [W for W in parts if W <= max(longest, L)]
    heads = config.n_head * (B // (shards(mesh, "B") if mesh else 1))
    enough = [W for W in sizes if heads * W * (M + W) >= GPU_SCORES]
    return enough[0] if platform == "gpu" and enough else sizes[-1]


def find_platform(mesh: Mesh | None) -> str:
    """Returns the platform of a mesh, by default the running trace's."""
    return target_device(mesh.abstract_mesh if mesh else None).platform
