"""Transformer-XL in JAX.

A Transformer-XL is a pure function `(params, tokens, memory) -> (hidden, memory)`.
Training scans it over segments, evaluation scans it with a longer memory, generation
calls it with one token.

Each dimension has one letter throughout the package:

    K  keys, K = M + L
    B  streams               S  segments in one call   L  length of a segment
    M  length of the memory  R  distances, at most K   N  layers
    D  d_model               E  size of an embedding   F  d_inner, the feed-forward
    H  heads                 A  size of a head         V  vocabulary
    G  rare clusters of the adaptive softmax

The letters are the suffix of a tensor's name (`h_BLD`), the subscripts in `einsum`, the
logical axes of parameters and the keys of `txl_jax.sharding.rules.RULES`. A
module's `Dims:` line adds the letters that are used only there.

A call of the model returns a new memory, which is passed to the next call:

    >>> import jax, txl_jax
    >>> config = txl_jax.ModelConfig(vocab_size=9, n_layer=1, d_model=8, mem_len=6)
    >>> model = txl_jax.TransformerXL(config)
    >>> memory = txl_jax.Memory.empty(config, batch_size=1)
    >>> tokens_BL = jax.numpy.array([[1, 2, 3, 4]])
    >>> init = jax.jit(model.init, static_argnames="method")
    >>> params = init(jax.random.key(0), tokens_BL, memory, method="logits")
    >>> apply = jax.jit(model.apply, static_argnames="method")
    >>> log_probs_BLV, memory = apply(params, tokens_BL, memory, method="logits")
    >>> log_probs_BLV.shape, memory.filled_B.tolist()
    ((1, 4, 9), [4])

`txl_jax.load(workdir)` loads a trained model. Importing the package touches no device.
"""

from etils import epy

# Imported on first use, which keeps `import txl_jax` fast.
with epy.lazy_api_imports(globals()):
    from txl_jax.errors import UserError as UserError
    from txl_jax.model.config import ModelConfig as ModelConfig
    from txl_jax.model.memory import Memory as Memory
    from txl_jax.model.txl import TransformerXL as TransformerXL
    from txl_jax.workdir.load import Loaded as Loaded
    from txl_jax.workdir.load import load as load
    from txl_jax.workdir.memory_file import load_memory as load_memory
    from txl_jax.workdir.memory_file import save_memory as save_memory
    from txl_jax.workdir.scoring import hidden_states as hidden_states
    from txl_jax.workdir.scoring import score as score

__version__ = "0.1.0"
__all__ = [
    *("Loaded", "Memory", "ModelConfig", "TransformerXL", "UserError"),
    *("hidden_states", "load", "load_memory", "save_memory", "score"),
]
