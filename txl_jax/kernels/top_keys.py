"""Attention to the best keys of a large store, by content alone.

A query takes the J keys with the greatest products and attends to these only (Wu et al.
2022, section 3.2). Keys and values are constants; queries have gradients.

Dims: T slots of the store, L tokens of the segment, X = T + L, J retrieved keys.
"""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec

from txl_jax.kernels.sharded import device_kind, divides, split_mesh, stream_axes
from txl_jax.kernels.xla import product
from txl_jax.sharding.rules import letters, mesh_axes

# Of the true best keys, the share that the approximate search of TPUs finds on average.
RECALL = 0.95
# Scores that a device holds at once, 256 MiB in float32.
SCORES = 2**26
# The backward pass computes all but the search again, whose scores are too many to keep.
KEEP_FOUND = jax.checkpoint_policies.save_only_these_names("found")


class Candidates(NamedTuple):
    """Queries, and the keys and values that they may retrieve.

    The store is a ring: its oldest token is in slot start_B. In the order of time its
    tokens are numbered from 0 to T - 1, and those of the segment from T on. Query i
    may retrieve the tokens oldest <= j < stop.
    """

    q_BLHA: Array
    k_BLHA: Array
    v_BLHA: Array
    oldest_BL: Array  # int32
    stop_BL: Array  # int32
    k_BHTA: Array
    v_BHTA: Array
    start_B: Array  # int32


def retrieve(candidates: Candidates, top_k: int) -> Array:
    """Returns o_BLHA, the attention of each query to its top_k best keys.

    It is 0 for a query without candidates. On a mesh, each device computes its own
    streams and heads. The search is approximate on TPUs (RECALL) and exact elsewhere.
    """
    local = functools.partial(_retrieve, top_k=top_k)
    B, _, H, _ = candidates.q_BLHA.shape
    mesh = split_mesh(candidates.q_BLHA)
    if mesh is None or not divides(mesh, B, H):
        return local(candidates)
    axes = stream_axes(mesh, B)
    return jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(mesh_axes(letters(candidates), axes),),
        out_specs=mesh_axes(PartitionSpec(*"BLHA"), axes),
        check_vma=False,
    )(candidates)


def _retrieve(candidates: Candidates, top_k: int) -> Array:
    k_BLHA, v_BLHA, k_BHTA, v_BHTA = map(
        jax.lax.stop_gradient, (*candidates[1:3], *candidates[5:7])
    )
    B, H, T, A = k_BHTA.shape
    L = k_BLHA.shape[1]
    in_time_BT = (jnp.arange(T) - candidates.start_B[:, None]) % T
    in_time_BL = jnp.broadcast_to(T + jnp.arange(L), (B, L))
    in_time_BX = jnp.concatenate([in_time_BT, in_time_BL], axis=1)

    def pick(x_BHTA: Array, x_BLHA: Array, found_BHJ: Array) -> Array:
        """Returns the keys or values at indices among the X candidates."""
        take = jax.vmap(jax.vmap(lambda x_YA, at_J: x_YA[at_J]))
        stored_BHJA = take(x_BHTA, jnp.minimum(found_BHJ, T - 1))
        own_BHJA = take(jnp.swapaxes(x_BLHA, 1, 2), jnp.maximum(found_BHJ - T, 0))
        return jnp.where((found_BHJ < T)[..., None], stored_BHJA, own_BHJA)

    def attend(query: tuple[Array, Array, Array]) -> Array:
        q_BHA, oldest_B, stop_B = query
        fixed_BHA = jax.lax.stop_gradient(q_BHA)
        score_BHX = jnp.concatenate(
            [
                product("BHA,BHTA->BHT", fixed_BHA, k_BHTA),
                product("BHA,BLHA->BHL", fixed_BHA, k_BLHA),
            ],
            axis=2,
        )
        seen_BX = (in_time_BX >= oldest_B[:, None]) & (in_time_BX < stop_B[:, None])
        score_BHX = jnp.where(seen_BX[:, None], score_BHX, -jnp.inf)
        best_BHJ, found_BHJ = find_greatest(score_BHX, top_k)
        found_BHJ = checkpoint_name(found_BHJ, "found")
        seen_BHJ = checkpoint_name(best_BHJ > -jnp.inf, "found")
        k_BHJA, v_BHJA = pick(k_BHTA, k_BLHA, found_BHJ), pick(v_BHTA, v_BLHA, found_BHJ)
        score_BHJ = product("BHA,BHJA->BHJ", q_BHA, k_BHJA) / math.sqrt(A)
        p_BHJ = jax.nn.softmax(score_BHJ, axis=-1, where=seen_BHJ)
        return product("BHJ,BHJA->BHA", p_BHJ.astype(v_BHJA.dtype), v_BHJA)

    queries = candidates.q_BLHA, candidates.oldest_BL, candidates.stop_BL
    o_LBHA = jax.lax.map(
        jax.checkpoint(attend, policy=KEEP_FOUND),
        jax.tree.map(lambda x_BL: jnp.swapaxes(x_BL, 0, 1), queries),
        batch_size=max(SCORES // (B * H * (T + L)), 1),
    )
    return jnp.swapaxes(o_LBHA, 0, 1).astype(candidates.q_BLHA.dtype)


def find_greatest(score_BHX: Array, count: int) -> tuple[Array, Array]:
    """Returns the greatest scores and their indices."""
    count = min(count, score_BHX.shape[-1])
    if device_kind().startswith("TPU"):
        values, indices = jax.lax.approx_max_k(score_BHX, count, recall_target=RECALL)
    else:
        values, indices = jax.lax.top_k(score_BHX, count)
    return values, indices
