"""Position schemes: what each adds to the scores, the embeddings or layers' inputs.

Relative ones (section 3.3) speak of distances, so that a token in the memory keeps its
place; absolute ones number the tokens of a segment from 0.

Dims: L segment, K keys, R distances in decreasing order, at most K, P learned
positions, D model, H heads, A head.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array

from txl_jax.errors import UserError
from txl_jax.model.config import ModelConfig

# Makes or finds a parameter of the layer: (name, letters, shape) -> array.
Weight = Callable[[str, str, tuple[int, ...]], Array]


class Distances(NamedTuple):
    """What the attention's kernel wants of a scheme; None is left out of the scores.

    Rows are in decreasing distance, to 0; farther keys than they reach have the first.
    """

    r_RHA: Array | None = None
    u_HA: Array | None = None
    w_HA: Array | None = None
    bias_HR: Array | None = None


class Scheme(NamedTuple):
    """Where a scheme adds something; all but `biases` are functions or None.

    biases: the parameters [H, A] that it adds to queries, made outside the layers.
    untied: each layer has its own, whatever untie_r says.
    encoding: (config, K) -> R_RD, the same for all layers, dropped out like embeddings.
    scores: (config, weight, R_RD, biases, K) -> Distances of a layer.
    embeddings: (config, L) -> rows [L, D] added to the scaled embeddings.
    inputs: (config, weight, L) -> rows [L, D] added to a layer's input.
    """

    biases: tuple[str, ...] = ()
    untied: bool = False
    encoding: Callable[[ModelConfig, int], Array] | None = None
    scores: Callable[..., Distances] | None = None
    embeddings: Callable[[ModelConfig, int], Array] | None = None
    inputs: Callable[[ModelConfig, Weight, int], Array] | None = None


def sinusoid_RD(position_R: Array, D: int) -> Array:
    """Returns the encoding of positions, in float32.

    A row is [sin(p f), cos(p f)], halves side by side and not interleaved, with
    f_k = 10000^(-2k/D). Built in float32 always: bfloat16 has no integers beyond 256.
    """
    frequency = 10_000.0 ** (-jnp.arange(0, D, 2, dtype=jnp.float32) / D)
    angle = position_R.astype(jnp.float32)[:, None] * frequency
    return jnp.concatenate([jnp.sin(angle), jnp.cos(angle)], axis=-1)


def encode_distances(config: ModelConfig, R: int) -> Array:
    """Returns R_RD, the sinusoids of distances; none is above clamp_len."""
    if config.clamp_len:
        R = min(R, config.clamp_len + 1)
    return sinusoid_RD(jnp.arange(R - 1, -1, -1), config.d_model)


def transformer_xl(
    config: ModelConfig, weight: Weight, R_RD: Array, biases: Any, R: int
) -> Distances:
    """Returns r = W_kR R, u and w: all four terms of section 3.3."""
    shape = (config.n_head, config.d_head, config.d_model)
    r_RHA = jnp.einsum("RD,HAD->RHA", R_RD, weight("r", "HAD", shape))
    return Distances(r_RHA, biases["u"], biases["w"])


def learned_rows(config: ModelConfig, R: int) -> int:
    """Returns how many of a learned table's last rows R distances need.

    The last has distance 0; what is beyond the table or clamp_len has the farthest's.
    """
    return min(R, config.n_position, config.clamp_len + 1 if config.clamp_len else R)


def shaw(
    config: ModelConfig, weight: Weight, R_RD: None, biases: Any, R: int
) -> Distances:
    """Returns learned r (Shaw et al. 2018, keys alone): terms (a) and (b)."""
    shape = (config.n_position, config.n_head, config.d_head)
    return Distances(weight("distances", "PHA", shape)[-learned_rows(config, R) :])


def shaw_biased(
    config: ModelConfig, weight: Weight, R_RD: None, biases: Any, R: int
) -> Distances:
    """Returns the original code's variant: learned r, u, and a bias per distance."""
    bias_PH = weight("distance_bias", "PH", (config.n_position, config.n_head))
    bias_HR = bias_PH[-learned_rows(config, R) :].T
    learned_r = shaw(config, weight, R_RD, biases, R)
    return learned_r._replace(u_HA=biases["u"], bias_HR=bias_HR)


def sinusoidal(config: ModelConfig, L: int) -> Array:
    """Returns the sinusoids of places 0, ..., L - 1 (Vaswani et al. 2017)."""
    return sinusoid_RD(jnp.arange(L), config.d_model)


def learned(config: ModelConfig, weight: Weight, L: int) -> Array:
    """Returns a layer's learned rows of places 0, ..., L - 1 (Al-Rfou et al. 2018)."""
    P = config.n_position
    if L > P:
        raise UserError(
            f"a segment of {L} tokens has more places than model.n_position = {P}: "
            "shorten the segment (tgt_len, ext_len) or raise n_position"
        )
    return weight("places", "PD", (P, config.d_model))[:L]


SCHEMES = {
    "transformer_xl": Scheme(
        biases=("u", "w"), encoding=encode_distances, scores=transformer_xl
    ),
    "shaw": Scheme(scores=shaw),
    "shaw_biased": Scheme(biases=("u",), untied=True, scores=shaw_biased),
    "sinusoidal": Scheme(embeddings=sinusoidal),
    "sinusoidal_repeated": Scheme(embeddings=sinusoidal),
    "learned": Scheme(inputs=learned),
    "none": Scheme(),
}


def scores(
    config: ModelConfig, weight: Weight, R_RD: Array | None, biases: Any, K: int
) -> Distances:
    """Returns what the config's scheme adds to a layer's scores; often nothing."""
    make = SCHEMES[config.position].scores
    return make(config, weight, R_RD, biases, K) if make else Distances()
