"""The FLOPs of matrix products that a step needs, from the sizes of the model.

A multiply-add counts as 2. The products of a forward pass are an array of three kinds:
both factors have gradients; only one has; or both have, and the product is of scores,
which a backward pass may recompute. Training computes each product once in the forward
pass, and one product for each factor that has a gradient in the backward pass.

Dims: B streams, L segment, T tokens, M memory, D model, H heads, A head,
F feed-forward, V vocabulary.
"""

import numpy as np

from txl_jax.model.config import ModelConfig
from txl_jax.model.positions import distances

# How often each kind is computed.
EVALUATION = (1, 1, 1)
NEEDED = (3, 2, 3)  # in training, recomputing nothing


def zipf(V: int, cutoffs: tuple[int, ...]) -> list[float]:
    """Returns the share of all tokens in each cluster, by Zipf's law: p ~ 1 / rank.

    Ids are ranks, the most frequent first, so a share is a sum of reciprocals, here the
    difference of two logarithms.
    """
    ends = np.log([0.5, *(cutoff + 0.5 for cutoff in cutoffs), V + 0.5])
    return (np.diff(ends) / (ends[-1] - ends[0])).tolist()


def layer_products(config: ModelConfig, L: int, cached: bool = False) -> np.ndarray:
    """Returns the products of all layers for one stream's segment of L tokens.

    Masked scores count, because the einsum kernel computes them. cached: the keys and
    values of the memory are kept instead of projected again.
    """
    D, HA, F = config.d_model, config.n_head * config.d_head, config.hidden_size
    M = config.mem_len
    K = M + L
    projected = 2 * D * HA * 4 * L  # q, k, v and the output
    scores = 2 * HA * L * K * 2  # by content, and the sum of values
    if config.position == "transformer_xl":
        scores += 2 * HA * L * distances(config, K)
    elif config.position.startswith("shaw"):
        scores += 2 * HA * L * min(K, config.n_position, distances(config, K))
    projected += 2 * (2 + config.gated) * L * D * F
    memory = 0 if cached else 2 * D * HA * 2 * M
    return config.n_layer * np.array([projected, memory, scores], float)


def vocabulary_products(config: ModelConfig, T: float) -> np.ndarray:
    """Returns the products of embedding and softmax for T tokens.

    Every token is embedded by the projections of all clusters. In the softmax, the rows
    of a cluster are multiplied with its own tokens only, as many as `zipf` gives.
    """
    D, V, cutoffs = config.d_model, config.vocab_size, config.cutoffs
    ends = (0, *cutoffs, V)
    sizes = config.embed_sizes
    same = config.div_val == 1 or not config.proj_same_dim
    projected = [0 if E == D and same else 2.0 * T * D * E for E in sizes]
    # Without div_val, all clusters share one projection.
    each = projected[0] if config.div_val == 1 else sum(projected)
    scored = 2.0 * T * sizes[0] * (ends[1] + len(cutoffs))
    parts = zipf(V, cutoffs)
    for i in range(1, len(sizes)):
        scored += 2.0 * T * parts[i] * sizes[i] * (ends[i + 1] - ends[i])
    return np.array([2 * each, 0.0, scored])


def products(
    config: ModelConfig, B: float, L: int, training: bool
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the products of layers and vocabulary for one segment of B streams.

    In an update r is computed once for all streams. Evaluation keeps it, and the
    memory's keys and values, from segment to segment.
    """
    layers = B * layer_products(config, L, cached=not training)
    if training and config.position == "transformer_xl":
        N, R = config.n_layer, distances(config, config.mem_len + L)
        layers[1] += 2 * N * R * config.d_model * config.n_head * config.d_head
    return layers, vocabulary_products(config, B * L)


def needed_flops(config: ModelConfig, B: int, L: int, training: bool) -> float:
    """Returns the FLOPs that one segment of B streams needs, recomputing nothing."""
    layers, vocabulary = products(config, B, L, training)
    return float((layers + vocabulary) @ (NEEDED if training else EVALUATION))
