"""Transformer-XL in JAX.

A Transformer-XL is a pure function `(params, tokens, memory) -> (hidden, memory)`.
Training scans it over segments, evaluation scans it with a longer memory, generation
calls it with one token.

The dimensions, one letter each, everywhere:

    K  keys, K = M + L  (not the size of a head: that is A)
    B  streams               S  segments in one call   L  length of a segment
    M  length of the memory  R  distances, R = K       N  layers
    D  d_model               E  size of an embedding   F  d_inner, the feed-forward
    H  heads                 A  size of a head         V  vocabulary
    G  clusters of the adaptive softmax

The same letter is the suffix of a tensor's name (`h_BLD`), the subscript in `einsum`,
the logical axis of a parameter and the key in `txl_jax.sharding.RULES`.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from txl_jax.model.config import ModelConfig as ModelConfig
    from txl_jax.model.memory import Memory as Memory
    from txl_jax.model.txl import TransformerXL as TransformerXL
    from txl_jax.restore import load as load

_HOMES = {
    "Memory": "txl_jax.model.memory",
    "ModelConfig": "txl_jax.model.config",
    "TransformerXL": "txl_jax.model.txl",
    "load": "txl_jax.restore",
}
__version__ = "0.1.0"
__all__ = ["Memory", "ModelConfig", "TransformerXL", "load"]


def __getattr__(name: str) -> Any:
    """Imports a public name when it is first used: `import txl_jax` alone is free."""
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'txl_jax' has no attribute {name!r}")
