"""Times the attention kernels of a layer on this device, to choose the fastest."""

import contextlib
import math
import time
from typing import NamedTuple

import jax
import jax.numpy as jnp

from txl_jax.kernels import check
from txl_jax.kernels.dispatch import KERNELS
from txl_jax.kernels.operands import Kernel, Operands
from txl_jax.kernels.sharded import device_memory

SECONDS, REPEATS = 0.05, 3  # a kernel is timed for SECONDS, in REPEATS repetitions
# The largest error of an array relative to its largest element. Products have factors
# in bfloat16 or TF32; a wrong tile or mask causes errors of several percent.
TOLERANCE = 3e-2
# The share of the memory for what attention keeps for the backward pass. For enwik8 on
# one H200, `find_shortage` counts 12 GiB with `xla`; the whole step took 11 GiB.
SHARE = 0.75

Trial = float | str  # the milliseconds of a kernel for 1,000 queries, or its fault
Trials = dict[str, Trial]  # by kernel, the fastest first
Options = dict[str, str | bool] | None  # of the compiler


class Workload(NamedTuple):
    """The attention of one layer on one device.

    sizes: B, H, L, M, A and R; the L queries are segments of segment_len.
    absent: the position terms that the scores lack. dropout: the rate.
    layers: how many keep arrays for their backward pass at the same time; without a
    backward pass 0.
    """

    sizes: tuple[int, ...]
    dtype: str
    absent: tuple[str, ...]
    segment_len: int
    dropout: float = 0.0
    layers: int = 0


def measure(works: dict[str, Workload], options: Options = None) -> Trials:
    """Returns the trial of each kernel on its workload.

    options: those of the compiler for the timed programs.
    A kernel whose numbers differ from those of `xla`, or that this device cannot
    compile, run or hold in memory, has a fault.
    """
    with jax.default_device(jax.local_devices()[0]):
        trials = [
            (x, try_kernel(KERNELS[x], work, options)) for x, work in works.items()
        ]
    check.run_kernel.clear_cache()  # type: ignore[attr-defined]
    return dict(sorted(trials, key=lambda x: (isinstance(x[1], str), x[1])))


def choose(trials: Trials) -> str:
    """Returns the fastest kernel, or `xla` if all have faults.

    Its error then ends the run.
    """
    name = [*trials][0]
    return "xla" if isinstance(trials[name], str) else name


def describe(trials: Trials) -> str:
    """Returns the trials and the choice in a line."""
    texts = [
        f"{name} excluded ({x})" if isinstance(x, str) else f"{name} {x:.3g} ms"
        for name, x in trials.items()
    ]
    rows = f"{', '.join(texts)} (a layer, 1,000 queries)"
    return f"{rows}: takes {choose(trials)}"


def try_kernel(kernel: Kernel, work: Workload, options: Options = None) -> Trial:
    """Compares a kernel with `xla`, and times it."""
    H, L, M, A, R = work.sizes[1:]
    tiles = work._replace(sizes=(2, H, 136, 200, A, min(R, 336)))  # none is full
    streams = work._replace(sizes=(2, H, L, M, A, R))
    try:
        fault = find_shortage(kernel, work) or find_error(kernel, tiles)
        with contextlib.suppress(Exception):  # too large for `xla`, or for this kernel
            fault = fault or find_error(kernel, streams)
        return fault or time_kernel(kernel, work, options)
    except Exception as error:  # the compilers of devices raise many types
        return f"{type(error).__name__}: {error}".splitlines()[0][:200]


def make_operands(work: Workload) -> Operands:
    """Returns operands of a workload, partly masked."""
    return check.make_operands(work.sizes, work.dtype, work.absent, work.dropout)


def find_shortage(kernel: Kernel, work: Workload) -> str:
    """Describes the memory that layers keep for their gradients, if it is too much."""
    operands = jax.eval_shape(lambda: make_operands(work))
    kept = jax.eval_shape(lambda x: jax.vjp(kernel, x)[1], operands)
    need = work.layers * sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(kept))
    memory = device_memory()
    if not 0 < SHARE * memory < need:
        return ""
    return f"{work.layers} layers keep {need >> 30} of {memory >> 30} GiB"


def find_error(kernel: Kernel, work: Workload) -> str:
    """Describes the first array that differs from that of `xla`, if one does."""
    if kernel is KERNELS["xla"]:
        return ""
    # JAX_DEFAULT_MATMUL_PRECISION
    precision = jax.config.jax_default_matmul_precision  # type: ignore[attr-defined]
    operands = make_operands(work)
    actual, expected = (
        check.differentiate(each, operands, precision, work.layers > 0)
        for each in (kernel, KERNELS["xla"])
    )
    for name, error in check.errors(actual, expected).items():
        if not error <= TOLERANCE:
            return f"{name} is off by {error:.0%} of its largest element"
    return ""


def time_kernel(kernel: Kernel, work: Workload, options: Options = None) -> float:
    """Returns the milliseconds for 1,000 queries with a full memory."""
    operands, backward = make_operands(work), work.layers > 0
    B, L = operands.oldest_BL.shape
    oldest_L = jnp.arange(L, dtype=jnp.int32) // work.segment_len * work.segment_len
    operands = operands._replace(oldest_BL=jnp.broadcast_to(oldest_L, (B, L)))
    run = check.run_kernel.lower(kernel, operands, backward).compile(options)

    def repeat(count: int) -> float:
        started = time.perf_counter()
        for _ in range(count):
            outputs = run(operands)
        jax.block_until_ready(outputs)
        return (time.perf_counter() - started) / count

    repeat(1)  # the first call loads the program
    count = math.ceil(SECONDS / REPEATS / repeat(1))
    return 1e6 * min(repeat(count) for _ in range(REPEATS)) / (B * L)
