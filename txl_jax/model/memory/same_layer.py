"""Same-layer recurrence: memories of each layer's own output (Ding et al. 2021).

Equation 5 of ERNIE-Doc: the memory that layer n reads holds its own outputs of earlier
segments, in place of its inputs. Each segment then lengthens the reach by a segment,
without limit, and layer n of a segment needs layer n of the one before: segments are
read one after the other.
"""

import flax.linen as nn
import jax.numpy as jnp
from jax import Array

from txl_jax.errors import UserError
from txl_jax.model.config import ModelConfig
from txl_jax.model.memory.cache import CacheLayer
from txl_jax.model.memory.key_values import project_states
from txl_jax.model.memory.protocol import Kept, LayerMemory


def check_in_sequence(config: ModelConfig, P: int, T: int, segment_len: int) -> None:
    """Raises UserError if a call of T tokens in P pieces has several segments."""
    if config.in_sequence and (P > 1 or 0 < segment_len < T):
        raise UserError(
            f"{config.in_sequence} reads one segment after the other: set "
            "train.gradient_segments, eval.segments_per_step and mesh.segments to 1"
        )


def keep(
    config: ModelConfig,
    attention: nn.Module,
    layer: LayerMemory,
    kept: Kept,
    h_BLD: Array,
) -> Kept:
    """Returns what a layer keeps, given its output and what its attention keeps.

    A memory of keys and values keeps those of the output, with the same projections.
    """
    if config.recurrence == "below":
        return kept
    if isinstance(layer, CacheLayer):
        return h_BLD
    params = dict(attention.variables["params"])
    outputs = project_states(config, params, h_BLD)
    M = kept[0].shape[1] - h_BLD.shape[1]
    return tuple(
        jnp.concatenate([x_BKHA[:, :M], own_BLHA], axis=1)
        for x_BKHA, own_BLHA in zip(kept, outputs, strict=True)
    )
