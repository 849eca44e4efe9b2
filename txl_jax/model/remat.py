"""Rematerialization: the choice of activations that are kept for the backward pass."""

from typing import Any

import flax.linen as nn
import jax

from txl_jax.model.config import ModelConfig, parse_remat

POLICIES = jax.checkpoint_policies


def rematerialize(block: type[nn.Module], config: ModelConfig) -> Any:
    """Returns a layer that keeps only what `model.remat_policy` names.

    The names are those that `jax.ad_checkpoint.checkpoint_name` gives to arrays of the
    layer. Whatever the policy, the layer's input is kept.
    """
    kind, names = parse_remat(config.remat_policy)
    if kind == "none":
        return block
    keep = None
    if kind == "dots":
        keep = POLICIES.dots_with_no_batch_dims_saveable
    elif kind == "save":
        keep = POLICIES.save_only_these_names(*names)
    elif kind == "offload":
        keep = POLICIES.save_and_offload_only_these_names(
            names_which_can_be_saved=[],
            names_which_can_be_offloaded=list(names),
            offload_src="device",
            offload_dst="pinned_host",
        )
    # Without a loop between the passes the compiler would merge the two computations;
    # inside a loop, preventing that only costs time.
    unrolled = config.unroll >= config.n_layer
    return nn.remat(block, prevent_cse=unrolled, policy=keep)
