"""Losses after contexts of exact lengths match the oracle.

Dims: B windows, T positions.
"""

import jax
import numpy as np
import pytest

from tests import reference
from tests.support import tiny
from txl_jax.evaluate.options import EvalConfig, evaluation_model
from txl_jax.model.config import ModelConfig
from txl_jax.paper.context_nll import make_context_nll, spread
from txl_jax.sharding.mesh import make_mesh
from txl_jax.sharding.options import MeshConfig
from txl_jax.sharding.rules import sharding

PARAMS = tiny.make_params()
TEXT_T = tiny.make_tokens(1, 60)[0].astype(np.uint8)
POSITIONS = spread(60, 20, 7)


def oracle(config: ModelConfig, context: int, tgt_len: int) -> np.ndarray:
    """Returns the oracle's nll_T at POSITIONS, each read from a cold start."""
    settings = tiny.reference_settings(config)
    nlls = []
    for at in POSITIONS:
        memory = reference.empty(tiny.N, 1, tiny.D)
        low = at - context
        while low < at:
            high = at - (at - 1 - low) // tgt_len * tgt_len
            nll_BL, memory = reference.nll(
                PARAMS,
                TEXT_T[None, low:high].astype(int),
                TEXT_T[None, low + 1 : high + 1].astype(int),
                memory,
                **settings,
            )
            low = high
        nlls.append(nll_BL[0, -1])
    return np.array(nlls)


@pytest.mark.parametrize("mem_len, segments", [(7, 1), (7, 2), (0, 1)])
def test_losses_depend_on_the_exact_context(mem_len: int, segments: int) -> None:
    options = EvalConfig(
        tgt_len=5, mem_len=mem_len, streams=3, segments_per_step=segments
    )
    config = evaluation_model(tiny.CONFIG, options)
    nll = make_context_nll(tiny.CONFIG, options, PARAMS, tiny.one_device())
    reported: list[tuple[int, int]] = []
    for context in (3, 13) if mem_len else (9,):
        reported.clear()
        actual_T = nll(TEXT_T, POSITIONS, context, lambda *x: reported.append(x))
        tgt_len = options.tgt_len if mem_len else context
        tiny.assert_close(actual_T, oracle(config, context, tgt_len))
        assert reported == [(3, 7), (6, 7), (7, 7)]
        # Not one bit depends on anything before the context; the rest does.
        before_T, inside_T = TEXT_T.copy(), TEXT_T.copy()
        before_T[: POSITIONS[0] - context] = 0
        inside_T[POSITIONS[0] - context] = (TEXT_T[POSITIONS[0] - context] + 1) % tiny.V
        first = POSITIONS[:1]
        whole = nll(TEXT_T, first, context, tiny.silent)
        assert nll(before_T, first, context, tiny.silent) == whole
        if context < 13:  # beyond that the first layer's memory has lost it
            assert nll(inside_T, first, context, tiny.silent) != whole


def test_contexts_are_split_over_devices() -> None:
    mesh = make_mesh(MeshConfig(data=1, segments=2), jax.devices()[:2])
    options = EvalConfig(tgt_len=2, mem_len=3, streams=3, segments_per_step=8)
    params = jax.device_put(PARAMS, sharding(mesh, ""))
    nll = make_context_nll(tiny.CONFIG, options, params, mesh)
    config = evaluation_model(tiny.CONFIG, options)
    for context in (13, 3):  # a call of 16 tokens, and of one segment
        actual_T = nll(TEXT_T, POSITIONS, context, tiny.silent)
        tiny.assert_close(actual_T, oracle(config, context, 2))


def test_positions_are_spread_evenly_after_the_longest_context() -> None:
    assert POSITIONS.tolist() == [20, 25, 31, 37, 42, 48, 54]
    assert spread(60, 20, 0).tolist() == list(range(20, 60))
    assert spread(60, 20, 99).tolist() == list(range(20, 60))
    assert spread(20, 20, 5).tolist() == []
