"""`auto` selects the fastest kernel of the device."""

import functools
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, NamedSharding

from tests.support.refusal import refused
from txl_jax.kernels import dispatch
from txl_jax.kernels.dispatch import FASTEST, KERNELS, choose_kernel, fastest
from txl_jax.kernels.operands import Operands, PositionTerms
from txl_jax.sharding.mesh import AXES, make_mesh
from txl_jax.sharding.options import MeshConfig
from txl_jax.sharding.rules import sharding


def chosen(
    shape: tuple[int, ...], places: NamedSharding, K: int = 8, dtype: Any = "float32"
) -> str:
    """Returns the kernel that `auto` selects for queries of that sharding."""
    B, L, H, A = shape
    keys: Any = jax.ShapeDtypeStruct((B, K, H, A), dtype)
    names = []

    def choose(q_BLHA: jax.Array) -> None:
        mesh = jax.typeof(q_BLHA).sharding.mesh
        operands = Operands(q_BLHA, keys, keys, PositionTerms(), keys)
        names.append(fastest(operands, mesh))

    jax.eval_shape(choose, jax.ShapeDtypeStruct(shape, dtype, sharding=places))
    return names[0]


def on(kind: str, platform: str, sizes: tuple[int, ...] = (1, 1, 1)) -> NamedSharding:
    """Returns a sharding over devices that are not attached."""
    axes, device = (AxisType.Auto,) * 3, AbstractDevice(kind, None, platform)
    mesh = AbstractMesh(sizes, AXES, axis_types=axes, abstract_device=device)
    return NamedSharding(mesh, jax.P())


def test_auto_takes_xla_on_an_uneven_mesh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(FASTEST, "cpu", "chunked")
    places = sharding(make_mesh(MeshConfig(data=4, model=2)), "BLHA")
    assert chosen((4, 3, 2, 5), places) == "chunked"
    assert chosen((2, 3, 2, 5), places) == "xla"
    assert chosen((4, 3, 3, 5), places) == "xla"


@pytest.mark.parametrize(
    ("kind", "sizes", "L", "K", "name"),
    [
        ("TPU v5 lite", (1, 1, 1), 3, 8, "tpu"),
        ("TPU v4", (1, 1, 1), 3, 8, "xla"),  # too little VMEM
        ("TPU v4", (1, 1, 1), 1024, 2048, "chunked"),
        ("TPU v5p", (1, 1, 1), 512, 43136, "tpu"),
        ("TPU v5p", (1, 1, 1), 512, 43137, "chunked"),  # too many keys for its VMEM
        ("TPU v5e", (1, 1, 1), 512, 43137, "tpu"),
        ("H100", (1, 1, 1), 1023, 2048, "xla"),
        ("H100", (1, 1, 1), 1024, 2048, "chunked"),  # too many scores for one array
        ("H100", (2, 1, 2), 1024, 2048, "xla"),  # a quarter on each device
    ],
)
def test_auto_follows_device_and_size(
    kind: str, sizes: tuple[int, ...], L: int, K: int, name: str
) -> None:
    places = on(kind, "gpu" if kind == "H100" else "any", sizes)
    assert chosen((8, L, 16, 64), places, K) == name


def test_auto_takes_cudnn_where_it_applies(monkeypatch: pytest.MonkeyPatch) -> None:
    device = SimpleNamespace(
        platform="gpu", device_kind="H100", compute_capability="9.0"
    )
    monkeypatch.setattr(dispatch, "target_device", lambda mesh: device)
    places = sharding(make_mesh(MeshConfig(data=4, model=2)), "BLHA")
    assert chosen((4, 3, 2, 5), places, dtype="bfloat16") == "cudnn"
    assert chosen((2, 3, 2, 5), places, dtype="bfloat16") == "xla"
    assert chosen((4, 3, 2, 129), places, dtype="bfloat16") == "xla"
    assert chosen((4, 3, 2, 5), places, dtype="float32") == "xla"
    device.compute_capability = "7.0"
    assert chosen((4, 3, 2, 5), places, dtype="bfloat16") == "xla"
    assert chosen((8, 8192, 16, 64), places, 8192, "bfloat16") == "chunked"


@pytest.mark.parametrize(
    ("dtype", "bias", "name"),
    [
        (jnp.float32, False, "tpu"),
        (jnp.float32, True, "chunked"),  # the bias has rows beside the rows of r
        (jnp.bfloat16, True, "tpu"),
    ],
)
def test_auto_takes_chunked_for_keys_that_vmem_cannot_hold(
    dtype: Any, bias: bool, name: str
) -> None:
    """The kernel `tpu` itself refuses them."""
    B, L, H, A, K = 1, 512, 2, 64, 40000
    places = on("TPU v5p", "tpu")

    def array(*shape: int) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=places)

    bias_HR = array(H, K) if bias else None
    position = PositionTerms(array(K, H, A), array(H, A), array(H, A), bias_HR)
    keys, oldest_BL = array(B, K, H, A), jnp.zeros((B, L), jnp.int32)
    operands: Any = Operands(array(B, L, H, A), keys, keys, position, oldest_BL)

    def attend(kernel: str, operands: Operands) -> jax.Array:
        assert choose_kernel("auto", operands) is KERNELS[name]
        return choose_kernel(kernel, operands)(operands)

    with jax.sharding.use_abstract_mesh(places.mesh.abstract_mesh):
        if name == "chunked":
            with refused('"tpu" keeps the gradients of all 40000 keys .* "chunked"'):
                jax.eval_shape(functools.partial(attend, "tpu"), operands)
        result = jax.eval_shape(functools.partial(attend, "auto"), operands)
    assert result.shape == (B, L, H, A)
