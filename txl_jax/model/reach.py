"""The size and the reach of a memory, computed from the config (section 3.2)."""

import math
from typing import Any

from txl_jax.model.config import ModelConfig
from txl_jax.model.memory.interval import keys_per_query


def account(
    config: ModelConfig, batch_size: int, tgt_len: int, segments: int = 1
) -> dict[str, Any]:
    """Returns the memory's size and reach, and the share of dependencies it saves.

    cache_bytes is the size of the paper's cache of hidden states. Evaluation and
    generation keep keys and values of the memory and of the segments that are computed
    together instead: key_value_bytes. retrieval_bytes is the size of the store, if a
    layer retrieves, in all of them, and memory_token_bytes that of the memory tokens.
    With these or a compressed memory, all keep the cache; the reach of the latter is
    that of segments of a multiple of compression_rate tokens.
    lost_without_memory is the share of dependencies in reach that segments without
    memory would lose. A reach without limit is None.
    """
    context = effective_context(config, tgt_len)
    N, M, itemsize = config.n_layer, config.mem_slots, config.compute_dtype.itemsize
    token_bytes = 2 * config.n_head * config.d_head * batch_size * itemsize
    cache_bytes = N * M * config.d_model * batch_size * itemsize
    key_value_bytes = N * (M + segments * tgt_len) * token_bytes
    counts = {
        "cache_bytes": cache_bytes,
        "key_value_bytes": cache_bytes if config.keeps_states else key_value_bytes,
        "effective_context_tokens": None if math.isinf(context) else context,
        "lost_without_memory": lost_share(context, tgt_len) if context else 0.0,
    }
    if config.retrieval_len:
        counts["retrieval_bytes"] = config.retrieval_len * token_bytes
    if W := config.memory_tokens:
        counts["memory_token_bytes"] = W * config.d_model * batch_size * itemsize
    return counts


def describe(
    config: ModelConfig, batch_size: int, tgt_len: int, segments: int = 1
) -> str:
    """Returns the size and the reach as one line for the log."""
    N, M, D = config.n_layer, config.mem_slots, config.d_model
    if not config.has_memory:
        return f"no memory: every token depends only on its segment of {tgt_len} tokens"
    counts, store = account(config, batch_size, tgt_len, segments), ""
    slots = "slots" if config.compressed_len else "tokens"
    context = counts["effective_context_tokens"]
    reach = "all tokens before" if context is None else f"{context:,} tokens back"
    if T := config.retrieval_len:
        store = f"{counts['retrieval_bytes'] / 1e6:,.1f} MB of {T:,} tokens to retrieve"
        store = f", and {store}"
    if W := config.memory_tokens:
        store = f", and {W} tokens that each segment writes"
    return (
        f"memory: {N} layers x {M} {slots} x {D} x {batch_size} streams x "
        f"{config.compute_dtype.itemsize} bytes = "
        f"{counts['cache_bytes'] / 1e6:,.1f} MB "
        f"({counts['key_value_bytes'] / 1e6:,.1f} MB as keys and values){store}; it "
        f"reaches {reach}"
    )


def effective_context(config: ModelConfig, tgt_len: int, n_layer: int = 0) -> float:
    """Returns how many tokens before a segment its first prediction can depend on.

    n_layer: the number of layers to count, 0 = all. This is the paper's O(N x L),
    exactly N x M if M is a multiple of L. The oldest of M remembered tokens was read in
    an earlier segment, whose first token saw M tokens before it, so every layer but the
    last reaches M rounded up to whole segments. With same_length every token sees the
    same number of keys, itself included, and each layer reaches that far. A compressed
    slot reaches as far as its compression_rate states. A layer that retrieves reaches
    retrieval_len tokens before each token. With recurrence = "same" or memory tokens,
    each segment adds to the reach: infinity.
    """
    N, M, L = n_layer or config.n_layer, config.mem_len, tgt_len
    M += config.compressed_len * config.compression_rate
    if not config.has_memory:
        return 0
    if config.recurrence == "same" or config.memory_tokens:
        return math.inf
    keys, oldest = keys_per_query(config, M), 0  # the oldest token that counts so far
    for n in reversed(range(N)):
        local = oldest + 1 - keys if keys else oldest // L * L - M
        far = oldest - config.retrieval_len if n == config.retrieval_index else local
        oldest = min(local, far)
    return -oldest


def lost_share(context: float, tgt_len: int) -> float:
    """Returns the share of dependencies that segments of L without memory lose.

    A dependency is a pair of tokens within `context` of each other in a long text. It
    is lost if a segment boundary lies between them, with probability min(d / L, 1) at
    distance d. The mean over d = 1, ..., c is (c + 1) / 2L for c <= L, and
    1 - (L - 1) / 2c beyond.
    """
    c, L = context, tgt_len
    return (c + 1) / (2 * L) if c <= L else 1 - (L - 1) / (2 * c)
