"""`auto` selects the kernel that was measured to be the fastest, or `xla`."""

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, NamedSharding

from tests.support.refusal import refused
from txl_jax.kernels import dispatch
from txl_jax.kernels.dispatch import choose_kernel, find_candidates, known_fastest
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
        operands = Operands(q_BLHA, keys, keys, PositionTerms(), keys)
        names.append(known_fastest(operands))

    jax.eval_shape(choose, jax.ShapeDtypeStruct(shape, dtype, sharding=places))
    return names[0]


def on(kind: str, platform: str, sizes: tuple[int, ...] = (1, 1, 1)) -> NamedSharding:
    """Returns a sharding over devices that are not attached."""
    axes, device = (AxisType.Auto,) * 3, AbstractDevice(kind, None, platform)
    mesh = AbstractMesh(sizes, AXES, axis_types=axes, abstract_device=device)
    return NamedSharding(mesh, jax.P())


def test_auto_takes_what_was_measured_or_xla(monkeypatch: pytest.MonkeyPatch) -> None:
    assert chosen((4, 3, 2, 5), on("TPU v5p", "tpu")) == "xla"
    device = SimpleNamespace(platform="gpu", device_kind="NVIDIA H200")
    device.compute_capability = "9.0"
    monkeypatch.setattr(dispatch, "target_device", lambda mesh: device)
    places = sharding(make_mesh(MeshConfig(data=4, model=2)), "BLHA")
    assert chosen((4, 3, 2, 5), places, dtype="bfloat16") == "cudnn"
    assert chosen((2, 3, 2, 5), places, dtype="bfloat16") == "xla"  # uneven streams
    assert chosen((4, 3, 3, 5), places, dtype="bfloat16") == "xla"  # uneven heads
    assert chosen((4, 3, 2, 129), places, dtype="bfloat16") == "xla"
    assert chosen((4, 3, 2, 5), places, dtype="float32") == "xla"
    device.device_kind = "NVIDIA A100"
    assert chosen((4, 3, 2, 5), places, dtype="bfloat16") == "xla"


def test_candidates_are_kernels_that_apply() -> None:
    def candidates(kind: str, platform: str, dropout: bool = False) -> list[str]:
        gpu = {"compute_capability": "9.0"} if platform == "gpu" else {}
        device: Any = SimpleNamespace(platform=platform, device_kind=kind, **gpu)
        return find_candidates(device, 64, jnp.dtype("bfloat16"), dropout)

    assert candidates("cpu", "cpu") == ["xla"]
    assert candidates("H100", "gpu") == ["xla", "chunked", "cudnn"]
    assert candidates("H100", "gpu", dropout=True) == ["xla", "chunked"]
    assert candidates("TPU v5p", "tpu") == ["xla", "chunked", "tpu"]
    assert candidates("TPU v3", "tpu") == ["xla", "chunked"]


def test_tpu_refuses_keys_that_vmem_cannot_hold() -> None:
    B, L, H, A, K = 1, 512, 2, 64, 40000
    places = on("TPU v5p", "tpu")

    def array(*shape: int) -> Any:
        return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=places)

    position = PositionTerms(array(K, H, A), array(H, A), array(H, A), array(H, K))
    keys, oldest_BL = array(B, K, H, A), jnp.zeros((B, L), jnp.int32)
    operands: Any = Operands(array(B, L, H, A), keys, keys, position, oldest_BL)
    with (
        jax.sharding.use_abstract_mesh(places.mesh.abstract_mesh),
        refused('"tpu" keeps the gradients of all 40000 keys .* "chunked"'),
    ):
        jax.eval_shape(choose_kernel("tpu", operands), operands)
