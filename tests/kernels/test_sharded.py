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

from tests.kernels.cases import assert_agree, differentiate, make_inputs
from tests.support import tiny
from txl_jax.errors import UserError
from txl_jax.kernels import chunked, sharded, xla
from txl_jax.kernels.hash import Dropout
from txl_jax.kernels.signature import Kernel
from txl_jax.kernels.tiles import Blocks
from txl_jax.model.memory import Memory
from txl_jax.model.txl import TransformerXL
from txl_jax.runtime.options import MeshConfig
from txl_jax.sharding import make_mesh, sharding, shardings
from txl_jax.update.init import abstract_params

B, L, M, H = 8, 6, 5, 4
CUBE = MeshConfig(data=2, fsdp=2, model=2)
DROPOUT = Dropout(0.3, jnp.uint32(7), 5, 3)
CHUNKED = functools.partial(chunked.rel_attention, blocks=Blocks(4, 8))


def place(mesh: Mesh, inputs: dict[str, Any]) -> dict[str, Any]:
    """Returns inputs where their dimensions, the ends of their names, say."""
    return {
        name: jax.device_put(x, sharding(mesh, name.rpartition("_")[2]))
        for name, x in inputs.items()
        if x is not None
    } | {name: None for name, x in inputs.items() if x is None}


@pytest.mark.parametrize(
    ("config", "absent"),
    [
        (CUBE, []),
        (CUBE, ["bias_HR"]),
        (CUBE, ["r_RHA", "u_HA", "w_HA"]),
        (MeshConfig(), ["bias_HR"]),
        (MeshConfig(data=1, fsdp=2, model=4), []),
    ],
    ids=str,
)
def test_value_and_gradients_are_those_of_one_device(
    config: MeshConfig, absent: list[str]
) -> None:
    mesh = make_mesh(config)
    inputs = make_inputs(L, M, "filling", B=B, H=H) | dict.fromkeys(absent)
    split = sharded.follow_mesh(CHUNKED)
    actual = differentiate(split, place(mesh, inputs), DROPOUT)
    assert actual[0].sharding.is_equivalent_to(sharding(mesh, "BLHA"), 4)
    assert_agree(actual, differentiate(xla.rel_attention, inputs, DROPOUT))


def test_a_mesh_may_be_given() -> None:
    inputs = make_inputs(L, M, B=B, H=H)
    split = sharded.shard(CHUNKED, make_mesh(CUBE))
    expected = differentiate(xla.rel_attention, inputs)
    assert_agree(differentiate(split, inputs), expected)


@pytest.mark.parametrize("sizes", [{"B": 3}, {"H": 3}], ids=str)
def test_the_einsum_is_left_to_the_compiler_where_it_does_not_divide(
    sizes: dict[str, int],
) -> None:
    mesh = make_mesh(CUBE)
    inputs = make_inputs(L, M, B=sizes.get("B", B), H=sizes.get("H", H))
    placed = jax.device_put(inputs, sharding(mesh, ""))
    split = sharded.follow_mesh(xla.rel_attention, required=False)
    with pytest.raises(UserError, match="not divisible by mesh"):
        differentiate(sharded.follow_mesh(xla.rel_attention), placed)
    assert_agree(differentiate(split, placed), differentiate(xla.rel_attention, inputs))


def test_every_device_attends_for_its_own_part() -> None:
    shapes = []

    def spy(q_BLHA: jax.Array, *args: Any, **more: Any) -> jax.Array:
        shapes.append(q_BLHA.shape)
        return xla.rel_attention(q_BLHA, *args, **more)

    def run(inputs: dict[str, Any]) -> None:
        split = sharded.follow_mesh(spy)
        tiny.jit(lambda *arrays: split(*arrays))(*inputs.values(), None)

    inputs = make_inputs(L, M, B=B, H=H)
    A = inputs["q_BLHA"].shape[3]
    run(place(make_mesh(CUBE), inputs))
    run(place(make_mesh(MeshConfig(), jax.devices()[:1]), inputs))
    run(inputs)
    assert shapes == [(B // 4, L, H // 2, A), (B, L, H, A), (B, L, H, A)]


def test_within_a_shard_map_nothing_is_left_to_split() -> None:
    split = sharded.follow_mesh(CHUNKED)
    twice = sharded.shard(split, make_mesh(CUBE))
    inputs = make_inputs(L, M, B=B, H=H)
    expected = differentiate(xla.rel_attention, inputs, DROPOUT)
    assert_agree(differentiate(twice, inputs, DROPOUT), expected)


@pytest.mark.parametrize(
    ("B", "H", "message"),
    [
        (6, 4, "6 streams .* = 4: make batch_size"),
        (8, 3, "n_head = 3 .* mesh.model = 2"),
    ],
)
def test_what_does_not_divide_is_refused(B: int, H: int, message: str) -> None:
    split = sharded.shard(CHUNKED, make_mesh(CUBE))
    with pytest.raises(UserError, match=message):
        split(*(*make_inputs(L, M, B=B, H=H).values(), None))


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


def test_the_model_on_a_mesh(monkeypatch: pytest.MonkeyPatch) -> None:
    """No one tells it of the mesh: its parameters and tokens are there."""
    meshes = []
    shard: Any = sharded.shard

    def spy(kernel: Kernel, mesh: Any) -> Kernel:
        meshes.append(dict(mesh.shape))
        return shard(kernel, mesh)

    monkeypatch.setattr(sharded, "shard", spy)
    config, tokens_BT = tiny.config(), tiny.make_tokens(4, 7)
    params, memory = tiny.make_params(), Memory.empty(config, 4)
    memory = memory.append(np.ones((tiny.N, 4, 3, tiny.D), np.float32))  # type: ignore
    expected = gradient("xla", params, tokens_BT, memory)
    assert not meshes
    mesh = make_mesh(CUBE)
    specs = nn.get_partition_spec(abstract_params(config))
    placed = jax.device_put(
        (params, tokens_BT, memory),
        (shardings(mesh, specs), sharding(mesh, "BL"), shardings(mesh, Memory.LETTERS)),
    )
    tiny.assert_close(gradient("chunked", *placed), expected)
    assert meshes and all(mesh == {"data": 2, "fsdp": 2, "model": 2} for mesh in meshes)
