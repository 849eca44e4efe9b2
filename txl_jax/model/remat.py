"""Rematerialization: what the backward pass keeps, and what it computes again."""

from typing import Any

import flax.linen as nn
import jax

from txl_jax.model.config import parse_remat

POLICIES = jax.checkpoint_policies


def rematerialize(block: type[nn.Module], policy: str) -> Any:
    """Returns a layer that keeps only what `model.remat_policy` names.

    The names are those that `jax.ad_checkpoint.checkpoint_name` gives to arrays of the
    layer. Whatever the policy, the layer's input is kept.
    """
    kind, names = parse_remat(policy)
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
    # prevent_cse is only needed outside a scan; inside, it costs time.
    return nn.remat(block, prevent_cse=False, policy=keep)
