"""Refuses memories, caches and parameters that exceed this machine's memory."""

import os

import jax

from txl_jax.errors import UserError
from txl_jax.evaluate.options import EvalConfig
from txl_jax.model.config import ModelConfig
from txl_jax.model.reach import account

# The sizes of a memory; the second one is the number of streams.
TRAIN_FIELDS = (
    "model.mem_len",
    "train.batch_size",
    "train.tgt_len",
    "train.gradient_segments",
)
EVAL_FIELDS = ("eval.mem_len", "eval.streams", "eval.tgt_len")
GENERATE_FIELDS = ("generate.mem_len", "generate.samples")
TOKEN_BYTES = 12  # of a token's input, target and weight


def eval_fields(segments: int) -> tuple[str, ...]:
    """Returns the fields to lower if an evaluation of so many segments does not fit."""
    return (*EVAL_FIELDS, *(["eval.segments_per_step"] if segments > 1 else []))


def check_fits(
    config: ModelConfig,
    batch_size: int,
    tgt_len: int,
    fields: tuple[str, ...],
    segments: int = 1,
    chunks: int = 1,
) -> None:
    """Raises UserError if memory and segments alone exceed this machine's memory.

    fields: those to lower, the streams only if there are several; segments: of tgt_len
    tokens, read in one call; chunks: of the streams, computed one after the other. A
    layer has at least its hidden states, keys and values.
    """
    store = ("model.retrieval_len",) if config.retrieval_len else ()
    *first, last = [x for x in (*store, *fields) if batch_size > 1 or x != fields[1]]
    counts = account(config, batch_size, tgt_len)
    memory = min(counts["cache_bytes"], counts["key_value_bytes"])
    memory += counts.get("retrieval_bytes", 0)
    layer = config.d_model + 2 * config.n_head * config.d_head
    layer_bytes = layer * config.compute_dtype.itemsize
    tokens = batch_size * tgt_len
    read = tokens * (segments * TOKEN_BYTES + layer_bytes // chunks)
    _check_bytes(
        memory + read,
        f"a memory of {config.mem_len:,} tokens in {config.n_layer:,} layers and "
        f"segments of {tgt_len:,} tokens for {batch_size:,} streams take",
        f"{', '.join(first)} or {last}" if first else last,
    )


def check_cache(config: ModelConfig, eval: EvalConfig, segments: int = 1) -> None:
    """Raises UserError if a continuous cache alone exceeds this machine's memory.

    Each token that it holds has a hidden state, and a float32 score for each target of
    the segments that are computed together.
    """
    state_bytes = config.d_model * config.compute_dtype.itemsize
    entry = state_bytes + 4 * segments * eval.tgt_len
    if eval.cache_len:
        _check_bytes(
            eval.streams * eval.cache_len * entry,
            f"a cache of {eval.cache_len:,} tokens and its scores for "
            f"{eval.streams:,} streams take",
            "eval.cache_len, eval.streams or eval.tgt_len",
        )


def check_parameters(count: int, copies: int, numbers: int) -> None:
    """Raises UserError if the parameters' numbers exceed this machine's memory.

    copies: of the parameters in the mesh; numbers: per parameter, of 4 bytes.
    """
    _check_bytes(
        4 * numbers * copies * count,
        f"{count:,} parameters, with gradients and moments, in {copies} copies take",
        "the sizes of the model, or raise mesh.fsdp",
    )


def _check_bytes(total: int, what: str, fields: str) -> None:
    """Raises UserError if this machine's share of the bytes exceeds its memory."""
    wanted = total * jax.local_device_count() / jax.device_count()
    limits = [device.memory_stats() or {} for device in jax.local_devices()]
    there = sum(stats.get("bytes_limit", 0) for stats in limits)
    there = there or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if wanted > there:
        raise UserError(
            f"{what} {wanted / 1e9:,.1f} GB of the {there / 1e9:,.1f} GB here: lower "
            f"{fields}"
        )
