"""The size and the reach of a memory, computed from the config (section 3.2)."""

import os

import jax

from txl_jax.errors import UserError
from txl_jax.evaluate.options import EvalConfig
from txl_jax.model.config import ModelConfig
from txl_jax.model.memory.interval import keys_per_query
from txl_jax.report.log import Json

TRAIN_FIELDS = "model.mem_len, train.batch_size or train.tgt_len"
EVAL_FIELDS = "eval.mem_len, eval.streams or eval.tgt_len"
GENERATE_FIELDS = "generate.mem_len or generate.samples"
TOKEN_BYTES = 12  # of a token's input, target and weight


def account(config: ModelConfig, batch_size: int, tgt_len: int) -> Json:
    """Returns the memory's size and reach, and the share of dependencies it saves.

    cache_bytes is the size of the paper's cache of hidden states. Evaluation and
    generation keep keys and values of memory and segment instead: key_value_bytes.
    lost_without_memory is the share of dependencies in reach that segments without
    memory would lose.
    """
    context = effective_context(config, tgt_len)
    N, M, itemsize = config.n_layer, config.mem_len, config.compute_dtype.itemsize
    slots = 2 * N * (M + tgt_len) * config.n_head * config.d_head
    return {
        "cache_bytes": N * M * config.d_model * batch_size * itemsize,
        "key_value_bytes": slots * batch_size * itemsize,
        "effective_context_tokens": context,
        "lost_without_memory": lost_share(context, tgt_len) if context else 0.0,
    }


def check_fits(
    config: ModelConfig,
    batch_size: int,
    tgt_len: int,
    fields: str,
    segments: int = 1,
    chunks: int = 1,
) -> None:
    """Raises UserError if memory and segments alone exceed this machine's memory.

    fields: those to lower; segments: of tgt_len tokens, read in one call; chunks: of
    the streams, computed one after the other. A layer has at least its hidden states,
    keys and values.
    """
    counts = account(config, batch_size, tgt_len)
    memory = min(counts["cache_bytes"], counts["key_value_bytes"])
    layer = config.d_model + 2 * config.n_head * config.d_head
    layer_bytes = layer * config.compute_dtype.itemsize
    tokens = batch_size * tgt_len
    read = tokens * (segments * TOKEN_BYTES + layer_bytes // chunks)
    _check_bytes(
        memory + read,
        f"a memory of {config.mem_len:,} tokens in {config.n_layer:,} layers and "
        f"segments of {tgt_len:,} tokens for {batch_size:,} streams take",
        fields,
    )


def check_cache(config: ModelConfig, eval: EvalConfig) -> None:
    """Raises UserError if a continuous cache alone exceeds this machine's memory.

    Each token that it holds has a hidden state, and a float32 score for each target of
    a segment.
    """
    entry = config.d_model * config.compute_dtype.itemsize + 4 * eval.tgt_len
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


def describe(config: ModelConfig, batch_size: int, tgt_len: int) -> str:
    """Returns the size and the reach as one line for the log."""
    N, M, D = config.n_layer, config.mem_len, config.d_model
    if not M:
        return f"no memory: every token depends only on its segment of {tgt_len} tokens"
    counts = account(config, batch_size, tgt_len)
    return (
        f"memory: {N} layers x {M} tokens x {D} x {batch_size} streams x "
        f"{config.compute_dtype.itemsize} bytes = "
        f"{counts['cache_bytes'] / 1e6:,.1f} MB "
        f"({counts['key_value_bytes'] / 1e6:,.1f} MB as keys and values); it reaches "
        f"{counts['effective_context_tokens']:,} tokens back"
    )


def effective_context(config: ModelConfig, tgt_len: int, n_layer: int = 0) -> int:
    """Returns how many tokens before a segment its first prediction can depend on.

    n_layer: the number of layers to count, 0 = all. This is the paper's O(N x L),
    exactly N x M if M is a multiple of L. The oldest of M remembered tokens was read in
    an earlier segment, whose first token saw M tokens before it, so every layer but the
    last reaches M rounded up to whole segments. With same_length every token sees the
    same number of keys, itself included, and each layer reaches that far.
    """
    N, M, L = n_layer or config.n_layer, config.mem_len, tgt_len
    if not M:
        return 0
    if config.same_length:
        return N * (keys_per_query(config, M) - 1)
    return (N - 1) * -(-M // L) * L + M


def lost_share(context: int, tgt_len: int) -> float:
    """Returns the share of dependencies that segments of L without memory lose.

    A dependency is a pair of tokens within `context` of each other in a long text. It
    is lost if a segment boundary lies between them, with probability min(d / L, 1) at
    distance d. The mean over d = 1, ..., c is (c + 1) / 2L for c <= L, and
    1 - (L - 1) / 2c beyond.
    """
    c, L = context, tgt_len
    return (c + 1) / (2 * L) if c <= L else 1 - (L - 1) / (2 * c)
