"""FLOPs as the compiler counts them, and as computed by hand.

Dims: L segment, M memory, D model, H heads, A head, F feed-forward, V vocabulary, B
streams.
"""

import dataclasses
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest

from tests.support import tiny
from txl_jax.model import flops
from txl_jax.model.config import ModelConfig
from txl_jax.model.memory import Memory
from txl_jax.model.txl import TransformerXL
from txl_jax.update.state import abstract_params

pytestmark = pytest.mark.exact_bits

B, L, M = 4, 32, 48
# Products far exceed the elementwise work, which the compiler also counts.
SIZES: dict[str, Any] = dict(vocab_size=512, n_layer=2, d_model=256, n_head=4)
SIZES |= dict(d_head=64, d_inner=512, mem_len=M, dropout=0.0, unroll=2)
MODEL = ModelConfig(**SIZES)
CLUSTERS = {"cutoffs": (128, 256), "div_val": 2}


def counted(config: ModelConfig) -> float:
    """Returns the FLOPs of an update as the compiler counts them, layers unrolled."""
    model = TransformerXL(config)
    tokens_BL = jax.ShapeDtypeStruct((B, L), jnp.int32)
    params = nn.unbox(abstract_params(config))
    memory = jax.eval_shape(lambda: Memory.empty(config, B))

    def loss(params: Any, tokens_BL: Any, memory: Any) -> Any:
        result: Any = model.apply(
            {"params": params}, tokens_BL, tokens_BL, memory, method="nll"
        )
        return jnp.sum(result[0])

    lowered = jax.jit(jax.grad(loss)).lower(params, tokens_BL, memory)
    cost: Any = lowered.compile().cost_analysis()
    return cost["flops"]


@pytest.mark.parametrize(
    "changes",
    [
        {"clamp_len": 20},
        pytest.param({**CLUSTERS, **tiny.GATED}, marks=pytest.mark.long),
        pytest.param({"fast_weights": True}, marks=pytest.mark.long),
    ],
    ids=["", "clusters and gates", "fast weights"],
)
def test_flops_of_an_update_agree_with_the_compiler(changes: dict[str, Any]) -> None:
    config = dataclasses.replace(MODEL, **changes)
    needed = flops.needed_flops(config, B, L, training=True)
    # The softmax recomputes its scores. The compiler counts the body of the loop over
    # a cluster's blocks of tokens once.
    _, scored = flops.vocabulary_products(config, B * L)
    head = 2 * B * L * 256 * (config.cutoffs[0] + 2 if config.cutoffs else 512)
    tails = 2 * B * L * (128 * 128 + 64 * 256) if config.cutoffs else 0
    made = needed - 3 * scored + 4 * (head + tails)
    assert made == pytest.approx(counted(config), rel=0.03)


def test_flops_by_hand() -> None:
    sizes: dict[str, Any] = dict(vocab_size=10, n_layer=3, d_model=4, n_head=1)
    small = ModelConfig(**sizes, d_head=2, d_inner=5, mem_len=6, position="none")
    # q, k, v, o: 4 x 2 x 4 x 2 x 7; feed-forward: 2 x 2 x 7 x 4 x 5; scores and values:
    # 2 x 2 x 2 x 7 x 13. Keys and values of the memory: 2 x 2 x 4 x 2 x 6.
    own, memory = flops.layer_products(small, 7)
    assert (own, memory) == (3 * (448 + 560 + 728), 3 * 192)
    # An update of 2 streams, with 14 tokens' softmax of 10 words.
    softmax = 2 * 14 * 4 * 10
    needed = 3 * (2 * own + softmax) + 2 * 2 * memory
    assert flops.needed_flops(small, 2, 7, training=True) == needed
    # Only one of three segments that are computed together reads the memory.
    joined = flops.needed_flops(small, 2, 7, training=True, together=3)
    assert 3 * joined == pytest.approx(3 * needed - 2 * 2 * 2 * memory)
    # Evaluation has keys and values already.
    assert flops.needed_flops(small, 2, 7, training=False) == 2 * own + softmax
