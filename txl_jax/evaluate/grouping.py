"""How many segments of an evaluation are computed in one call of the model.

A segment of a single stream has too few rows for the matrix units of any device.
Several segments fill them, with the results of one after the other (see
`TransformerXL`). Kernel `xla` computes every score of its queries and keys, also those
outside a query's interval. It therefore reads a call in windows, one after the other:
parts of a few whole segments, with the M keys before them.

Dims: B streams, L segment, M memory, W tokens of a window.
"""

import jax
from jax.sharding import Mesh

from txl_jax.errors import UserError
from txl_jax.kernels.dispatch import fastest
from txl_jax.model.config import ModelConfig
from txl_jax.model.memory.halo import check_pieces
from txl_jax.model.memory.same_layer import check_in_sequence
from txl_jax.sharding.rules import shards

# Rows of a call on one device. Parameters are read, and the memory is copied, once for
# each call. The products of bfloat16 on a TPU or a GPU are bound by arithmetic from 240
# to 300 rows on; with a memory of 2,100, 960 rows were 5 % faster than 480 on a CPU.
ROWS = 1024
# Queries of a window on a CPU: enough for the products with keys and values, few enough
# for the scores against some thousand keys to stay in its cache.
CPU_ROWS = 160


def count_segments(
    config: ModelConfig,
    requested: int,
    B: int,
    L: int,
    mesh: Mesh | None = None,
    documents: bool = False,
) -> int:
    """Returns how many segments of L tokens to compute together, at least 1.

    requested: eval.segments_per_step; 0 chooses as many as make ROWS rows. Without a
    memory, or if the model reads segments in sequence, they are read one by one.
    documents: whether they may start inside a segment. Raises
    UserError for several segments if each would start with visible zeros, or if
    `halo.check_pieces` or `same_layer.check_in_sequence` refuses them.
    """
    zeros = documents and config.initial_memory == "zeros"
    if zeros and requested > 1:
        raise UserError(
            f"eval.segments_per_step = {requested} is not possible for exact contexts "
            'with model.initial_memory = "zeros": set it to 1'
        )
    if zeros or not config.mem_len:
        return 1
    P, M = mesh.shape["segments"] if mesh else 1, config.mem_len
    if requested:
        if requested > 1:
            check_in_sequence(config, P, requested * L, L)
            check_pieces(config, P, requested * L, M, L)
        return requested
    if config.in_sequence:
        return 1
    rows = B * L // (shards(mesh, "B") if mesh else 1)
    least = -(-M // L) if P > 1 else 1  # of a piece, which has at least M tokens
    return P * max(ROWS // max(rows, 1), least)


def window_tokens(
    config: ModelConfig, segments: int, B: int, L: int, mesh: Mesh | None = None
) -> int:
    """Returns W, the tokens of each stream that share M + W keys in a call.

    At most a quarter of their scores is wasted. A kernel that skips keys outside the
    interval reads the whole call as one window.
    """
    M, T, kernel = config.mem_len, segments * L, config.kernel
    abstract = mesh.abstract_mesh if mesh else jax.sharding.get_abstract_mesh()
    if kernel == "auto":
        itemsize = config.compute_dtype.itemsize
        kernel = fastest(abstract, B, T, config.n_head, M + T, config.d_head, itemsize)
    if kernel != "xla":
        return T
    most = (M + L) * 4 // 3 - M
    if (abstract.abstract_device or jax.devices()[0]).platform == "cpu":
        most = min(most, CPU_ROWS // B)
    parts = (n for n in range(1, segments + 1) if segments % n == 0)
    return next(segments // n * L for n in parts if segments // n * L <= max(most, L))
