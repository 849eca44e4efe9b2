"""The benchmarks' models, of published sizes with random weights, and their text.

Dims: T tokens.
"""

import dataclasses
import time
from typing import Any

import flax.linen as nn
import jax
import numpy as np

from txl_jax.model.config import ModelConfig
from txl_jax.sharding.mesh import make_mesh
from txl_jax.sharding.options import MeshConfig
from txl_jax.update.state import init_params

# The paper's 12 layers for enwik8 (Table 2), and its standard model for WikiText-103
# (Table 1); SMALL trains in an hour on two cores.
ENWIK8 = ModelConfig(vocab_size=204)
SMALL = ModelConfig(
    vocab_size=204,
    n_layer=6,
    d_model=256,
    n_head=8,
    d_head=32,
    d_inner=1024,
    mem_len=128,
)
WIKITEXT = ModelConfig(
    vocab_size=267_735,
    cutoffs=(20_000, 40_000, 200_000),
    n_layer=16,
    d_model=410,
    n_head=10,
    d_head=41,
    d_inner=2100,
    mem_len=150,
)


def shrink(config: ModelConfig) -> ModelConfig:
    """Returns a tiny model of the same kind."""
    if config.cutoffs:
        config = dataclasses.replace(config, vocab_size=300, cutoffs=(20, 40, 200))
    sizes = {"n_layer": 2, "d_model": 16, "n_head": 2, "d_head": 8, "d_inner": 32}
    return dataclasses.replace(config, **sizes)  # type: ignore[arg-type]


def make_params(config: ModelConfig) -> Any:
    """Returns random parameters."""
    return jax.jit(lambda: nn.unbox(init_params(config, jax.random.key(0))))()


def one_device() -> jax.sharding.Mesh:
    """Returns a mesh of one device, as many as the peer uses."""
    return make_mesh(MeshConfig(), jax.devices()[:1])


def zipf_text(types: int, T: int) -> np.ndarray:
    """Returns tokens_T, int32, drawn by Zipf's law: rank k in proportion to 1 / k."""
    share = np.cumsum(1 / np.arange(1, types + 1))
    draws = np.random.default_rng(0).random(T)
    return np.searchsorted(share / share[-1], draws).astype(np.int32)


class Compiled:
    """A jitted function compiled for given arguments, and its compilation time."""

    def __init__(self, function: Any, *arguments: Any):
        began = time.perf_counter()
        lowered = function.lower(*arguments)
        self.lower_seconds = time.perf_counter() - began
        self.call = lowered.compile()
        self.seconds = time.perf_counter() - began

    def describe(self) -> dict[str, Any]:
        """Returns the costs for the report; null if the compiler does not state one."""
        memory = self.call.memory_analysis()
        return {
            "compile_seconds": round(self.seconds, 2),
            "temporary_bytes": memory.temp_size_in_bytes if memory else None,
        }
