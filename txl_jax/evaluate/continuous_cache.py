"""The continuous cache: a mixture with words that followed similar hidden states.

Each of the newest C hidden states h_i remembers its target x_{i+1}, so that

    p(x) = (1 - weight) p_model(x) + weight p_cache(x),
    p_cache(x) ~ sum over i with x_{i+1} = x of exp(theta h_t . h_i)

(Grave, Joulin and Usunier 2017, equations 3 to 5). While the cache is empty, p is
p_model. Nothing is trained.

Dims: C tokens in the cache, B streams, L segment, K = C + L.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import Mesh

from txl_jax.evaluate.options import EvalConfig, evaluation_model
from txl_jax.evaluate.reader import Reader, from_hidden
from txl_jax.kernels.product import float32_product
from txl_jax.kernels.xla import MASKED
from txl_jax.model.config import ModelConfig
from txl_jax.model.fixed import FixedTransformerXL
from txl_jax.model.segment import OneSegment

NONE = -1  # the target of an empty entry, and of padding

read_hidden = from_hidden(lambda model, h_BLD, segment: h_BLD)


class Cache(NamedTuple):
    """The newest hidden states and their targets, oldest first."""

    h_BCD: Array
    target_BC: Array  # int32

    def mix(
        self, nll_BL: Array, h_BLD: Array, segment: OneSegment, config: EvalConfig
    ) -> tuple[Array, "Cache"]:
        """Returns (nll_BL of the mixture, the cache after the segment)."""
        target_BL = segment.targets_BL
        C, L = self.target_BC.shape[1], target_BL.shape[1]
        real_BL = jnp.arange(L) < segment.length_B[:, None]
        h_BKD = jnp.concatenate([self.h_BCD, h_BLD], axis=1)
        known_BL = jnp.where(real_BL, target_BL, NONE)
        target_BK = jnp.concatenate([self.target_BC, known_BL], axis=1)
        # Query l sees the C keys before its own, C + l.
        age_LK = jnp.arange(L)[:, None] + C - jnp.arange(C + L)
        seen_BLK = (age_LK > 0) & (age_LK <= C) & (target_BK != NONE)[:, None]
        score_BLK = config.cache_theta * float32_product("BLD,BKD->BLK", h_BLD, h_BKD)
        score_BLK = jnp.where(seen_BLK, score_BLK, MASKED)
        same_BLK = seen_BLK & (target_BK[:, None] == target_BL[..., None])
        total_BL = jax.nn.logsumexp(score_BLK, axis=-1)
        hit_BL = jax.nn.logsumexp(jnp.where(same_BLK, score_BLK, -jnp.inf), axis=-1)
        mixed_BL = jnp.logaddexp(
            jnp.log1p(-config.cache_weight) - nll_BL,
            jnp.log(config.cache_weight) + hit_BL - total_BL,
        )
        nll_BL = jnp.where(seen_BLK.any(-1), -mixed_BL, nll_BL)
        return nll_BL, Cache(h_BKD[:, L:], target_BK[:, L:])


def make_reader(model_config: ModelConfig, config: EvalConfig, mesh: Mesh) -> Reader:
    """Returns the reader of the mixture's summed nll in nats."""
    model_config = evaluation_model(model_config, config)

    def read_and_mix(
        model: FixedTransformerXL, state: Any, segment: OneSegment, segment_len: int
    ) -> tuple[Array, Any]:
        memory, cache = state
        h_BLD, memory = read_hidden(model, memory, segment, segment_len)
        nll_BL = model.embedding.nll(h_BLD, segment.targets_BL)
        nll_BL, cache = cache.mix(nll_BL, h_BLD, segment, config)
        return jnp.sum(nll_BL * segment.weights_BL), (memory, cache)

    def empty() -> Cache:
        B, C, D = config.streams, config.cache_len, model_config.d_model
        h_BCD = jnp.zeros((B, C, D), model_config.compute_dtype)
        return Cache(h_BCD, jnp.full((B, C), NONE, jnp.int32))

    B, L, S = config.streams, config.tgt_len, config.segments_per_step
    return Reader(model_config, read_and_mix, B, L, mesh, extra=empty, n_segments=S)
