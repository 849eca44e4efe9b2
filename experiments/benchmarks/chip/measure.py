"""One part: prepares it, which compiles, waits for its turn, and measures it.

A part's `prepare` returns the function that measures it.
"""

import collections
import dataclasses
import datetime
import functools
import itertools
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.benchmarks import record, subject
from experiments.benchmarks.record import Row
from txl_jax import config as configs
from txl_jax.config import Config, with_values
from txl_jax.data.streams import Position
from txl_jax.evaluate.options import evaluation_model
from txl_jax.evaluate.perplexity import make_evaluate
from txl_jax.generate import generation_model, stream
from txl_jax.kernels import check, dispatch, xla
from txl_jax.kernels.measure import describe
from txl_jax.kernels.measure import measure as time_kernels
from txl_jax.kernels.product import float32_product
from txl_jax.kernels.sharded import device_memory
from txl_jax.model.flops import needed_flops
from txl_jax.report.output import to_json
from txl_jax.report.timing import known_peak, measured_peak
from txl_jax.runtime.programs import record_loops
from txl_jax.sharding.rules import place_segments
from txl_jax.train import make_streams, step_segments
from txl_jax.update.step import make_updater
from txl_jax.workdir.kernel_choice import PARTS, compiler_options, make_workloads
from txl_jax.workdir.resolve import find_vocab

Measure = Callable[[], Row]
SECONDS, REPEATS = 0.8, 3  # the shortest repetition, and the number of repetitions
PRINTED = 25  # kernels in a profile
# Shapes B, H, L, M, A and R for the checks: training and evaluation of `enwik8`, the
# latter with clamped distances, and a shape that `cudnn` pads in every dimension.
SHAPES = (
    *((2, 8, 512, 512, 64, 1024), (2, 8, 80, 2100, 64, 821)),
    (2, 4, 77, 114, 41, 191),
)
TINY_SHAPES = ((2, 2, 6, 4, 8, 10), (2, 2, 6, 8, 8, 5))
# The largest error of an array relative to its largest element: in float32 with exact
# products, in float32 as the device computes it, and in bfloat16.
TOLERANCES = {"float32": 1e-4, "default": 2e-2, "bfloat16": 3e-2}


def run(part: Row) -> None:
    """Prepares a part, waits for the end of stdin, measures, and prints JSON lines."""
    try:
        began = time.perf_counter()
        measure = find_task(part)(part)
        print(to_json({"compile_seconds": time.perf_counter() - began}), flush=True)
        sys.stdin.read()
        print(to_json({"result": measure()}), flush=True)
    except Exception as error:
        line = f"{type(error).__name__}: {error}".partition("\n")[0]
        print(to_json({"error": line}), flush=True)


def find_task(part: Row) -> Callable[[Row], Measure]:
    """Returns the function that prepares a part."""
    if "original" in part:
        from experiments.benchmarks.chip import original

        return original.prepare
    return PREPARE[part["task"]]


def read_config(part: Row) -> Config:
    """Returns the config of a part."""
    config = find_vocab(configs.load(part["experiment"]))
    values = {"model.dtype": part["dtype"], "model.kernel": part["kernel"]}
    values |= {f"model.{name}": 0.0 for name in part.get("without", ())}
    B, L = part["B"], part.get("L", config.eval.tgt_len)
    M = part.get("M", L)
    if part["tiny"]:
        B, L, M = min(B, 2), 4, 8
        config = dataclasses.replace(config, model=subject.shrink(config.model))
    if "unroll" in part:
        every = config.model.n_layer
        values["model.unroll"] = every if part["unroll"] == "all" else part["unroll"]
    values |= {"train.batch_size": B, "train.tgt_len": L}
    values |= {"eval.streams": B, "eval.tgt_len": L}
    values |= {f"{section}.mem_len": M for section in ("model", "eval", "generate")}
    return with_values(config, values | {"generate.num_tokens": 10**6})


def seconds_of(call: Callable[[], Any]) -> tuple[float, list[float]]:
    """Returns the median seconds of a call, and each repetition relative to it.

    The calls of a repetition follow each other without waiting.
    """

    def repeat(count: int) -> float:
        began = time.perf_counter()
        for _ in range(count):
            result = call()
        jax.block_until_ready(result)
        return (time.perf_counter() - began) / count

    repeat(1)
    count = max(round(SECONDS / repeat(1)), 1)
    seconds = [repeat(count) for _ in range(REPEATS)]
    median = statistics.median(seconds)
    return median, [round(each / median, 3) for each in seconds]


def use(dtype: str, rate: float, flops: float) -> Row:
    """Returns one device's throughput, FLOP/s and utilization."""
    stats = jax.local_devices()[0].memory_stats() or {}
    row = {"tokens_per_second": rate, "flops": flops, "mfu": flops / peak(dtype)}
    return row | {"peak_bytes": stats.get("peak_bytes_in_use", 0)}


def peak(dtype: str) -> float:
    """Returns the peak FLOP/s of one device."""
    return known_peak(jax.devices()[0].device_kind) or measured_peak(dtype)


def profile(part: Row, call: Callable[[], Any], updates: int = 1) -> Row:
    """Profiles one call if the part says so.

    Returns the kernels by time: their names, milliseconds and runs in an update.
    """
    if not part["trace"]:
        return {}
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            jax.block_until_ready(call())
        (path,) = Path(folder).rglob("*.xplane.pb")
        times: dict[str, list[float]] = collections.defaultdict(list)
        for name, nanoseconds in events(jax.profiler.ProfileData.from_file(str(path))):
            times[name].append(nanoseconds / 1e6)
    longest = sorted(times.items(), key=lambda item: -sum(item[1]))[:PRINTED]
    rows = [(name, sum(ms) / updates, len(ms) / updates) for name, ms in longest]
    return {"kernels": rows}


def events(data: Any) -> Iterator[tuple[str, float]]:
    """Yields the name and the nanoseconds of each kernel on the device.

    A GPU has a line for each stream, a TPU has one line of operations. On a CPU, whose
    threads also wait, only the outermost operations of a program count.
    """
    for plane in data.planes:
        device = plane.name.startswith("/device:")
        if not (device or plane.name == "/host:CPU"):
            continue
        for line in plane.lines:
            if device and not line.name.startswith(("Stream", "XLA Ops")):
                continue
            for event in line.events:
                outer = event.name.startswith(("while", "cond", "call"))
                if device or ("hlo_op" in dict(event.stats) and not outer):
                    yield event.name, event.duration_ns


def machine(part: Row) -> Measure:
    """Returns the facts of one device, and the rate of a product."""
    size = 64 if part["tiny"] else 1024 if jax.default_backend() == "cpu" else 8192
    x, device = jnp.ones((size, size), "bfloat16"), jax.devices()[0]
    multiply = jax.jit(functools.partial(float32_product, "BD,FD->BF"))

    def measure() -> Row:
        seconds, _ = seconds_of(functools.partial(multiply, x, x))
        return {
            "date": datetime.date.today().isoformat(),
            "device_kind": device.device_kind,
            "platform": device.platform,
            "memory_bytes": device_memory(),
            "peak_flops": peak("bfloat16"),
            "product_flops": 2 * size**3 / seconds,
            "versions": record.versions(),
        }

    return measure


def check_kernel(part: Row) -> Measure:
    """Compares a kernel's values and gradients with the einsum's on the CPU.

    The check is part of the preparation, because it needs no quiet device.
    """
    kernel, result = dispatch.KERNELS[part["kernel"]], Row(errors={})
    half = part["kernel"] == "cudnn"  # without float32, and without dropout
    shapes, absent = TINY_SHAPES if part["tiny"] else SHAPES, ("bias_HR",)
    for shape, rate in itertools.product(shapes, (0.0,) if half else (0.1, 0.0)):
        with jax.default_device(jax.devices("cpu")[0]):
            exact = check.make_operands(shape, "float32", absent, rate)
            expected = check.differentiate(xla.rel_attention, exact)
        for name, tolerance in TOLERANCES.items():
            if half and name != "bfloat16":
                continue
            dtype = "bfloat16" if name == "bfloat16" else "float32"
            precision = "highest" if name == "float32" else None
            given = check.make_operands(shape, dtype, absent, rate)
            actual = check.differentiate(kernel, given, precision)
            errors = check.errors(actual, expected)
            worst = max(errors, key=lambda each: errors[each])
            result["errors"][name] = max(errors[worst], result["errors"].get(name, 0.0))
            if not errors[worst] <= tolerance:
                where = f"{name}, {' x '.join(map(str, shape))}"
                raise ValueError(f"{worst} is off by {errors[worst]:.1e} ({where})")
    return lambda: result


def choose_kernels(part: Row) -> Measure:
    """Times the kernels of a training and its evaluation, as `train` does.

    Once also now, so that the programs are in the cache on disk.
    """
    config, mesh = read_config(part), subject.one_device()

    def measure() -> Row:
        trials = {
            name: time_kernels(
                make_workloads(name, config, mesh), compiler_options(name, mesh)
            )
            for name in PARTS
        }
        return {"choice": "; ".join(f"{x}: {describe(y)}" for x, y in trials.items())}

    measure()
    return measure


def train(part: Row) -> Measure:
    """Compiles the training step as `train` does, and its start, for one device."""
    config, mesh = read_config(part), subject.one_device()
    updater = make_updater(config.model, config.train, config.optim, mesh)
    options = record_loops([*mesh.devices.flat])
    segments = step_segments(config, mesh)
    step = updater.step.lower(updater.like, segments).compile(options)
    jitted: Any = updater.init
    init = jitted.lower().compile()
    return lambda: time_training(part, config, mesh, init, step)


def time_training(part: Row, config: Config, mesh: Any, init: Any, step: Any) -> Row:
    """Returns the seconds of an update, and the rates that follow from them."""
    train = config.train
    updates = train.updates_of_call(config.checkpoint.every_steps)
    S = updates * train.segments_per_update
    tokens = train.batch_size * (train.tgt_len * S + 1)
    text = subject.zipf_text(config.model.vocab_size, 2 * tokens + 2)
    batch, _ = make_streams(config, text, slice(None)).batch(Position(), S)
    segments, state = place_segments(mesh, batch), init()
    losses: list[Any] = []

    def call() -> Any:
        nonlocal state
        state, metrics = step(state, segments)
        losses.append(metrics["loss"])
        return metrics

    seconds, spread = seconds_of(call)
    width = train.ext_len + train.tgt_len
    once = needed_flops(config.model, train.batch_size, width, training=True)
    flops = S * once / seconds
    nats = np.concatenate(jax.device_get(losses)).astype(float)
    return {
        "seconds": seconds / updates,
        "spread": spread,
        "loss": [nats[0], nats[-1]],
        "updates": len(nats),
        **use(part["dtype"], int(batch.weights_SBL.sum()) / seconds, flops),
        **profile(part, call, updates),
    }


def evaluate(part: Row) -> Measure:
    """Compiles the evaluation step by reading four segments."""
    config = read_config(part)
    model, each = evaluation_model(config.model, config.eval), config.eval
    params = subject.make_params(config.model)
    evaluation = make_evaluate(config.model, each, subject.one_device())

    def read_segments(count: int) -> Any:
        tokens = count * each.streams * each.tgt_len + 1
        text = subject.zipf_text(config.model.vocab_size, tokens)
        return evaluation(params, text, lambda *_: None)

    read_segments(4)

    def measure() -> Row:
        # Enough segments to fill the time of a measurement, several in each call.
        once = read_segments(64)["seconds"] / 64
        count = max(64, round(REPEATS * SECONDS / once))
        done = read_segments(count)
        rate = done["tokens_per_second"]
        flops = needed_flops(model, each.streams, each.tgt_len, training=False)
        flops *= rate / (each.streams * each.tgt_len)
        row = {"L": each.tgt_len, "nll": done["nll"]}
        row |= use(part["dtype"], rate, flops)
        return row | profile(part, lambda: read_segments(64), 64)

    return measure


def generate(part: Row) -> Measure:
    """Compiles the sampler by sampling, with a full memory, one token at a time."""
    config = read_config(part)
    params = subject.make_params(config.model)
    length = config.generate.mem_len + 1
    prompt_T = subject.zipf_text(config.model.vocab_size, length)
    parts = stream(config.model, params, [prompt_T], config.generate)
    count = next(parts).tokens_BT.shape[1]

    def measure() -> Row:
        seconds, spread = seconds_of(lambda: next(parts).tokens_BT)
        model = generation_model(config.model, config.generate)
        flops = needed_flops(model, 1, 1, training=False)
        row = {"seconds": seconds / count, "spread": spread}
        row |= use(part["dtype"], count / seconds, flops * count / seconds)
        return row | profile(part, lambda: next(parts).tokens_BT, count)

    return measure


PREPARE: dict[str, Callable[[Row], Measure]] = {
    "machine": machine,
    "check": check_kernel,
    "choose": choose_kernels,
    "train": train,
    "evaluate": evaluate,
    "generate": generate,
}
