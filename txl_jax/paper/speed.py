"""The mode `speed`: times evaluation with a memory and sliding windows (Table 9)."""

import dataclasses
import time
from pathlib import Path

import flax.linen as nn
import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from txl_jax.config import Config
from txl_jax.evaluate.options import evaluation_model
from txl_jax.paper import windows
from txl_jax.report.log import Json, say
from txl_jax.report.plots import empty, save
from txl_jax.runtime import preemption
from txl_jax.sharding.mesh import make_mesh
from txl_jax.sharding.options import MeshConfig
from txl_jax.update.init import init_params
from txl_jax.workdir.fit import find_vocab
from txl_jax.workdir.folder import CONFIG
from txl_jax.workdir.load import load
from txl_jax.workdir.staging import write_files


def run(config: Config, workdir: Path) -> Json:
    """Times every attention length on the first device, and writes after each one.

    The parameters come from the workdir's run, or are random if there is none.
    """
    started = time.perf_counter()
    lengths = windows.attention_lens(config.eval.sweep)
    device = jax.local_devices()[0]
    mesh = make_mesh(MeshConfig(), [device])
    if (workdir / CONFIG).exists():
        loaded = load(workdir, config)
        config, params = loaded.config, loaded.params
    else:
        config = find_vocab(config)
        key = jax.random.key(0)
        params = jax.jit(lambda: nn.unbox(init_params(config.model, key)))()
    params = jax.device_put(params, NamedSharding(mesh, PartitionSpec()))
    B, L = config.eval.streams, config.eval.tgt_len
    rows: list[Json] = []
    result: Json = {
        "attention_lens": lengths,
        "batch_size": B,
        "tgt_len": L,
        "device_kind": device.device_kind,
        "segments_timed": windows.ROUNDS * windows.SEGMENTS,
        "windows_timed": windows.ROUNDS * B,
        "rows": rows,
    }
    stop = preemption.current()
    for W in lengths:
        timed = dataclasses.replace(
            config.eval, mem_len=W, ext_len=0, segments_per_step=1
        )
        programs = windows.make_programs(config.model, timed, params, mesh)
        seconds = windows.measure(programs, B, L)
        row = windows.describe(evaluation_model(config.model, timed), B, L, seconds)
        say(
            f"attention length {W:,}: {row['cached_seconds_per_token'] * 1e3:.3f} ms "
            f"per token; windows are {row['ratio']:,.0f} times slower, at best "
            f"{row['fair_ratio']:,.0f} (by FLOPs {row['predicted_fair_ratio']:,.0f})"
        )
        rows.append(row)
        result["seconds"] = time.perf_counter() - started
        files = write_files(workdir / "speed", result, plot_speed)
        if stop.at_boundary():
            raise stop.end("while timing")
    return result | files


def plot_speed(result: Json, path: Path) -> None:
    """Draws the slowdown of windows against the attention length, beside Table 9."""
    figure = empty(8, 4.5)
    axes = figure.add_subplot()
    for key, label, style, color in (
        ("ratio", "window, naive", "o-", "tab:red"),
        ("predicted_ratio", "its FLOPs", "--", "tab:red"),
        ("fair_ratio", "window, only needed work", "o-", "tab:blue"),
        ("predicted_fair_ratio", "its FLOPs", "--", "tab:blue"),
        ("paper_ratio", "paper, Table 9 (another model and device)", "D:", "gray"),
    ):
        pairs = [(x["attention_len"], x[key]) for x in result["rows"] if key in x]
        points_X2 = np.array(pairs, float).reshape(-1, 2)
        axes.plot(*points_X2.T, style, color=color, markersize=5, label=label)
    ticks = [row["attention_len"] for row in result["rows"]]
    axes.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
    axes.set(xlabel="attention length", ylabel="time per token, cached = 1")
    axes.set_ylim(bottom=0)
    save(figure, path)
