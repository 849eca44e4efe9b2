"""Generation, one token at a time with the memory.

>>> from txl_jax.generate import GenerateConfig, generation_model, sample, stream
"""

from etils import epy

from txl_jax.generate.options import GenerateConfig as GenerateConfig
from txl_jax.generate.options import generation_model as generation_model

# Imported on first use: the options must not import jax.
with epy.lazy_api_imports(globals()):
    from txl_jax.generate.sampler import sample as sample
    from txl_jax.generate.sampler import stream as stream

__all__ = ["GenerateConfig", "generation_model", "sample", "stream"]
