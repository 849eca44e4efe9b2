"""Rematerialization: the activations that a layer keeps for the backward pass."""

from txl_jax.errors import UserError, nearest

REMAT_POLICIES = ("none", "full", "dots", "save:NAMES", "offload:NAMES")
# Queries, keys, values, projected distances, the results of `chunked` and `tpu`, the
# feed-forward's inner features, and the sums with the residual.
REMAT_NAMES = ("q", "k", "v", "r", "o", "hidden", "sum")


def parse_remat(policy: str) -> tuple[str, tuple[str, ...]]:
    """Returns the kind and the names of a remat policy; raises UserError."""
    kind, colon, text = policy.partition(":")
    names = tuple(text.split(",")) if colon else ()
    if kind in ("save", "offload") and set(names) <= set(REMAT_NAMES) and names:
        return kind, names
    if policy in REMAT_POLICIES[:3]:
        return kind, ()
    raise UserError(
        f"model.remat_policy = {policy!r} must be one of {', '.join(REMAT_POLICIES)}"
        f"{nearest(policy, REMAT_POLICIES)}; NAMES are some of {', '.join(REMAT_NAMES)}"
    )
