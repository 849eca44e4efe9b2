"""Generation, one token at a time with the memory.

>>> from txl_jax.generate import GenerateConfig, generation_model, sample, stream
"""

import importlib
from typing import TYPE_CHECKING, Any

from txl_jax.generate.options import GenerateConfig as GenerateConfig
from txl_jax.generate.options import generation_model as generation_model

if TYPE_CHECKING:
    from txl_jax.generate.sampler import sample as sample
    from txl_jax.generate.sampler import stream as stream

__all__ = ["GenerateConfig", "generation_model", "sample", "stream"]


def __getattr__(name: str) -> Any:
    """Imports the sampler lazily: the options must not import jax."""
    if name in __all__:
        return getattr(importlib.import_module("txl_jax.generate.sampler"), name)
    raise AttributeError(f"module 'txl_jax.generate' has no attribute {name!r}")
