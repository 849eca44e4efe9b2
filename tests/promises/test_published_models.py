"""The published models give the same results here as in Hugging Face's port.

`tests.support.golden` describes the recorded results. They come from small random
models with all of the port's choices.

Dims: B streams, L segment, T tokens, N layers, M memory, D model.
"""

import functools
import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from tests import reference
from tests.convert.test_pytorch import case_of, load_case
from tests.reference import Array
from tests.support import golden, tiny
from tests.support.golden import L
from tests.support.training import train
from txl_jax.model.memory import Memory
from txl_jax.update.optim import make_optimizer, make_schedule
from txl_jax.update.options import OptimConfig

pytestmark = pytest.mark.promise("The model is the paper's")

# Absolute, for nll up to 20 nats and memories up to 8: some roundings of float32.
TOLERANCE = 2e-5
LOSS_TOLERANCE = 1e-4  # relative, after up to 30 updates by Adam


def assert_results_agree(saved: Mapping[str, Array], *, by_oracle: bool) -> None:
    """Compares nll and memories with the oracle's or the model's."""
    config, params = case_of(saved)
    memory: Any = Memory.empty(config, golden.B)
    read = functools.partial(tiny.apply, config, params, method="nll")
    if by_oracle:
        sizes = config.n_layer, golden.B, config.d_model, config.mem_len
        memory, settings = reference.zeros(*sizes), tiny.reference_settings(config)
        read = functools.partial(reference.nll, params, **settings)
    tokens_BT, nll_BT = saved["tokens"], saved["nll"]
    assert np.isfinite(nll_BT).all()
    for s, begin in enumerate(range(0, nll_BT.shape[1], L)):
        segment = tokens_BT[:, begin : begin + L], tokens_BT[:, begin + 1 :][:, :L]
        nll_BL, memory = read(*segment, memory)
        expected_BL = nll_BT[:, begin : begin + L]
        np.testing.assert_allclose(nll_BL, expected_BL, rtol=0, atol=TOLERANCE)
        if (expected_NBMD := saved.get(f"memory_{s}")) is not None:
            M = config.mem_len
            h_NBMD = reference.padded(memory, M)[0] if by_oracle else memory.h_NBMD
            np.testing.assert_allclose(h_NBMD, expected_NBMD, atol=TOLERANCE)


@pytest.mark.parametrize("name", golden.CASES)
def test_the_oracle_agrees_with_the_published_code(name: str) -> None:
    assert_results_agree(load_case(name), by_oracle=True)


# Each choice is in one of these; `tests.model.test_txl` compares more with the oracle.
QUICK = {"short_memory", "pre_lnorm", "narrow_embeddings", "one_table_div_val_2"}
QUICK |= {"long_memory", "narrow_untied_clusters", "div_val_2_all_tied", "div_val_4"}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in QUICK else pytest.mark.long)
        for name in golden.CASES
    ],
)
def test_the_model_agrees_with_the_published_code(name: str) -> None:
    assert_results_agree(load_case(name), by_oracle=False)


@pytest.mark.parametrize(
    "name", [pytest.param("train_plain", marks=pytest.mark.long), "train_clusters"]
)
def test_training_matches_the_losses_of_the_published_code(name: str) -> None:
    """Weights, data and Adam are the same; losses are compared update by update."""
    saved = load_case(name)
    config, params = case_of(saved)
    optim = OptimConfig(**json.loads(str(saved["optim"])), schedule="constant")
    metrics = train(
        config,
        params,
        make_optimizer(optim),
        make_schedule(optim, golden.UPDATES),
        saved["tokens"],
        L,
    )
    for metric, expected in (("loss", "losses"), ("grad_norm", "grad_norms")):
        np.testing.assert_allclose(
            metrics[metric], saved[expected], rtol=LOSS_TOLERANCE, err_msg=metric
        )
