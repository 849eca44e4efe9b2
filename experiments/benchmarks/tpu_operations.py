"""Lone operations, by which `tpu_step` calibrates the TPU compiler's estimates."""

from typing import Any

import jax
import jax.numpy as jnp

from experiments.benchmarks import tpu_estimate
from txl_jax.aot import chips, lower

# FLOPs of a chip per cycle: v5e has 4 matrix units of 128 x 128, v5p twice as many.
PEAK = {"v5e": 2 * 4 * 128**2, "v5p": 2 * 8 * 128**2}
SIZE = 8192
HEADS = (16, 1536, 8, 128)  # B, K, H, A


def array(dtype: str, *shape: int) -> jax.ShapeDtypeStruct:
    """Returns the abstract array that an operation reads."""
    return jax.ShapeDtypeStruct(shape or (SIZE, SIZE), dtype)


# Functions and arguments; all but the product are bound by HBM.
OPERATIONS: dict[str, tuple[Any, ...]] = {
    "product, bfloat16": (jnp.matmul, array("bfloat16"), array("bfloat16")),
    "sum, float32": (jnp.add, array("float32"), array("float32")),
    "sum, bfloat16": (jnp.add, array("bfloat16"), array("bfloat16")),
    "cast, float32 to bfloat16": (lambda x: x.astype("bfloat16"), array("float32")),
    "features before tokens, bfloat16": (
        lambda x_BKHA: jnp.moveaxis(x_BKHA, 1, 3),
        array("bfloat16", *HEADS),
    ),
    "zeros, float32": (lambda: jnp.zeros((8 * SIZE, SIZE)),),
}


def compiled(name: str, chip: str) -> tuple[str, float]:
    """Returns the program of an operation, and its cycles at the chip's peak rates."""
    part = chips.find(tpu_estimate.CHIPS[chip][0])
    mesh = jax.sharding.Mesh(chips.find_devices(part)[:1], ("x",))
    place = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    function, *args = OPERATIONS[name]
    moved = [*args, jax.eval_shape(function, *args)]
    jitted = jax.jit(function, in_shardings=place, out_shardings=place)
    with lower.uncached():
        program = jitted.lower(*args).compile()
    seconds = sum(x.size * x.dtype.itemsize for x in moved) / part.chip.hbm_bandwidth
    if function is jnp.matmul:
        seconds = max(seconds, 2 * SIZE**3 / part.chip.flops)
    return lower.text_of(program), seconds * part.chip.flops / PEAK[chip]
