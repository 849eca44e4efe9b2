"""The kind of memory that a config names."""

from txl_jax.model.config import ModelConfig
from txl_jax.model.memory.cache import HiddenStates
from txl_jax.model.memory.fast_weights import Fast
from txl_jax.model.memory.protocol import Kind

KINDS: tuple[type[Kind], ...] = (Fast,)


def choose_kind(config: ModelConfig) -> Kind:
    """Returns the kind whose field is set, or the paper's."""
    for kind in KINDS:
        if getattr(config, kind.field):
            return kind(config)
    return HiddenStates(config)
