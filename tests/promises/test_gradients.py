"""Gradients of all parameters are those of the paper's formulas, by differences.

The oracle runs in float64 and knows no gradient: it is evaluated twice per coordinate.

Dims: S segments, B streams, L segment, T = S L tokens.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import reference
from tests.reference import Array, Params
from tests.support import tiny
from txl_jax.model.memory import Memory
from txl_jax.model.txl import TransformerXL

B, L, S = 2, 3, 2
COORDINATES = 2  # of each parameter: the steepest, and others at random
STEP = 1e-6  # differences are right to its square and to 1e-16 / STEP
TOKENS_BT = tiny.make_tokens(B, S * L + 1)
INPUTS_SBL, TARGETS_SBL = (
    np.stack(np.split(tokens_BT, S, axis=1))
    for tokens_BT in (TOKENS_BT[:, :-1], TOKENS_BT[:, 1:])
)
FIRST_SBL = np.zeros((S, B, L), bool)
FIRST_SBL[0, 0, 0] = FIRST_SBL[1, 0, 1] = True
LENGTH_SB = np.array([[L, L - 1], [L, L]], np.int32)
SEGMENTS = INPUTS_SBL, TARGETS_SBL, FIRST_SBL, LENGTH_SB


def gradient_of_the_model(settings: dict[str, Any], params: Params) -> Any:
    """Returns the gradient of the mean nll of all segments."""
    config = tiny.config(mem_len=4, **settings)

    def loss(params: Any) -> jax.Array:
        def read(memory: Memory, segment: Any) -> Any:
            *tokens, first_BL, length_B = segment
            more: Any = {"first_BL": first_BL, "length_B": length_B, "method": "nll"}
            variables = {"params": params}
            nll_BL, after = TransformerXL(config).apply(
                variables, *tokens, memory, **more
            )
            return after, jnp.sum(nll_BL * (jnp.arange(L) < length_B[:, None]))

        _, nll_S = jax.lax.scan(read, Memory.empty(config, B), SEGMENTS)
        return jnp.sum(nll_S) / LENGTH_SB.sum()

    return jax.jit(jax.grad(loss))(params)


class Oracle:
    """The mean nll as a function of the parameters, each memory held constant."""

    def __init__(self, settings: dict[str, Any], params: Params):
        config = tiny.config(mem_len=4, **settings)
        self.settings = tiny.reference_settings(config)
        self.memories = [reference.empty(config.n_layer, B, tiny.D)]
        for s in range(S - 1):
            self.memories.append(self.nll(params, s)[1])

    def nll(self, params: Params, s: int) -> tuple[Array, reference.Memory]:
        """Returns the nll of segment s and the memory after it."""
        inputs_BL, targets_BL, first_BL, length_B = (x[s] for x in SEGMENTS)
        more: dict[str, Any] = {"first_BL": first_BL, "length_B": length_B}
        return reference.nll(
            params, inputs_BL, targets_BL, self.memories[s], **self.settings, **more
        )

    def loss(self, params: Params) -> float:
        """Returns the mean over all real tokens."""
        total = sum(self.nll(params, s)[0].sum() for s in range(S))
        return float(total / LENGTH_SB.sum())

    def slope(self, params: Params, leaf: Array, index: Any) -> float:
        """Returns the central difference along one coordinate of a leaf of params."""
        value = leaf[index]
        leaf[index] = value + STEP
        above = self.loss(params)
        leaf[index] = value - STEP
        below = self.loss(params)
        leaf[index] = value
        return (above - below) / (2 * STEP)


VARIANTS: list[dict[str, Any]] = [
    {**tiny.ALL, "cutoffs": (5, 9), "div_val": 2, "untie_r": True},
    {"position": "shaw_biased", "n_position": 5},
    {"position": "rotary", "d_head": 4, **tiny.MODERN},
]


@pytest.mark.parametrize("settings", VARIANTS, ids=str)
def test_gradients_match_finite_differences_of_the_oracle(
    settings: dict[str, Any],
) -> None:
    rng = np.random.default_rng(0)
    params: Params = tiny.make_params(tiny.config(**settings))
    gradient = gradient_of_the_model(settings, params)
    params = jax.tree.map(lambda leaf: leaf.astype(np.float64), params)
    oracle = Oracle(settings, params)
    for (path, actual), leaf in zip(
        jax.tree_util.tree_leaves_with_path(gradient),
        jax.tree.leaves(params),
        strict=True,
    ):
        actual = np.asarray(actual)
        steepest = np.abs(actual).argmax()
        others = rng.integers(0, leaf.size, COORDINATES - 1)
        for flat in (steepest, *others):
            index = np.unravel_index(flat, leaf.shape)
            slope = oracle.slope(params, leaf, index)
            error = abs(actual[index] - slope)
            where = jax.tree_util.keystr(path), index
            assert error < tiny.FLOAT32 * abs(actual.flat[steepest]), where


def test_no_gradient_flows_into_the_memory() -> None:
    """What a segment leaves for the next is constant (section 3.2, equation 2)."""

    def kept(params: Params) -> jax.Array:
        memory = Memory.empty(tiny.CONFIG, B)
        after: Any = TransformerXL(tiny.CONFIG).apply(
            {"params": params}, INPUTS_SBL[0], memory
        )
        return jnp.sum(after[1].h_NBMD)

    gradient = jax.jit(jax.grad(kept))(tiny.make_params())
    assert not any(np.asarray(leaf).any() for leaf in jax.tree.leaves(gradient))
