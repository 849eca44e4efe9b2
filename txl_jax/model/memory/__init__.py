"""The memories: what a model keeps of the segments that it has read.

A kind of memory is a pytree with the methods of `protocol.MemoryLike`, in one file:

    cache       hidden states, the paper's memory: training
    compressive the same, and slots for several older states each
    key_values  keys and values: evaluation, with fixed parameters
    ring        keys and values in rings: one token at a time
    retrieval   one of these, and a store of one layer's keys and values
    memory_tokens  hidden states, and tokens that each segment writes for the next one

`kinds` chooses the one that a config names. `halo` has what replaces the first one in a
call whose tokens lie on several devices, a `protocol.CallMemory`.
"""

from txl_jax.model.memory.cache import Memory as Memory
