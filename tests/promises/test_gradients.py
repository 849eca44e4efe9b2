"""Gradients of all parameters agree with differences of the paper's formulas.

The oracle runs in float64, twice for each coordinate.

Dims: S segments, B streams, L segment, T = S L tokens.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import reference
from tests.reference import Array, Params
from tests.support import tiny
from txl_jax.model.config import ModelConfig
from txl_jax.model.memory import Memory
from txl_jax.model.segment import Segment
from txl_jax.model.txl import TransformerXL
from txl_jax.update.options import TrainConfig
from txl_jax.update.step import sum_gradients

B, L, S = 2, 3, 2
COORDINATES = 2  # for each parameter: the steepest, and others at random
STEP = 1e-6  # differences are exact to STEP^2 and to 1e-16 / STEP
TOKENS_BT = tiny.make_tokens(B, S * L + 1)
INPUTS_SBL, TARGETS_SBL = (
    np.stack(np.split(tokens_BT, S, axis=1))
    for tokens_BT in (TOKENS_BT[:, :-1], TOKENS_BT[:, 1:])
)
FIRST_SBL = np.zeros((S, B, L), bool)
FIRST_SBL[0, 0, 0] = FIRST_SBL[1, 0, 1] = True
LENGTH_SB = np.array([[L, L - 1], [L, L]], np.int32)
WHOLE_SB = np.full_like(LENGTH_SB, L)  # no padding may precede a token that sees it


class Case(NamedTuple):
    """A model, and the number of segments that its gradients cross."""

    settings: dict[str, Any]
    gradient_segments: int = 1

    @property
    def config(self) -> ModelConfig:
        """The model's config."""
        return tiny.config(**{"mem_len": 4, **self.settings})

    @property
    def segments(self) -> Segment:
        """The segments that are read."""
        length_SB = LENGTH_SB if self.gradient_segments == 1 else WHOLE_SB
        weights_SBL = (np.arange(L) < length_SB[..., None]).astype(np.float32)
        return Segment(INPUTS_SBL, TARGETS_SBL, weights_SBL, FIRST_SBL, length_SB)


def gradient_of_the_model(case: Case, params: Params) -> Any:
    """Returns the gradient of the mean nll of all segments."""
    train = TrainConfig(
        batch_size=B,
        tgt_len=L,
        segments_per_call=S,
        segments_per_update=S,
        gradient_segments=case.gradient_segments,
    )
    model, memory = TransformerXL(case.config), Memory.empty(case.config, B)
    find = jax.jit(functools.partial(sum_gradients, model, config=train))
    sums, _ = find(params, memory, case.segments, jax.random.key(0))
    return jax.tree.map(lambda x: x / sums.tokens, sums.grads)


class Oracle:
    """The mean nll as a function of the parameters.

    The memory is constant, or depends on the parameters where gradients cross it.
    """

    def __init__(self, case: Case, params: Params):
        self.case = case
        self.settings = tiny.reference_settings(case.config)
        self.memories = self.read(params, S * [None])[1]

    def read(
        self, params: Params, memories: Sequence[reference.Memory | None]
    ) -> tuple[float, list[reference.Memory]]:
        """Returns the mean nll of real tokens, and the memory before each segment.

        Segment s reads memories[s] or, if that is None, the previous segment's memory.
        """
        total, used = 0.0, []
        after = reference.empty(self.case.config.n_layer, B, tiny.D)
        for memory, segment in zip(
            memories, zip(*self.case.segments, strict=True), strict=True
        ):
            inputs_BL, targets_BL, _, first_BL, length_B = segment
            used.append(memory or after)
            nll_BL, after = reference.nll(
                params,
                inputs_BL,
                targets_BL,
                used[-1],
                first_BL=first_BL,
                length_B=length_B,
                **self.settings,
            )
            total += nll_BL.sum()
        return float(total / self.case.segments.length_SB.sum()), used

    def loss(self, params: Params) -> float:
        """Returns the mean over all real tokens."""
        across = self.case.gradient_segments > 1
        return self.read(params, S * [None] if across else self.memories)[0]

    def slope(self, params: Params, leaf: Array, index: Any) -> float:
        """Returns the central difference along one coordinate of a leaf of params."""
        value = leaf[index]
        leaf[index] = value + STEP
        above = self.loss(params)
        leaf[index] = value - STEP
        below = self.loss(params)
        leaf[index] = value
        return (above - below) / (2 * STEP)


CASES = [
    Case({**tiny.ALL, "cutoffs": (5, 9), "div_val": 2, "untie_r": True}),
    Case({"position": "shaw_biased", "n_position": 5}),
    Case(tiny.GATED),
    Case({"position": "rotary", "d_head": 4, **tiny.MODERN}),
    Case({"untie_r": True}, S),
]
OTHERS: list[dict[str, Any]] = [
    {"position": "learned", "n_position": L, "mem_len": 0},
    {"position": "sinusoidal", "mem_len": 0},
    {"position": "shaw", "n_position": 5},
    {"position": "alibi"},
    {"position": "none"},
]


@pytest.mark.parametrize(
    "case",
    [*CASES, *(pytest.param(Case(x), marks=pytest.mark.long) for x in OTHERS)],
    ids=str,
)
def test_gradients_match_finite_differences_of_the_oracle(case: Case) -> None:
    rng = np.random.default_rng(0)
    params: Params = tiny.make_params(case.config)
    gradient = gradient_of_the_model(case, params)
    params = jax.tree.map(lambda leaf: leaf.astype(np.float64), params)
    oracle = Oracle(case, params)
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
    """The memory of a segment is a constant for the next (section 3.2, equation 2)."""

    def kept(params: Params) -> jax.Array:
        memory = Memory.empty(tiny.CONFIG, B)
        after: Any = TransformerXL(tiny.CONFIG).apply(
            {"params": params}, INPUTS_SBL[0], memory
        )
        return jnp.sum(after[1].h_NBMD)

    gradient = jax.jit(jax.grad(kept))(tiny.make_params())
    assert not any(np.asarray(leaf).any() for leaf in jax.tree.leaves(gradient))
