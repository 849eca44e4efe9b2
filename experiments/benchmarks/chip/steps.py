"""Training, evaluation and generation with the published configs on a device."""

import dataclasses
import time
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from jax.errors import JaxRuntimeError
from jax.sharding import Mesh

from experiments.benchmarks import generation, subject
from experiments.benchmarks.chip.plan import read, round_up
from experiments.benchmarks.chip.timing import memory_bytes, memory_stats, seconds_of
from experiments.benchmarks.quiet import clock
from txl_jax.aot.lower import memory_used, memory_wanted
from txl_jax.cli import plan
from txl_jax.cli.plan import make_streams
from txl_jax.config import Config, with_fields
from txl_jax.data.streams import Position
from txl_jax.evaluate.options import evaluation_model
from txl_jax.evaluate.perplexity import make_evaluate
from txl_jax.generate.options import generation_model
from txl_jax.generate.sampler import EVERY, stream
from txl_jax.model.flops import needed_flops
from txl_jax.report.peak import peak_flops
from txl_jax.sharding.rules import place_segments
from txl_jax.update.step import make_program
from txl_jax.workdir.fit import fit_mesh

Row = dict[str, Any]
MOST_STREAMS = 512  # per device: a tiny model would never fill it
ROOM = 0.92  # of the device's memory, for the first guess of the most streams
SHRINK = 0.85  # after each guess that does not fit
GUESSES = 4


class OutOfMemory(Exception):
    """The compiler found that a step does not fit; `bytes` is what it needs."""

    def __init__(self, bytes: int):
        super().__init__(f"out of memory: the step needs {bytes / 2**30:.1f} GiB")
        self.bytes = bytes


def build(config: Config, mesh: Mesh) -> tuple[Any, int]:
    """Returns the compiled training step and the bytes that it needs on a device."""
    parts = make_program(config.model, config.train, config.optim, mesh)
    state, segments = plan.step_arguments(config, mesh, parts)
    try:
        program = parts.step.lower(state, segments).compile()
    except JaxRuntimeError as error:
        if not (wanted := memory_wanted(str(error))):
            raise
        raise OutOfMemory(wanted) from error
    return program, memory_used(program)[0]


def run_training(config: Config) -> Iterator[Row]:
    """Yields the costs of a training step, then also its measured speed."""
    mesh, train = fit_mesh(config), config.train
    began = time.perf_counter()
    program, size = build(config, mesh)
    seconds = time.perf_counter() - began
    row: Row = {"streams": train.batch_size, "tgt_len": train.tgt_len, "bytes": size}
    row["compile_seconds"] = seconds
    yield row
    updates = train.updates_of_call(config.checkpoint.every_steps)
    S = updates * train.segments_per_update
    T = train.batch_size * (train.tgt_len * S + 1)
    text = subject.zipf_text(config.model.vocab_size, 2 * T + 2)
    batch, _ = make_streams(config, text, slice(None)).batch(Position(), S)
    segments = place_segments(mesh, batch)
    state = make_program(config.model, train, config.optim, mesh).init()
    losses: list[Any] = []

    def call() -> Any:
        nonlocal state
        state, metrics = program(state, segments)
        losses.append(metrics["loss"])
        return metrics

    call_seconds = seconds_of(call, 1.0)
    tokens = int(batch.weights_SBL.sum())
    width = train.ext_len + train.tgt_len
    flops = S * needed_flops(config.model, train.batch_size, width, True)
    nats = np.concatenate(jax.device_get(losses)).astype(float)
    row |= {
        "updates_of_call": updates,
        "update_seconds": call_seconds / updates,
        "tokens_per_second": tokens / call_seconds,
        "flops": flops / call_seconds,
        "mfu": flops / call_seconds / peak_flops(),
        "loss": [nats[0], nats[-1]],
        "peak_bytes": memory_stats().get("peak_bytes_in_use", 0),
    }
    yield row


def with_streams(config: Config, streams: float) -> Config:
    """Returns the config with at least so many streams, for all devices."""
    unit = jax.device_count() * config.train.batch_chunk
    return with_fields(
        config, "train", batch_size=max(round_up(int(streams), unit), unit)
    )


def train(part: Row) -> Iterator[Row]:
    """Measures the published streams, rounded up to a multiple of the devices."""
    config = read(part)
    yield from run_training(with_streams(config, config.train.batch_size))


def most(part: Row) -> Iterator[Row]:
    """Measures the most streams that fit, by the memory of two steps and by trial.

    Memory grows about linearly with the streams, up to `MOST_STREAMS` a device.
    """
    config, limit = read(part), memory_bytes()
    low = with_streams(config, config.train.batch_size / 4)
    high = with_streams(config, config.train.batch_size / 2)
    sizes = []
    for each in (low, high):
        try:
            sizes.append(build(each, fit_mesh(each))[1])
        except OutOfMemory as error:
            sizes.append(error.bytes)
    few, more = low.train.batch_size, high.train.batch_size
    slope = max((sizes[1] - sizes[0]) / max(more - few, 1), 1)
    streams = few + (ROOM * limit - sizes[0]) / slope
    streams = min(streams, MOST_STREAMS * jax.device_count())
    failed: list[int] = []
    for _ in range(GUESSES):
        guess = with_streams(config, streams - jax.device_count() + 1)
        try:
            for row in run_training(guess):
                yield row | {"failed": failed, "limit_bytes": limit}
            return
        except (JaxRuntimeError, OutOfMemory) as error:
            exhausted = "RESOURCE_EXHAUSTED" in str(error) or "memory" in str(error)
            if not exhausted:
                raise
        failed.append(guess.train.batch_size)
        yield {"failed": failed, "limit_bytes": limit}
        streams *= SHRINK
    raise OutOfMemory(sizes[0])


def evaluate(part: Row) -> Iterator[Row]:
    """Measures the published evaluation on one device, on text of several segments."""
    config = read(part)
    mesh, each = subject.one_device(), config.eval
    params = subject.make_params(config.model)
    run = make_evaluate(config.model, each, mesh)
    row: Row = {"streams": each.streams, "tgt_len": each.tgt_len}
    row["mem_len"] = each.mem_len

    def read_segments(count: int) -> Row:
        tokens = count * each.streams * each.tgt_len + 1
        text = subject.zipf_text(config.model.vocab_size, tokens)
        return run(params, text, lambda *_: None)

    row["first_seconds"] = clock(lambda: read_segments(4))
    once = read_segments(4)["seconds"]
    done = read_segments(min(max(4, int(4 * 4 / once)), 400))
    row |= {"tokens_per_second": done["tokens_per_second"], "nll": done["nll"]}
    width = each.ext_len + each.tgt_len
    model = evaluation_model(config.model, each)
    flops = needed_flops(model, each.streams, width, False)
    share = done["tokens_per_second"] / (each.streams * each.tgt_len)
    row["mfu"] = flops * share / (peak_flops() / jax.device_count())
    yield row


def generate(part: Row) -> Iterator[Row]:
    """Measures generation with a full memory, one stream on one device, token by token.

    The bound is the time in which a product reads as many bytes as a token needs.
    """
    config = read(part)
    options = dataclasses.replace(config.generate, num_tokens=EVERY * 10_000)
    params = subject.make_params(config.model)
    length = options.mem_len + 1
    prompt_T = subject.zipf_text(config.model.vocab_size, length)
    parts = stream(config.model, params, [prompt_T], options)
    row: Row = {"mem_len": options.mem_len, "first_seconds": clock(lambda: next(parts))}
    seconds = seconds_of(lambda: next(parts).tokens_BT, 2.0) / EVERY
    row |= {"tokens_per_second": 1 / seconds}
    yield row
    model = generation_model(config.model, options)
    size = generation.bytes_read(model, params)
    bound = seconds_of(generation.make_reader(size), 1.0)
    yield row | {"bytes_per_token": size, "of_the_bound": bound / seconds}


MEASURES = {"train": train, "most": most, "evaluate": evaluate, "generate": generate}
