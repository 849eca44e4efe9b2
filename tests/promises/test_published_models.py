"""The published models compute here what they compute in Hugging Face's port.

`tests.support.golden` ran that port and wrote what it made of small random models with
all of its choices; with torch and transformers 4.35.2 it runs again, live, with others.

Dims: B streams, L segment, T tokens, N layers, M memory, D model.
"""

import importlib.util
import json
from collections.abc import Mapping

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

# Absolute, of nll up to 20 nats and of memories up to 8: some roundings of float32.
TOLERANCE = 2e-5
LOSS_TOLERANCE = 1e-4  # relative, after up to 30 updates by Adam


def assert_reads_alike(saved: Mapping[str, Array]) -> None:
    """Compares nll and memories with those of the oracle and of the model."""
    config, params = case_of(saved)
    settings = tiny.reference_settings(config)
    N, M, D = config.n_layer, config.mem_len, config.d_model
    oracle_memory = reference.zeros(N, golden.B, D, M)
    memory = Memory.empty(config, golden.B)
    tokens_BT, nll_BT = saved["tokens"], saved["nll"]
    assert np.isfinite(nll_BT).all()
    for s, begin in enumerate(range(0, nll_BT.shape[1], L)):
        segment = tokens_BT[:, begin : begin + L], tokens_BT[:, begin + 1 :][:, :L]
        oracle_BL, oracle_memory = reference.nll(
            params, *segment, oracle_memory, **settings
        )
        nll_BL, memory = tiny.apply(config, params, *segment, memory, method="nll")
        for actual_BL in (oracle_BL, nll_BL):
            np.testing.assert_allclose(
                actual_BL, nll_BT[:, begin : begin + L], rtol=0, atol=TOLERANCE
            )
        if f"memory_{s}" in saved:
            for h_NBMD in (reference.padded(oracle_memory, M)[0], memory.h_NBMD):
                expected_NBMD = saved[f"memory_{s}"]
                np.testing.assert_allclose(h_NBMD, expected_NBMD, atol=TOLERANCE)


@pytest.mark.parametrize("name", golden.CASES)
def test_oracle_and_model_read_as_the_published_code(name: str) -> None:
    assert_reads_alike(load_case(name))


@pytest.mark.parametrize(
    "name",
    [pytest.param("train_plain", marks=pytest.mark.long), "train_clusters"],
)
def test_training_has_the_losses_of_the_published_code(name: str) -> None:
    """From the same weights, with the same data and Adam, update after update."""
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


@pytest.mark.filterwarnings("ignore")  # importing the port warns of much
@pytest.mark.parametrize("name", ["untied_r", "div_val_2"])
def test_the_published_code_live(name: str) -> None:
    for module in ("torch", "transformers"):
        if not importlib.util.find_spec(module):
            pytest.skip(f"{module} is not installed: tests/fixtures stands in")
    assert_reads_alike(golden.evaluated(golden.CASES[name], seed=1000))
