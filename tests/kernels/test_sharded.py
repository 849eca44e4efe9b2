"""A kernel on a mesh gives the numbers, gradients and dropout of one device."""

import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest

from tests.kernels.cases import Case, assert_agree, differentiate, oracle
from tests.support import tiny
from txl_jax.errors import UserError
from txl_jax.kernels import chunked, dispatch, xla
from txl_jax.kernels.operands import Operands
from txl_jax.kernels.sharded import follow_mesh
from txl_jax.model.memory import Memory
from txl_jax.model.txl import TransformerXL
from txl_jax.sharding.mesh import make_mesh
from txl_jax.sharding.options import MeshConfig
from txl_jax.sharding.rules import letters, sharding, shardings
from txl_jax.update.state import abstract_params

CUBE = MeshConfig(data=2, fsdp=2, model=2)
CASE = Case(6, 5, "filling", 0.3, B=8, H=4)
CHUNKED = functools.partial(chunked.rel_attention, blocks=(4, 8))


@pytest.mark.parametrize(
    ("sizes", "absent"),
    [(CUBE, ()), (MeshConfig(data=1, fsdp=2, model=4), ("r_RHA", "u_HA", "w_HA"))],
    ids=str,
)
def test_results_match_one_device(sizes: MeshConfig, absent: tuple[str, ...]) -> None:
    mesh, case = make_mesh(sizes), CASE._replace(absent=absent)
    # The inner function is inside a shard_map, where nothing is left to split.
    split = follow_mesh(follow_mesh(CHUNKED))
    inputs = {
        name: None
        if x is None
        else jax.device_put(x, sharding(mesh, name.split("_")[-1]))
        for name, x in case.inputs().items()
    }
    actual = differentiate(split, inputs, case.dropout)
    assert actual[0].sharding.is_equivalent_to(sharding(mesh, "BLHA"), 4)
    assert_agree(actual, oracle(case))


def test_streams_and_heads_that_do_not_divide() -> None:
    """All devices compute such streams; only the compiler splits such heads."""
    cube = sharding(make_mesh(CUBE), "")
    case = CASE._replace(B=6)
    placed = jax.device_put(case.inputs(), cube)
    actual = differentiate(follow_mesh(CHUNKED), placed, case.dropout)
    assert_agree(actual, oracle(case))
    case = CASE._replace(H=3, rate=0.0)
    placed = jax.device_put(case.inputs(), cube)
    with pytest.raises(UserError, match="n_head = 3 .* mesh.model = 2"):
        differentiate(follow_mesh(xla.rel_attention), placed)
    split = follow_mesh(xla.rel_attention, required=False)
    assert_agree(differentiate(split, placed), oracle(case))


def test_each_device_attends_to_its_shard(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mesh of the model's parameters and tokens is enough."""
    shapes = set()

    def spy(operands: Operands) -> jax.Array:
        shapes.add(operands.q_BLHA.shape)
        return xla.rel_attention(operands)

    monkeypatch.setitem(dispatch.KERNELS, "chunked", follow_mesh(spy))
    config = tiny.config(kernel="chunked", dropatt=0.3, remat_policy="full")
    B, L = 4, 6

    def loss(params: Any, tokens_BL: Any, memory: Memory) -> Any:
        rngs = {"dropout": jax.random.key(3)}
        result: Any = TransformerXL(config).apply(
            {"params": params}, tokens_BL, tokens_BL, memory, method="nll", rngs=rngs
        )
        return jnp.sum(result[0])

    arguments = tiny.make_params(), tiny.make_tokens(B, L), Memory.empty(config, B)
    specs = nn.get_partition_spec(abstract_params(config))
    letters_of = (specs, jax.P(*"BL"), letters(arguments[2]))
    for mesh, local in (
        (make_mesh(CUBE), (B // 4, L, tiny.H // 2, tiny.A)),
        (make_mesh(MeshConfig(), jax.devices()[:1]), (B, L, tiny.H, tiny.A)),
    ):
        placed = jax.device_put(arguments, shardings(mesh, letters_of))
        shapes.clear()
        jax.eval_shape(jax.grad(loss), *placed)
        assert shapes == {local}
