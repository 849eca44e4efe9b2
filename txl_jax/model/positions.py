"""Position schemes: the terms that they add to scores, embeddings or layer inputs.

Relative schemes (section 3.3) depend on distances only, so tokens may move from a
segment into the memory. Absolute schemes number a segment's tokens from 0.

Dims: P learned positions, X queries or keys.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array
from jax.ad_checkpoint import checkpoint_name

from txl_jax.kernels.operands import Operands, PositionTerms
from txl_jax.kernels.product import product
from txl_jax.model.config import ModelConfig
from txl_jax.model.modules import MakeWeight

Biases = dict[str, Array]  # by name, [H, A]


class Scheme(NamedTuple):
    """The terms of a scheme; all fields but the first two are functions or None.

    biases: names of the parameters created outside the layers, [H, A].
    untied: each layer has its own biases, regardless of untie_r.
    encoding: (config, K) -> R_RD, shared by all layers, with dropout.
    terms: (config, make, R_RD, biases, K) -> PositionTerms of a layer.
    embeddings: (config, L) -> rows [L, D] added to the scaled embeddings.
    inputs: (config, make, L) -> rows [L, D] added to a layer's input.
    rotate: (x_BXHA, position_X) -> queries or keys at these positions.
    """

    biases: tuple[str, ...] = ()
    untied: bool = False
    encoding: Callable[[ModelConfig, int], Array] | None = None
    terms: Callable[..., PositionTerms] | None = None
    embeddings: Callable[[ModelConfig, int], Array] | None = None
    inputs: Callable[[ModelConfig, MakeWeight, int], Array] | None = None
    rotate: Callable[[Array, Array], Array] | None = None


def sinusoid_RD(position_R: Array, D: int) -> Array:
    """Returns the encoding of positions, in float32.

    A row is [sin(p f), cos(p f)], concatenated and not interleaved, with
    f_k = 10000^(-2k/D). Positions are float32, because bfloat16 does not represent all
    integers above 256.
    """
    frequency = 10_000.0 ** (-jnp.arange(0, D, 2, dtype=jnp.float32) / D)
    angle = position_R.astype(jnp.float32)[:, None] * frequency
    return jnp.concatenate([jnp.sin(angle), jnp.cos(angle)], axis=-1)


def distances(config: ModelConfig, K: int) -> int:
    """Returns R, the number of distances of K keys; none is above clamp_len."""
    return min(K, config.clamp_len + 1) if config.clamp_len else K


def encode_distances(config: ModelConfig, K: int) -> Array:
    """Returns R_RD, sinusoids of the distances R - 1, .., 0."""
    R = distances(config, K)
    return sinusoid_RD(jnp.arange(R - 1, -1, -1), config.d_model)


def transformer_xl(
    config: ModelConfig, make: MakeWeight, R_RD: Array, biases: Biases, K: int
) -> PositionTerms:
    """Returns r = W_kR R, u and w: all four terms of section 3.3."""
    shape = (config.n_head, config.d_head, config.d_model)
    r_RHA = product("RD,HAD->RHA", R_RD, make("r", "HAD", shape))
    r_RHA = checkpoint_name(r_RHA, "r")
    return PositionTerms(r_RHA, biases["u"], biases["w"])


def shaw(
    config: ModelConfig, make: MakeWeight, R_RD: None, biases: Biases, K: int
) -> PositionTerms:
    """Returns learned r (Shaw et al. 2018, keys only): terms (a) and (b).

    The last row is distance 0. Distances beyond the table or clamp_len share a row.
    """
    shape = (config.n_position, config.n_head, config.d_head)
    R = min(config.n_position, distances(config, K))
    return PositionTerms(make("distances", "PHA", shape)[-R:])


def shaw_biased(
    config: ModelConfig, make: MakeWeight, R_RD: None, biases: Biases, K: int
) -> PositionTerms:
    """Returns the original code's variant: learned r, u, and a bias per distance."""
    bias_PH = make("distance_bias", "PH", (config.n_position, config.n_head))
    R = min(config.n_position, distances(config, K))
    terms = shaw(config, make, R_RD, biases, K)
    return terms._replace(u_HA=biases["u"], bias_HR=bias_PH[-R:].T)


def alibi(
    config: ModelConfig, make: MakeWeight, R_RD: None, biases: Biases, K: int
) -> PositionTerms:
    """Returns a bias of -slope x distance (Press et al. 2022).

    Kernels divide scores and bias by sqrt(A), which is undone here.
    """
    slope_H = jnp.array(alibi_slopes(config.n_head)) * config.d_head**0.5
    distance_R = jnp.arange(distances(config, K) - 1, -1, -1, dtype=jnp.float32)
    return PositionTerms(bias_HR=-slope_H[:, None] * distance_R)


def alibi_slopes(H: int) -> list[float]:
    """Returns the slope of each head: 2^(-8/H), 2^(-16/H), ..., 2^-8.

    If H is not a power of two, these are the slopes of the power below it, followed by
    every second one of the power above it, as in the authors' code.
    """
    below = 2 ** (H.bit_length() - 1)
    slopes = [2 ** (-8 * h / below) for h in range(1, below + 1)]
    return slopes + [2 ** (-4 * h / below) for h in range(1, 2 * (H - below), 2)]


def rotate(x_BXHA: Array, position_X: Array) -> Array:
    """Rotates pairs of features by position x frequency (Su et al. 2021, eq. 34).

    Products of rotated queries and keys depend on the difference of their positions.
    Feature i is paired with feature i + A / 2.
    """
    sinusoid_X1A = sinusoid_RD(position_X, x_BXHA.shape[-1])[:, None]
    sin, cos = jnp.split(sinusoid_X1A, 2, axis=-1)
    x, y = jnp.split(x_BXHA.astype(jnp.float32), 2, axis=-1)
    rotated_BXHA = jnp.concatenate([x * cos - y * sin, y * cos + x * sin], axis=-1)
    return rotated_BXHA.astype(x_BXHA.dtype)


def sinusoidal(config: ModelConfig, L: int) -> Array:
    """Returns the sinusoids of positions 0, ..., L - 1 (Vaswani et al. 2017)."""
    return sinusoid_RD(jnp.arange(L), config.d_model)


def learned(config: ModelConfig, make: MakeWeight, L: int) -> Array:
    """Returns a layer's learned rows 0, ..., L - 1 (Al-Rfou et al. 2018)."""
    return make("places", "PD", (config.n_position, config.d_model))[:L]


SCHEMES = {
    "transformer_xl": Scheme(
        biases=("u", "w"), encoding=encode_distances, terms=transformer_xl
    ),
    "shaw": Scheme(terms=shaw),
    "shaw_biased": Scheme(biases=("u",), untied=True, terms=shaw_biased),
    "rotary": Scheme(rotate=rotate),
    "alibi": Scheme(terms=alibi),
    "sinusoidal": Scheme(embeddings=sinusoidal),
    "learned": Scheme(inputs=learned),
    "none": Scheme(),
}


def position_terms(
    config: ModelConfig, make: MakeWeight, R_RD: Array | None, biases: Biases, K: int
) -> PositionTerms:
    """Returns the terms that the position scheme adds to a layer's scores."""
    terms = SCHEMES[config.position].terms
    return terms(config, make, R_RD, biases, K) if terms else PositionTerms()


def rotate_queries_and_keys(config: ModelConfig, operands: Operands) -> Operands:
    """Rotates queries and keys if the position scheme does so.

    Positions count from the oldest key, so they never grow with the text.
    """
    rotation = SCHEMES[config.position].rotate
    if rotation is None:
        return operands
    q_BLHA, k_BKHA = operands.q_BLHA, operands.k_BKHA
    position_K = jnp.arange(k_BKHA.shape[1])
    return operands._replace(
        q_BLHA=rotation(q_BLHA, position_K[-q_BLHA.shape[1] :]),
        k_BKHA=rotation(k_BKHA, position_K),
    )
