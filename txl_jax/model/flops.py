"""The FLOPs of matrix products that a step needs, from the sizes of the model.

A multiply-add counts as 2. Training computes each product once in the forward pass, and
one product for each factor that has a gradient in the backward pass: three in all, but
two for the memory's projections, because no gradient passes into the memory. With
pre_lnorm these take three too: the memory's norm has parameters.

Dims: B streams, L segment, T tokens, M memory, D model, H heads, A head,
F feed-forward, V vocabulary.
"""

from txl_jax.kernels.softmax import zipf
from txl_jax.model.config import ModelConfig
from txl_jax.model.fast_weights import fast_products
from txl_jax.model.positions import distances


def needed_flops(
    config: ModelConfig, B: int, L: int, *, training: bool, together: int = 1
) -> float:
    """Returns the FLOPs that one segment of B streams needs, recomputing nothing.

    In an update r is computed once for all streams, and the memory is projected once
    for the segments that are computed `together`. Evaluation keeps r, and the memory's
    keys and values, from segment to segment.
    """
    own, memory = layer_products(config, L)
    own, memory = B * own, B * memory
    own += sum(vocabulary_products(config, B * L))
    fast = 0.0
    if config.fast_weights:
        fast = B * L * config.n_layer * fast_products(config, training)
    if not training:
        return own + fast
    memory *= 3 if config.pre_lnorm else 2
    if config.position == "transformer_xl":
        R = distances(config, config.mem_len + together * L)
        HA = config.n_head * config.d_head
        memory += 2 * (2 * config.n_layer * config.d_model * HA) * R
    return 3 * own + memory / together + fast


def layer_products(config: ModelConfig, L: int) -> tuple[float, float]:
    """Returns the products of all layers for one stream's segment of L tokens.

    The second number counts the projections of the memory to keys and values. Masked
    scores count, because the einsum kernel computes them.
    """
    D, HA = config.d_model, config.n_head * config.d_head
    M = config.mem_len
    K = M + L
    products = 2 * D * HA * 4 * L  # q, k, v and the output
    products += 2 * HA * L * K * 2  # scores by content, and the sum of values
    if config.position == "transformer_xl":
        products += 2 * HA * L * distances(config, K)
    elif config.position.startswith("shaw"):
        products += 2 * HA * L * min(K, config.n_position, distances(config, K))
    products += L * positionwise_products(config)
    return config.n_layer * products, config.n_layer * 2 * D * HA * 2 * M


def positionwise_products(config: ModelConfig) -> int:
    """Returns the products of a layer's feed-forward and gates for one token."""
    D, F = config.d_model, config.hidden_size
    gates = 0 if config.gate == "none" else 2 * 6 * D * D
    return 2 * ((2 + config.gated) * D * F + gates)


def vocabulary_products(config: ModelConfig, T: float) -> tuple[float, float]:
    """Returns the products of T tokens with projections, and with rows of the softmax.

    Every token is multiplied with the projections of all clusters, in the embedding and
    in the softmax, and with the rows of its own cluster only (`zipf`).
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
    return 2 * each, scored
