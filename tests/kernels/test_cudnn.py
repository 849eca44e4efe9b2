"""The kernel `cudnn` agrees with the einsum kernel, up to rounded position scores.

JAX's own attention stands in for cuDNN's, which needs a GPU.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.kernels.cases import (
    POSITION,
    Case,
    assert_agree,
    cast,
    check,
    differentiate,
    oracle,
    pack,
)
from tests.support.refusal import refused
from txl_jax.kernels import cudnn, measure, xla
from txl_jax.kernels.cudnn import obstacle
from txl_jax.kernels.operands import Operands
from txl_jax.kernels.sharded import follow_mesh
from txl_jax.sharding.mesh import make_mesh
from txl_jax.sharding.options import MeshConfig
from txl_jax.sharding.rules import sharding

KERNEL = functools.partial(cudnn.rel_attention, implementation="xla")
BY_DISTANCE = ("r_RHA", "u_HA", "w_HA")

CASES = [
    Case(8, 8, "filling", absent=("bias_HR",)),  # the paper's positions
    Case(7, 8, "random"),  # an odd number of queries and of keys
    Case(9, 8, "documents", absent=POSITION),  # rotary, or learned positions
    Case(6, 9, "same_length", absent=BY_DISTANCE),  # ALiBi
    Case(36, 40, "staircase", absent=("u_HA", "w_HA"), A=41),  # joined segments
    Case(24, 40, "empty", A=8),  # 64 keys
    Case(23, 40, "everything", absent=("w_HA",), B=3),  # 63 keys
    Case(1, 16, "itself"),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_value_and_gradients(case: Case) -> None:
    check(KERNEL, case)


@pytest.mark.parametrize("case", [CASES[1], CASES[3], CASES[4]._replace(B=1)], ids=str)
def test_bfloat16(case: Case) -> None:
    check(KERNEL, case, jnp.bfloat16)


@pytest.mark.parametrize("R", [1, 6, 11])
@pytest.mark.parametrize("absent", [(), BY_DISTANCE])
def test_keys_beyond_the_last_distance(R: int, absent: tuple[str, ...]) -> None:
    inputs = Case(7, 5, "random", absent=absent).inputs()
    if not absent:
        inputs["r_RHA"] = inputs["r_RHA"][-R:]
    inputs["bias_HR"] = inputs["bias_HR"][:, -R:]
    expected = differentiate(xla.rel_attention, inputs)
    assert_agree(differentiate(KERNEL, inputs), expected)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_query_without_keys_gives_no_nan(dtype: Any) -> None:
    inputs = cast(Case(5, 4, "random").inputs(), dtype)
    inputs["oldest_BL"] = jnp.full((2, 5), 9)
    for x in jax.tree.leaves(differentiate(KERNEL, inputs)):
        assert jnp.isfinite(x).all()


def test_hidden_keys_are_finite_in_float16() -> None:
    """JAX's attention has no float16 on a CPU."""
    oldest_BL = jnp.full((1, 3), 2)
    bias_HBLK = cudnn.shift_and_mask(jnp.ones((1, 1, 3, 5), "float16"), oldest_BL, 5, 5)
    rows = [
        [-(2**15), -(2**15), 1, *x] for x in ([-(2**15)] * 2, [1, -(2**15)], [1, 1])
    ]
    np.testing.assert_array_equal(bias_HBLK[0, 0], rows)


def test_hidden_keys_have_no_weight_under_large_scores() -> None:
    inputs = Case(5, 4, "itself", absent=("bias_HR",)).inputs()
    inputs["q_BLHA"] *= 30
    o_BLHA = jax.jit(KERNEL)(pack(cast(inputs, jnp.bfloat16)))
    np.testing.assert_array_equal(o_BLHA, inputs["v_BKHA"][:, 4:])


@pytest.mark.parametrize("absent", [(), BY_DISTANCE, POSITION])
def test_a_mesh_gives_the_numbers_of_one_device(absent: tuple[str, ...]) -> None:
    mesh = make_mesh(MeshConfig(data=2, fsdp=2, model=2))
    case = Case(6, 5, "filling", absent=absent, B=8, H=4)
    inputs = {
        name: None
        if x is None
        else jax.device_put(x, sharding(mesh, name.split("_")[-1]))
        for name, x in case.inputs().items()
    }
    assert_agree(differentiate(follow_mesh(KERNEL), inputs), oracle(case))


def test_the_measurement_finds_faults() -> None:
    def wrong(operands: Operands) -> jax.Array:
        return KERNEL(operands._replace(oldest_BL=operands.oldest_BL + 1))

    work = measure.Workload(
        (2, 2, 136, 200, 64, 336), "bfloat16", ("bias_HR",), 136, layers=1
    )
    assert measure.find_error(KERNEL, work) == ""
    assert " is off by " in measure.find_error(wrong, work)
    assert 'model.kernel = "cudnn"' in str(
        measure.try_kernel(cudnn.rel_attention, work)
    )


class Gpu:
    """A device with the attributes that the choice of a kernel reads."""

    def __init__(self, capability: str = "9.0"):
        self.compute_capability = capability


@pytest.mark.parametrize(
    ("capability", "A", "dtype", "dropout", "reason"),
    [
        ("8.0", 128, "bfloat16", False, ""),
        ("10.3", 41, "float16", False, ""),
        ("7.5", 64, "bfloat16", False, "compute capability 8.0"),
        ("gfx90a", 64, "bfloat16", False, "needs an NVIDIA GPU"),
        ("9.0", 64, "float32", False, "set model.dtype=bfloat16"),
        ("9.0", 64, "bfloat16", True, "set model.dropatt=0"),
        ("9.0", 129, "bfloat16", False, "heads of 128 features"),
    ],
)
def test_where_it_applies(
    capability: str, A: int, dtype: str, dropout: bool, reason: str
) -> None:
    device: Any = Gpu(capability)
    found = obstacle(device, A, jnp.dtype(dtype), dropout)
    assert reason in found
    assert bool(found) == bool(reason)


def test_it_is_refused_on_a_cpu_in_one_line() -> None:
    operands = pack(cast(Case(4, 4).inputs(), jnp.bfloat16))
    with refused('model.kernel = "cudnn" needs an NVIDIA GPU .*set model.kernel=auto'):
        jax.eval_shape(cudnn.rel_attention, operands)
