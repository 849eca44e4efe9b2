"""Times the attention kernels of a layer on this device, to choose the fastest."""

import functools
import math
import time
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from txl_jax.kernels import check, cudnn
from txl_jax.kernels.dispatch import KERNELS
from txl_jax.kernels.operands import Kernel, Operands
from txl_jax.kernels.sharded import device_memory
from txl_jax.kernels.tpu.blocks import VMEM

SECONDS = 0.05  # for which each kernel runs
SHARE = 0.5  # of the memory, for what attention keeps for the backward pass


class Workload(NamedTuple):
    """The attention of one layer on one device.

    sizes: B, H, L, M, A and R; the L queries are segments of segment_len.
    absent: the position terms that the scores lack. keys_per_query: see
    `model.interval.count_keys`. dropout: the rate. backward: whether gradients are
    computed. layers: how many layers keep arrays for their backward pass together.
    """

    sizes: tuple[int, ...]
    dtype: str
    absent: tuple[str, ...]
    segment_len: int
    keys_per_query: int = 0
    dropout: float = 0.0
    backward: bool = False
    layers: int = 1


class Trial(NamedTuple):
    """The milliseconds that a kernel takes for 1,000 queries, or its fault."""

    milliseconds: float = math.inf
    fault: str = ""


def find_candidates(device: jax.Device, workload: Workload) -> list[str]:
    """Returns the kernels to try on a device; on a CPU, `xla` is the fastest."""
    if device.platform == "cpu":
        return ["xla"]
    *_, A, _ = workload.sizes
    dtype, has_dropout = jnp.dtype(workload.dtype), workload.dropout > 0
    has_cudnn = not cudnn.obstacle(device, A, dtype, has_dropout)
    names = {"cudnn": has_cudnn, "tpu": device.device_kind in VMEM}
    return [name for name in KERNELS if names.get(name, True)]


def measure(workloads: dict[str, Workload]) -> dict[str, Trial]:
    """Returns the trial of each kernel on its workload.

    A kernel whose numbers differ from those of `xla`, or that this device cannot
    compile, run or hold in memory, has a fault.
    """
    try:
        with jax.default_device(jax.local_devices()[0]):
            return {name: try_kernel(name, w) for name, w in workloads.items()}
    finally:  # the device's memory is the run's
        make_operands.cache_clear()
        compiled.cache_clear()


def choose(trials: dict[str, Trial]) -> str:
    """Returns the fastest kernel, or `xla` if all have faults: its error is raised."""
    name = min(trials, key=lambda name: trials[name].milliseconds)
    return "xla" if trials[name].fault else name


def describe(trials: dict[str, Trial]) -> str:
    """Returns the trials in a line, the fastest first."""
    order = sorted(trials, key=lambda name: trials[name].milliseconds)
    rows = [(name, *trials[name]) for name in order]
    texts = [f"{name} {fault or f'{ms:.2g} ms'}" for name, ms, fault in rows]
    return f"{', '.join(texts)} (a layer, 1,000 queries)"


def try_kernel(name: str, workload: Workload) -> Trial:
    """Compares a kernel with `xla`, and times it."""
    try:
        if fault := find_fault(name, workload):
            return Trial(fault=fault)
        run, operands = compiled(KERNELS[name], workload), make_operands(workload)
        operands = operands._replace(oldest_BL=see_all(workload))
        once = time_calls(run, operands, 1)
        seconds = time_calls(run, operands, math.ceil(SECONDS / once))
        B, _, L, *_ = workload.sizes
        return Trial(1e6 * seconds / (B * L))
    except Exception as error:  # the compilers of devices raise many types
        return Trial(fault=f"{type(error).__name__}: {error}".splitlines()[0][:200])


def find_fault(name: str, workload: Workload) -> str:
    """Returns why a kernel cannot be used for a workload, or ""."""
    kernel, operands = KERNELS[name], make_operands(workload)
    if workload.backward and (memory := device_memory()):
        kept = jax.eval_shape(lambda x: jax.vjp(kernel, x)[1], operands)
        need = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(kept))
        if (need := need * workload.layers) > SHARE * memory:
            return f"{workload.layers} layers need {need >> 30} of {memory >> 30} GiB"
    actual = to_host(compiled(kernel, workload)(operands))
    if name == "xla":
        return ""
    try:
        expected = to_host(compiled(KERNELS["xla"], workload)(operands))
    except Exception:  # too large for `xla`
        return check.fault(kernel, [workload.dtype], [workload.dropout])
    # In products of float32, devices round the factors to TF32 or bfloat16.
    for array, error in check.errors(actual, expected).items():
        if not error <= check.TOLERANCES["bfloat16"]:
            return f"{array} is off by {error:.0%} of its largest element"
    return ""


@functools.lru_cache(maxsize=2)
def make_operands(workload: Workload) -> Operands:
    """Returns operands of a workload, partly masked."""
    return check.make_operands(
        workload.sizes, workload.dtype, workload.absent, workload.dropout
    )


def see_all(workload: Workload) -> Array:
    """Returns oldest_BL of a full memory without documents."""
    B, _, L, M, *_ = workload.sizes
    query_L = jnp.arange(L, dtype=jnp.int32)
    oldest_L = query_L // workload.segment_len * workload.segment_len
    if workload.keys_per_query:
        oldest_L = jnp.maximum(0, query_L + M + 1 - workload.keys_per_query)
    return jnp.broadcast_to(oldest_L, (B, L))


@functools.lru_cache(maxsize=8)
def compiled(kernel: Kernel, workload: Workload) -> jax.stages.Compiled:
    """Returns the compiled output of a kernel and, with `backward`, gradients."""
    run = functools.partial(check.run_kernel, kernel, backward=workload.backward)
    return jax.jit(run).lower(make_operands(workload)).compile()


def to_host(outputs: dict[str, Array]) -> check.Arrays:
    """Returns outputs as float64 arrays."""
    return {name: np.asarray(x, np.float64) for name, x in outputs.items()}


def time_calls(run: jax.stages.Compiled, operands: Operands, count: int) -> float:
    """Returns the seconds of one of `count` calls that follow one another."""
    started = time.perf_counter()
    for _ in range(count):
        outputs = run(operands)
    jax.block_until_ready(outputs)
    return (time.perf_counter() - started) / count
