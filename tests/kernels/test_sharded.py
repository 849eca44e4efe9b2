"""A kernel on a mesh gives the numbers, gradients and dropout of one device.

Dims: B streams, L segment, M memory, H heads, A head, R distances.
"""

import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from tests.kernels.cases import Case, assert_agree, differentiate, oracle
from tests.support import tiny
from txl_jax.errors import UserError
from txl_jax.kernels import chunked, xla
from txl_jax.kernels.sharded import follow_mesh
from txl_jax.kernels.tiles import Blocks
from txl_jax.model.memory import Memory
from txl_jax.model.txl import TransformerXL
from txl_jax.runtime.options import MeshConfig
from txl_jax.sharding import letters, make_mesh, sharding, shardings
from txl_jax.update.init import abstract_params

CUBE = MeshConfig(data=2, fsdp=2, model=2)
CASE = Case(6, 5, "filling", 0.3, B=8, H=4)
CHUNKED = functools.partial(chunked.rel_attention, blocks=Blocks(4, 8))


def place(mesh: Mesh, inputs: dict[str, Any]) -> dict[str, Any]:
    """Returns inputs where their dimensions, the ends of their names, say."""
    places = {name: sharding(mesh, name.rpartition("_")[2]) for name in inputs}
    return {
        name: None if x is None else jax.device_put(x, places[name])
        for name, x in inputs.items()
    }


@pytest.mark.parametrize(
    ("sizes", "absent"),
    [
        (CUBE, ()),
        (MeshConfig(), ("bias_HR",)),
        (MeshConfig(data=1, fsdp=2, model=4), ("r_RHA", "u_HA", "w_HA")),
    ],
    ids=str,
)
def test_value_and_gradients_are_those_of_one_device(
    sizes: MeshConfig, absent: tuple[str, ...]
) -> None:
    mesh, case = make_mesh(sizes), CASE._replace(absent=absent)
    # The inner function is inside a shard_map, where nothing is left to split.
    split = follow_mesh(follow_mesh(CHUNKED))
    actual = differentiate(split, place(mesh, case.inputs()), case.dropout)
    assert actual[0].sharding.is_equivalent_to(sharding(mesh, "BLHA"), 4)
    assert_agree(actual, oracle(case))


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ((6, 4), "6 streams .* = 4: make batch_size"),
        ((8, 3), "n_head = 3 .* mesh.model = 2"),
    ],
)
def test_the_compiler_splits_only_the_einsum_unevenly(
    sizes: tuple[int, int], message: str
) -> None:
    case = CASE._replace(B=sizes[0], H=sizes[1], rate=0.0)
    placed = jax.device_put(case.inputs(), sharding(make_mesh(CUBE), ""))
    with pytest.raises(UserError, match=message):
        differentiate(follow_mesh(xla.rel_attention), placed)
    split = follow_mesh(xla.rel_attention, required=False)
    assert_agree(differentiate(split, placed), oracle(case))


def test_every_device_attends_for_its_own_part() -> None:
    shapes = []

    def spy(q_BLHA: jax.Array, *args: Any) -> jax.Array:
        shapes.append(q_BLHA.shape)
        return xla.rel_attention(q_BLHA, *args)

    def run(inputs: dict[str, Any]) -> None:
        jax.eval_shape(
            lambda *arrays: follow_mesh(spy)(*arrays, None), *inputs.values()
        )

    inputs, (L, _, _, _, _, B, H, A) = CASE.inputs(), CASE
    run(place(make_mesh(CUBE), inputs))
    run(place(make_mesh(MeshConfig(), jax.devices()[:1]), inputs))
    run(inputs)
    assert shapes == [(B // 4, L, H // 2, A), (B, L, H, A), (B, L, H, A)]


def gradient(kernel: Any, params: Any, tokens_BT: Any, memory: Memory) -> Any:
    """Returns the nll of a segment and its gradient by the parameters."""
    config = tiny.config(kernel=kernel, dropatt=0.3, remat=True)

    def loss(params: Any, tokens_BT: Any, memory: Memory) -> Any:
        result: Any = TransformerXL(config).apply(
            {"params": params},
            tokens_BT[:, :-1],
            tokens_BT[:, 1:],
            memory,
            method="nll",
            rngs={"dropout": jax.random.key(3)},
        )
        return jnp.sum(result[0])

    return tiny.jit(jax.value_and_grad(loss))(params, tokens_BT, memory)


def test_the_model_on_a_mesh() -> None:
    """The mesh of its parameters and tokens is enough."""
    config, tokens_BT = tiny.config(), tiny.make_tokens(4, 7)
    params, memory = tiny.make_params(), Memory.empty(config, 4)
    memory = memory.append(np.ones((tiny.N, 4, 3, tiny.D), np.float32))  # type: ignore
    expected = gradient("xla", params, tokens_BT, memory)
    mesh = make_mesh(CUBE)
    specs = nn.get_partition_spec(abstract_params(config))
    places = shardings(mesh, (specs, jax.P(*"BL"), letters(memory)))
    placed = jax.device_put((params, tokens_BT, memory), places)
    tiny.assert_close(gradient("chunked", *placed), expected)
