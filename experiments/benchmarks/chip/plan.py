"""The parts of a first contact with a chip, in the order of what should be known first.

A part is a JSON object; each is measured in a process of its own.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any

from experiments.benchmarks import subject
from txl_jax import config as configs
from txl_jax.config import Config, with_fields
from txl_jax.data.options import SLACK
from txl_jax.kernels.dispatch import FASTEST
from txl_jax.workdir.fit import find_vocab

Part = dict[str, Any]
# By what is learned in a minute: the paper's two small models first.
EXPERIMENTS = (
    *("enwik8", "wt103", "enwik8_24l", "wt103_large", "ptb", "wt103_nvidia"),
    *("lm1b", "lm1b_large", "enwik8_18l", "text8", "wt103_nvidia_large"),
)
ON_CPU = ("ptb",)  # the others take minutes for an update
SHAPES_ON_CPU = ("ptb", "enwik8")
CHECKED_STREAMS = 2
# The terms of a score besides q k, and their names on the page. Those of other position
# schemes are checked at one shape.
TERMS = {
    "": "the paper's",
    "shaw_biased": "u, r and a bias",
    "alibi": "a bias",
    "none": "none",
}
TORCH_MODES, TASKS = ("eager", "compile"), ("train", "evaluate", "generate")
# Seconds after which a part is ended.
LIMITS = {
    **{"machine": 180, "check": 240, "train": 300, "most": 600},
    **{"evaluate": 240, "generate": 240, "torch": 240},
}


def read(part: Part) -> Config:
    """Returns the config that a part measures."""
    config = find_vocab(configs.parse(configs.load(part["experiment"])))
    config = with_fields(config, "model", dtype=part.get("dtype", "float32"))
    if part.get("tiny"):
        config = with_fields(config, "model", mem_len=8)
        config = with_fields(config, "train", batch_size=2, tgt_len=8)
        config = with_fields(config, "eval", streams=2, tgt_len=4, mem_len=8)
        config = with_fields(config, "generate", mem_len=8)
        config = dataclasses.replace(config, model=subject.shrink(config.model))
    return with_fields(config, "model", kernel=part.get("kernel", "auto"))


def round_up(size: int, multiple: int) -> int:
    """Returns the size rounded up to a multiple."""
    return -(-size // multiple) * multiple


def shapes(config: Config, devices: int) -> Iterator[list[int]]:
    """Yields B, H, L, M, A and R of attention in training and in evaluation.

    B is one device's share of the streams.
    """
    model, train, evaluation = config.model, config.train, config.eval
    H, A = model.n_head, model.d_head
    L = train.ext_len + train.tgt_len + (SLACK if train.varlen else 0)
    B = round_up(train.batch_size, devices * train.batch_chunk)
    B, M = B // devices // train.batch_chunk, model.mem_len
    yield [B, H, L, M, A, M + L]
    L, M = evaluation.ext_len + evaluation.tgt_len, evaluation.mem_len
    R = min(M + L, evaluation.clamp_len + 1) if evaluation.clamp_len else M + L
    yield [evaluation.streams, H, L, M, A, R]


def kernels(machine: Part) -> list[str]:
    """Returns the kernels that run on a machine's devices."""
    tpu = ["tpu"] if machine["device_kind"] in FASTEST else []
    return [*tpu, "xla", "chunked"]


def plan(machine: Part, tiny: bool) -> list[Part]:
    """Returns all parts for a machine."""
    cpu = machine["platform"] == "cpu"
    common = {"dtype": "float32" if cpu else "bfloat16", "tiny": tiny}
    names = ON_CPU if cpu else EXPERIMENTS
    checked = SHAPES_ON_CPU if cpu else EXPERIMENTS
    parts = [*checks(checked[:2], machine, common)]
    for rank, name in enumerate(names):
        each = {"experiment": name, **common}
        # Which kernel is faster in a step is known for no chip.
        tried = kernels(machine) if rank < 2 and not cpu else ["auto"]
        parts += [{"part": "train", "kernel": kernel, **each} for kernel in tried]
        parts += [{"part": task, **each} for task in ("evaluate", "generate")]
        if rank == 0 and not machine["torch"].startswith("not "):
            parts += [
                {"part": "torch", "task": task, "mode": mode, **each}
                for mode in TORCH_MODES
                for task in TASKS
            ]
    if not cpu:
        rest = checks(checked[2:], machine, common)
        parts += [part for part in rest if not part["terms"]]
        parts += [{"part": "most", "experiment": name, **common} for name in names]
    return parts


def checks(names: tuple[str, ...], machine: Part, common: Part) -> Iterator[Part]:
    """Yields a part for each kernel and distinct shape, at the first for all terms."""
    seen = []
    for name in names:
        config = read({"experiment": name, **common})
        for shape in shapes(config, machine["count"]):
            shape[0] = min(shape[0], CHECKED_STREAMS)
            if shape in seen:
                continue
            seen.append(shape)
            for kernel in kernels(machine):
                part = {"part": "check", "kernel": kernel, "shape": shape, **common}
                for terms in TERMS if shape == seen[0] else ("",):
                    yield part | {"terms": terms}


def shape_name(shape: list[int]) -> str:
    """Returns B x H x L + M x A, and the distances if they are fewer than keys."""
    B, H, L, M, A, R = shape
    return f"{B}x{H}x{L}+{M}x{A}" + (f", {R} distances" if R < M + L else "")


def title(part: Part) -> str:
    """Returns the name of a part."""
    kinds = ("task", "mode", "experiment", "kernel", "terms")
    names = (part.get(name, "") for name in kinds)
    shape = shape_name(part["shape"]) if "shape" in part else ""
    return " ".join(filter(None, (part["part"], *names, shape)))
