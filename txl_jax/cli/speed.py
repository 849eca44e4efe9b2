"""The mode `speed`: times evaluation with a memory and sliding windows (Table 9)."""

import dataclasses
import time
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
from jax.sharding import NamedSharding, PartitionSpec

from txl_jax.cli.evaluate import write_files
from txl_jax.cli.steps import find_vocab
from txl_jax.config import Config
from txl_jax.evaluate import speed
from txl_jax.evaluate.options import evaluation_model
from txl_jax.report import plots
from txl_jax.report.log import say
from txl_jax.runtime.preemption import stop
from txl_jax.sharding.mesh import make_mesh
from txl_jax.sharding.options import MeshConfig
from txl_jax.update.init import init_params
from txl_jax.workdir.folder import CONFIG
from txl_jax.workdir.load import load


def run(config: Config, workdir: Path) -> dict[str, Any]:
    """Times every attention length on the first device.

    The parameters come from the workdir's run, or are random if there is none. The
    files are written after each length, because the next length takes longer than all
    before it.
    """
    started = time.perf_counter()
    lengths = speed.attention_lens(config.eval.sweep)
    device = jax.local_devices()[0]
    mesh = make_mesh(MeshConfig(), [device])
    if (workdir / CONFIG).exists():
        loaded = load(workdir, config)
        config, params = loaded.config, loaded.params
    else:
        config = find_vocab(config)
        key = jax.random.key(0)
        params = jax.jit(lambda: nn.unbox(init_params(config.model, key)))()
        workdir.mkdir(parents=True, exist_ok=True)
    params = jax.device_put(params, NamedSharding(mesh, PartitionSpec()))
    B, L = config.eval.streams, config.eval.tgt_len
    rows: list[dict[str, Any]] = []
    result: dict[str, Any] = {
        "attention_lens": lengths,
        "batch_size": B,
        "tgt_len": L,
        "device_kind": device.device_kind,
        "segments_timed": speed.ROUNDS * speed.SEGMENTS,
        "windows_timed": speed.ROUNDS * B,
        "rows": rows,
    }
    for W in lengths:
        timed = dataclasses.replace(config.eval, mem_len=W, ext_len=0)
        programs = speed.make_programs(config.model, timed, params, mesh)
        seconds = speed.measure(programs, B, L)
        row = speed.describe(evaluation_model(config.model, timed), B, L, seconds)
        say(
            f"attention length {W:,}: {row['cached_seconds_per_token'] * 1e3:.3f} ms "
            f"per token; windows are {row['ratio']:,.0f} times slower, at best "
            f"{row['fair_ratio']:,.0f} (by FLOPs {row['predicted_fair_ratio']:,.0f})"
            + (f"; in the paper {row['paper_ratio']:,}" if "paper_ratio" in row else "")
        )
        rows.append(row)
        result["seconds"] = time.perf_counter() - started
        files = write_files(workdir / "speed", result, plots.plot_speed)
        if stop.at_boundary():
            raise stop.end("while timing")
    return result | files
