"""`auto` selects the fastest kernel of the device."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, NamedSharding

from txl_jax.kernels.dispatch import FASTEST, fastest
from txl_jax.runtime.options import MeshConfig
from txl_jax.sharding import AXES, make_mesh, sharding


def chosen(shape: tuple[int, ...], places: NamedSharding, K: int = 8) -> str:
    """Returns the kernel that `auto` selects for queries of that sharding."""
    names = []
    q_BLHA = jax.ShapeDtypeStruct(shape, jnp.float32, sharding=places)
    jax.eval_shape(lambda q_BLHA: names.append(fastest(q_BLHA, K)), q_BLHA)
    return names[0]


def test_the_compiler_splits_what_does_not_divide_over_the_mesh(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(FASTEST, "cpu", "chunked")
    places = sharding(make_mesh(MeshConfig(data=4, model=2)), "BLHA")
    assert chosen((4, 3, 2, 5), places) == "chunked"
    assert chosen((2, 3, 2, 5), places) == "xla"
    assert chosen((4, 3, 3, 5), places) == "xla"


def test_a_gpu_has_no_array_of_many_scores() -> None:
    for sizes, L, name in (
        ((1, 1, 1), 1024, "chunked"),
        ((1, 1, 1), 1023, "xla"),
        ((2, 1, 2), 1024, "xla"),  # a quarter of them on each device
    ):
        axes, device = (AxisType.Auto,) * 3, AbstractDevice("H100", None, "gpu")
        mesh = AbstractMesh(sizes, AXES, axis_types=axes, abstract_device=device)
        places = NamedSharding(mesh, jax.P())
        assert chosen((8, L, 16, 64), places, 2048) == name


@pytest.mark.parametrize(
    ("kind", "K", "name"),
    [
        ("TPU v5 lite", 8, "tpu"),
        ("TPU v4", 301, "tpu"),
        ("TPU v4", 300, "xla"),  # as fast there
        ("TPU v3", 8, "xla"),
        ("H100", 8, "xla"),
        ("cpu", 8, "xla"),
    ],
)
def test_the_mesh_gives_the_device(kind: str, K: int, name: str) -> None:
    axes, device = (AxisType.Auto,) * 3, AbstractDevice(kind, 1, "any")
    mesh = AbstractMesh((1, 1, 1), AXES, axis_types=axes, abstract_device=device)
    places = NamedSharding(mesh, jax.P())
    assert chosen((2, 3, 4, 5), places, K) == name
