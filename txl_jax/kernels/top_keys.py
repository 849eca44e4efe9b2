"""Attention to the best of many keys, by content alone (Wu et al. 2022, section 3.2).

Keys and values are constants; queries have gradients.

Dims: X candidates, J of them that a query takes.
"""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.ad_checkpoint import checkpoint_name

from txl_jax.kernels.sharded import (
    divides,
    over_heads,
    split_mesh,
    stream_axes,
    target_device,
)
from txl_jax.kernels.xla import product

# The share of the best keys that the approximate search of TPUs finds on average.
RECALL = 0.95
# The scores that a device holds at once, 256 MiB in float32.
SCORES = 2**26
# The backward pass computes all but the search again: its scores are too many to keep.
KEEP_FOUND = jax.checkpoint_policies.save_only_these_names("found")


class Candidates(NamedTuple):
    """Queries and what they may take: the keys of times oldest <= time < stop."""

    q_BLHA: Array
    k_BHXA: Array
    v_BHXA: Array
    time_BX: Array  # int32, as the next two
    oldest_BL: Array
    stop_BL: Array


def attend_to_best(candidates: Candidates, top_k: int) -> Array:
    """Returns o_BLHA, the attention of each query to its top_k best keys.

    It is 0 for a query without candidates. The search is approximate on TPUs (RECALL)
    and exact elsewhere. On a mesh, each device computes its own streams and heads.
    """
    attend = functools.partial(_attend, top_k=top_k)
    B, _, H, _ = candidates.q_BLHA.shape
    mesh = split_mesh(candidates.q_BLHA)
    if mesh is None or not divides(mesh, B, H):
        return attend(candidates)
    return over_heads(attend, candidates, mesh, stream_axes(mesh, B))


def _attend(candidates: Candidates, top_k: int) -> Array:
    q_BLHA, k_BHXA, v_BHXA, time_BX, oldest_BL, stop_BL = candidates
    B, H, X, A = k_BHXA.shape
    find = jax.lax.top_k
    if target_device().device_kind.startswith("TPU"):
        find = functools.partial(jax.lax.approx_max_k, recall_target=RECALL)
    take = jax.vmap(jax.vmap(lambda x_XA, found_J: x_XA[found_J]))

    def attend_one(q_BHA: Array, oldest_B: Array, stop_B: Array) -> Array:
        seen_BX = (time_BX >= oldest_B[:, None]) & (time_BX < stop_B[:, None])
        score_BHX = product("BHA,BHXA->BHX", jax.lax.stop_gradient(q_BHA), k_BHXA)
        score_BHX = jnp.where(seen_BX[:, None], score_BHX, -jnp.inf)
        best_BHJ, found_BHJ = find(score_BHX, min(top_k, X))
        found_BHJ = checkpoint_name(found_BHJ, "found")
        seen_BHJ = checkpoint_name(best_BHJ > -jnp.inf, "found")
        k_BHJA, v_BHJA = take(k_BHXA, found_BHJ), take(v_BHXA, found_BHJ)
        score_BHJ = product("BHA,BHJA->BHJ", q_BHA, k_BHJA) / math.sqrt(A)
        p_BHJ = jax.nn.softmax(score_BHJ, axis=-1, where=seen_BHJ)
        return product("BHJ,BHJA->BHA", p_BHJ.astype(v_BHJA.dtype), v_BHJA)

    o_LBHA = jax.lax.map(
        lambda query: jax.checkpoint(attend_one, policy=KEEP_FOUND)(*query),
        tuple(jnp.swapaxes(x_BL, 0, 1) for x_BL in (q_BLHA, oldest_BL, stop_BL)),
        batch_size=max(SCORES // (B * H * X), 1),
    )
    return jnp.swapaxes(o_LBHA, 0, 1).astype(q_BLHA.dtype)
