"""Memories: the states that a model keeps from the segments it has read.

`kinds` chooses a `protocol.Kind` for a config. Each has one file, except the paper's:

    cache       hidden states, in training
    key_values  keys and values, in evaluation with fixed parameters
    ring        the same in rings, for one token at a time
"""

from txl_jax.model.memory.cache import Memory as Memory
