"""FLOPs as the compiler counts them, and bounds as computed by hand.

Dims: L segment, M memory, D model, H heads, A head, F feed-forward, V vocabulary, B
streams.
"""

import dataclasses
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest

from txl_jax.aot import chips, roofline
from txl_jax.aot.traffic import Collective
from txl_jax.model import flops
from txl_jax.model.config import REMAT_NAMES, ModelConfig
from txl_jax.model.memory import Memory
from txl_jax.model.txl import TransformerXL
from txl_jax.update.init import abstract_params

pytestmark = pytest.mark.exact_bits

B, L, M = 4, 32, 48
# Products far above the elementwise work, which the compiler counts as well.
MODEL = ModelConfig(
    vocab_size=512,
    n_layer=2,
    d_model=256,
    n_head=4,
    d_head=64,
    d_inner=512,
    mem_len=M,
    dropout=0.0,
    unroll=2,
)
ALL_NAMES = f"save:{','.join(REMAT_NAMES)}"
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
    [{"clamp_len": 20, "remat_policy": ALL_NAMES}, CLUSTERS],
    ids=["clamped, recomputed", "clusters"],
)
def test_flops_of_an_update_agree_with_the_compiler(changes: dict[str, Any]) -> None:
    config = dataclasses.replace(MODEL, **changes)
    made = roofline.device_flops(config, B, L, model_shards=1)
    if changes == CLUSTERS:
        # The compiler counts a loop's body once: a block of the tokens of each cluster.
        own = flops.vocabulary_products(config, B * L)
        head = 2 * B * L * 256 * (128 + 2)
        made += 4 * (head + 2 * B * L * (128 * 128 + 64 * 256) - own[2])
    assert made == pytest.approx(counted(config), rel=0.03)


def test_flops_by_hand() -> None:
    tiny = ModelConfig(
        vocab_size=10,
        n_layer=3,
        d_model=4,
        n_head=1,
        d_head=2,
        d_inner=5,
        mem_len=6,
        position="none",
    )
    # q, k, v, o: 4 x 2 x 4 x 2 x 7; scores and values: 2 x 2 x 2 x 7 x 13; feed-forward
    # 2 x 2 x 7 x 4 x 5. Keys and values of the memory: 2 x 2 x 4 x 2 x 6.
    layers = flops.layer_products(tiny, 7)
    assert layers.tolist() == [3 * (448 + 560), 3 * 192, 3 * 728]
    training = 3 * 1736 + 2 * 192
    assert layers @ flops.NEEDED == 3 * training
    # Products without weights are not kept by "dots".
    assert layers @ roofline.TRAINING == 3 * (training + 728)
    assert layers @ roofline.REMAT == 3 * (training + 1736 + 192)
    # All layers in an update of 2 streams, with 14 tokens' softmax of 10 words.
    softmax = 3 * 2 * 14 * 4 * 10
    assert flops.needed_flops(tiny, 2, 7, True) == 6 * training + softmax
    # The device makes scores of the softmax twice.
    made = roofline.device_flops(tiny, 2, 7, model_shards=2)
    assert made == 3 * training + softmax * 4 / 3
    # Evaluation has keys and values already.
    assert flops.needed_flops(tiny, 2, 7, False) == 6 * 1736 + softmax / 3


def test_shares_of_clusters_by_zipfs_law() -> None:
    parts = flops.zipf(267_735, (20_000, 40_000, 200_000))
    assert sum(parts) == pytest.approx(1)
    assert parts == sorted(parts, reverse=True)[:1] + parts[1:]
    assert parts[0] == pytest.approx(0.80, abs=0.02)


def test_bounds_by_hand() -> None:
    part = chips.find("v5e:16x4")  # a ring of 16 and a line of 4
    coords = [(x, y) for x in range(16) for y in range(4)]
    everyone = tuple(range(64))
    row = tuple(range(0, 64, 4))  # the ring
    collectives = [
        Collective("all-reduce", 10**9, everyone, 2, ""),
        Collective("all-gather", 10**9, row, 1, ""),
        Collective("collective-permute", 10**6, (0, 4), 1, ""),
        Collective("all-reduce", 4, everyone, 1, ""),
    ]
    seconds = roofline.bounds(part, 197e12, 819e6, collectives, coords)
    reduced = 2 * 1e9 * 63 / 64 / (3 * 4.5e10)
    gathered = 1e9 * 15 / 16 / (2 * 4.5e10)
    permuted = 1e-6 + 1e6 / 4.5e10
    # 8 hops along the ring, 4 along the line, there and back.
    scalar = 2 * 12e-6
    expected = 2 * reduced + gathered + permuted + scalar
    bounds = {"compute": 1, "hbm": 1e-3, "interconnect": expected, "network": 0}
    assert seconds == pytest.approx(bounds)


def test_chips_devices_and_cores_differ() -> None:
    v3, v4, v5e = (chips.find(name) for name in ("v3:4x4", "v4:2x2x4", "v5e:4x4"))
    assert [part.chips for part in (v3, v4, v5e)] == [16, 16, 16]
    assert [part.chip.cores for part in (v3, v4, v5e)] == [2, 2, 1]
    assert [part.chip.devices for part in (v3, v4, v5e)] == [2, 1, 1]
    # A core of v3 has half of the products and of the bandwidth.
    half = roofline.bounds(v3, 123e12 / 2, 450e9, [], [])
    assert (half["compute"], half["hbm"]) == (pytest.approx(1), pytest.approx(1))


@pytest.mark.parametrize(
    ("device_kind", "teraflops"),
    [
        ("TPU v5 lite", 197),
        ("TPU v5", 459),
        ("NVIDIA A100-SXM4-40GB", 312),
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 NVL", 835),
        ("NVIDIA GH200 480GB", 989),
        ("NVIDIA L40S", 0),
        ("Tesla T4", 65),
        ("cpu", 0),
    ],
)
def test_a_device_kind_has_its_data_sheet_s_peak(
    device_kind: str, teraflops: float
) -> None:
    assert roofline.known_peak(device_kind) == teraflops * 1e12


def test_the_devices_of_a_cpu_share_one_measured_peak() -> None:
    assert roofline.peak_flops() == roofline.measured_peak() > 1e9
