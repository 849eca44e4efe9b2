"""Times the attention kernels of a layer on this device, to choose the fastest."""

import contextlib
import math
import time
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from txl_jax.kernels import check
from txl_jax.kernels.dispatch import KERNELS
from txl_jax.kernels.operands import Kernel, Operands
from txl_jax.kernels.sharded import device_memory

SECONDS = 0.05  # for which each kernel runs
# The largest error of an array relative to its largest element. In full float32, EXACT
# finds an error in a single distance. Otherwise products have factors in bfloat16 or
# TF32; a wrong tile or mask causes errors of several percent.
EXACT, TOLERANCE = 1e-3, 3e-2
SHARE = 0.5  # of the memory, for what attention keeps for the backward pass

Trial = float | str  # the milliseconds of a kernel for 1,000 queries, or its fault


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


def measure(workloads: dict[str, Workload]) -> dict[str, Trial]:
    """Returns the trial of each kernel on its workload, the fastest first.

    A kernel whose numbers differ from those of `xla`, or that this device cannot
    compile, run or hold in memory, has a fault.
    """
    with jax.default_device(jax.local_devices()[0]):
        trials = [(name, try_kernel(KERNELS[name], w)) for name, w in workloads.items()]
    check.run_kernel.clear_cache()  # type: ignore[attr-defined]
    return dict(sorted(trials, key=lambda x: (isinstance(x[1], str), x[1])))


def choose(trials: dict[str, Trial]) -> str:
    """Returns the fastest kernel, or `xla` if all have faults: its error is raised."""
    name, trial = next(iter(trials.items()))
    return "xla" if isinstance(trial, str) else name


def describe(trials: dict[str, Trial]) -> str:
    """Returns the trials in a line."""
    texts = [
        f"{name} {trial}" if isinstance(trial, str) else f"{name} {trial:.2g} ms"
        for name, trial in trials.items()
    ]
    return f"{', '.join(texts)} (a layer, 1,000 queries)"


def try_kernel(kernel: Kernel, workload: Workload) -> Trial:
    """Compares a kernel with `xla`, and times it."""
    try:
        operands, backward = make_operands(workload), workload.backward
        if backward and (fault := find_shortage(kernel, operands, workload.layers)):
            return fault
        exact = kernel is not KERNELS["cudnn"]  # which has no float32
        small = shrink(workload, "float32" if exact else workload.dtype)
        if fault := find_error(kernel, make_operands(small), backward, exact):
            return fault
        with contextlib.suppress(Exception):  # too large for `xla`, or for this kernel
            if fault := find_error(kernel, operands, backward):
                return fault
        operands = operands._replace(oldest_BL=see_all(workload))
        return time_kernel(kernel, operands, backward)
    except Exception as error:  # the compilers of devices raise many types
        return f"{type(error).__name__}: {error}".splitlines()[0][:200]


def find_shortage(kernel: Kernel, operands: Operands, layers: int) -> str:
    """Describes the memory that layers keep for their gradients, if it is too much."""
    kept = jax.eval_shape(lambda x: jax.vjp(kernel, x)[1], operands)
    need = layers * sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(kept))
    memory = device_memory()
    if not 0 < SHARE * memory < need:
        return ""
    return f"{layers} layers need {need >> 30} of {memory >> 30} GiB"


def find_error(
    kernel: Kernel, operands: Operands, backward: bool, exact: bool = False
) -> str:
    """Describes the first array that differs from that of `xla`, if one does.

    exact: in full float32; otherwise in the run's precision.
    """
    if kernel is KERNELS["xla"]:
        return ""
    # JAX_DEFAULT_MATMUL_PRECISION
    of_run = jax.config.jax_default_matmul_precision  # type: ignore[attr-defined]
    precision, tolerance = ("highest", EXACT) if exact else (of_run, TOLERANCE)
    actual, expected = (
        check.differentiate(each, operands, precision, backward)
        for each in (kernel, KERNELS["xla"])
    )
    for name, error in check.errors(actual, expected).items():
        if not error <= tolerance:
            return f"{name} is off by {error:.1%} of its largest element"
    return ""


def make_operands(workload: Workload) -> Operands:
    """Returns operands of a workload, partly masked."""
    return check.make_operands(
        workload.sizes, workload.dtype, workload.absent, workload.dropout
    )


def shrink(workload: Workload, dtype: str) -> Workload:
    """Returns a workload of a few tiles, none of which is full."""
    _, H, _, _, A, R = workload.sizes
    return workload._replace(sizes=(2, H, 136, 200, A, min(R, 336)), dtype=dtype)


def see_all(workload: Workload) -> Array:
    """Returns oldest_BL of a full memory without documents."""
    B, _, L, M, *_ = workload.sizes
    query_L = jnp.arange(L, dtype=jnp.int32)
    oldest_L = query_L // workload.segment_len * workload.segment_len
    if workload.keys_per_query:
        oldest_L = jnp.maximum(0, query_L + M + 1 - workload.keys_per_query)
    return jnp.broadcast_to(oldest_L, (B, L))


def time_kernel(kernel: Kernel, operands: Operands, backward: bool) -> float:
    """Returns the milliseconds for 1,000 queries."""
    time_calls(kernel, operands, backward, 1)  # may compile
    once = time_calls(kernel, operands, backward, 1)
    seconds = time_calls(kernel, operands, backward, math.ceil(SECONDS / once))
    return 1e6 * seconds / operands.oldest_BL.size


def time_calls(kernel: Kernel, operands: Operands, backward: bool, count: int) -> float:
    """Returns the seconds of one of `count` calls that follow one another."""
    started = time.perf_counter()
    for _ in range(count):
        outputs = check.run_kernel(kernel, operands, backward)
    jax.block_until_ready(outputs)
    return (time.perf_counter() - started) / count
