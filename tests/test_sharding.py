"""Every array lives where RULES says, on meshes that fit the devices."""

from types import SimpleNamespace
from typing import Any

import flax.linen as nn
import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from tests.support import tiny
from txl_jax.errors import UserError
from txl_jax.sharding.mesh import AXES, arrange, make_mesh
from txl_jax.sharding.options import MeshConfig
from txl_jax.sharding.rules import sharding
from txl_jax.update.optim import make_optimizer
from txl_jax.update.options import OptimConfig
from txl_jax.update.state import abstract_params, init_state

B = 16
CUBE = MeshConfig(data=2, fsdp=2, model=2)
ADAM = make_optimizer(OptimConfig())


@pytest.mark.parametrize(
    ("letters", "spec"),
    [
        ("VE", P("model", "fsdp")),
        # D has precedence over E for fsdp.
        ("ED", P(None, "fsdp")),
        ("NHAD", P(None, "model", None, "fsdp")),
        ("NDF", P(None, "fsdp", "model")),
        ("SBL", P(None, ("data", "fsdp"), None)),
        # Streams come first: no axis splits two dimensions.
        ("NBMD", P(None, ("data", "fsdp"), None, None)),
        ("", P()),
    ],
)
def test_letters_are_split_by_the_rules(letters: str, spec: P) -> None:
    mesh = make_mesh(CUBE)
    split = sharding(mesh, letters)
    assert split.mesh == mesh
    assert split.spec == spec


@pytest.mark.parametrize(
    ("config", "shape"),
    [
        (MeshConfig(), (8, 1, 1)),
        (MeshConfig(fsdp=4), (2, 4, 1)),
        (MeshConfig(data=2, fsdp=2, model=-1), (2, 2, 2)),
    ],
)
def test_minus_one_takes_the_remaining_devices(
    config: MeshConfig, shape: tuple[int, ...]
) -> None:
    mesh = make_mesh(config)
    assert mesh.axis_names == AXES
    assert mesh.devices.shape == shape
    assert set(mesh.devices.flat) == set(jax.devices())


def slices(count: int, devices: int) -> list[Any]:
    """Returns stand-ins for the devices of slices, in alternating order."""
    kind = {"platform": "tpu", "device_kind": "virtual", "core_on_chip": 0}
    return [
        SimpleNamespace(id=i, slice_index=i % count, coords=(i // count, 0, 0), **kind)
        for i in range(count * devices)
    ]


@pytest.mark.parametrize("sizes", [(8, 1, 1), (2, 4, 1), (2, 2, 2)], ids=str)
def test_slices_split_the_data_axis_only(sizes: tuple[int, ...]) -> None:
    placed = arrange(sizes, slices(2, 4))
    assert placed.shape == sizes
    halves = [{d.slice_index for d in half.flat} for half in np.split(placed, 2)]
    assert halves == [{0}, {1}]


def test_an_axis_inside_a_slice_cannot_cross_slices() -> None:
    with pytest.raises(UserError, match="mesh.data = 1 is not a multiple of the 2 sli"):
        arrange((1, 2, 4), slices(2, 4))


def test_no_device_holds_a_whole_sharded_parameter() -> None:
    """Moments and mean are sharded too: fsdp shards every array with a dimension D."""
    mesh = make_mesh(MeshConfig(data=1, fsdp=8))
    init, like = init_state(tiny.CONFIG, ADAM, B, 0, mesh, averages=True)
    places = jax.tree.map(lambda x: x.sharding, like)
    state = jax.jit(init, out_shardings=places)()
    letters = jax.tree.leaves(
        nn.get_partition_spec(abstract_params(tiny.CONFIG)),
        is_leaf=lambda x: isinstance(x, P),
    )
    split = ["D" in spec or "E" in spec for spec in letters]
    adam: Any = state.opt_state[1]
    assert state.average.count == 0
    tiny.assert_equal(state.average.params, state.params)
    for tree in (state.params, adam.mu, adam.nu, state.average.params):
        for leaf, is_split in zip(jax.tree.leaves(tree), split, strict=True):
            sizes = {shard.data.size for shard in leaf.addressable_shards}
            assert sizes == {leaf.size // (8 if is_split else 1)}
    # u, w, and the biases of the vocabulary and of the inner layer have no D.
    assert split.count(False) == 4
    for shard in state.memory.h_NBMD.addressable_shards:
        assert shard.data.shape[1] == B // 8
