"""The kernels by name, those that apply, and what `tpu` refuses."""

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, NamedSharding

from tests.support.refusal import refused
from txl_jax.kernels.dispatch import KERNELS, choose_kernel, find_candidates
from txl_jax.kernels.operands import Operands, PositionTerms
from txl_jax.sharding.mesh import AXES


def on(kind: str, platform: str, sizes: tuple[int, ...] = (1, 1, 1)) -> NamedSharding:
    """Returns a sharding over devices that are not attached."""
    axes, device = (AxisType.Auto,) * 3, AbstractDevice(kind, None, platform)
    mesh = AbstractMesh(sizes, AXES, axis_types=axes, abstract_device=device)
    return NamedSharding(mesh, jax.P())


def test_auto_without_a_measurement_is_xla() -> None:
    assert choose_kernel("auto") is KERNELS["xla"]
    assert choose_kernel("chunked") is KERNELS["chunked"]


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
        jax.eval_shape(choose_kernel("tpu"), operands)
