"""The published models compute here what they compute in Hugging Face's port.

`tests.support.golden` ran that port and wrote what it made of small random models with
all of its choices; with torch and transformers 4.35.2 it runs again, live, with others.

Dims: S segments, B streams, L segment, T = S L tokens, N layers, M memory, D model.
"""

import functools
import importlib.util
import json
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import reference
from tests.reference import Array, Params
from tests.support import golden, tiny
from tests.support.golden import L
from txl_jax.convert import huggingface
from txl_jax.data.streams import Segment
from txl_jax.model.config import ModelConfig
from txl_jax.model.memory import Memory
from txl_jax.model.txl import TransformerXL
from txl_jax.update.optim import make_optimizer, make_schedule
from txl_jax.update.options import OptimConfig, TrainConfig
from txl_jax.update.state import TrainState
from txl_jax.update.step import make_train_step

pytestmark = pytest.mark.promise("The model is the paper's")

# Absolute, of nll up to 20 nats and of memories up to 8: some roundings of float32.
TOLERANCE = 2e-5
LOSS_TOLERANCE = 1e-4  # relative, after up to 30 updates by Adam


@functools.cache
def load(name: str) -> Mapping[str, Array]:
    """Returns a file of tests/fixtures."""
    with np.load(golden.FOLDER / f"{name}.npz") as case:
        return dict(case)


def convert(case: Mapping[str, Array]) -> tuple[ModelConfig, Params]:
    """Returns a case's model, in float32."""
    state = {
        name.removeprefix("state/"): value.astype(np.float32)
        for name, value in case.items()
        if name.startswith("state/")
    }
    return huggingface.from_state_dict(state, json.loads(str(case["config"])))


def assert_reads_alike(
    case: Mapping[str, Array], memory: Any, read: Any, h_NBMD: Any
) -> None:
    """Compares each token's nll and the memories after segments.

    `read` maps (tokens_BL, targets_BL, memory) to (nll_BL, memory), h_NBMD(memory) is
    what is remembered.
    """
    tokens_BT, nll_BT = case["tokens"], case["nll"]
    assert np.isfinite(nll_BT).all()
    for s, begin in enumerate(range(0, nll_BT.shape[1], L)):
        inputs_BL = tokens_BT[:, begin : begin + L]
        targets_BL = tokens_BT[:, begin + 1 : begin + L + 1]
        nll_BL, memory = read(inputs_BL, targets_BL, memory)
        np.testing.assert_allclose(
            nll_BL, nll_BT[:, begin : begin + L], rtol=0, atol=TOLERANCE
        )
        if f"memory_{s}" in case:
            expected = case[f"memory_{s}"]
            np.testing.assert_allclose(h_NBMD(memory), expected, atol=TOLERANCE)


def assert_oracle_reads_alike(case: Mapping[str, Array]) -> None:
    config, params = convert(case)
    settings = tiny.reference_settings(config)
    N, M, D = config.n_layer, config.mem_len, config.d_model
    assert_reads_alike(
        case,
        reference.zeros(N, golden.B, D, M),
        lambda *segment: reference.nll(params, *segment, **settings),
        lambda memory: reference.padded(memory, M)[0],
    )


def assert_model_reads_alike(case: Mapping[str, Array]) -> None:
    config, params = convert(case)
    assert_reads_alike(
        case,
        Memory.empty(config, golden.B),
        lambda *segment: tiny.apply(config, params, *segment, method="nll"),
        lambda memory: memory.h_NBMD,
    )


@pytest.mark.parametrize("name", golden.CASES)
def test_the_oracle_reads_as_the_published_code(name: str) -> None:
    assert_oracle_reads_alike(load(name))


@pytest.mark.parametrize("name", golden.CASES)
def test_the_model_reads_as_the_published_code(name: str) -> None:
    assert_model_reads_alike(load(name))


def test_all_the_files_are_known() -> None:
    names = {path.stem for path in golden.FOLDER.glob("*.npz")}
    assert names == golden.CASES.keys() | golden.TRAINED.keys()


@pytest.mark.parametrize(
    "name",
    [pytest.param("train_plain", marks=pytest.mark.long), "train_clusters"],
)
def test_training_has_the_losses_of_the_published_code(name: str) -> None:
    """From the same weights, with the same data and Adam, update after update."""
    case = load(name)
    config, params = convert(case)
    S, B = golden.UPDATES, golden.STREAMS
    optim = OptimConfig(**json.loads(str(case["optim"])), schedule="constant")
    optimizer, schedule = make_optimizer(optim), make_schedule(optim, S)
    how = TrainConfig(
        num_steps=S, batch_size=B, tgt_len=L, segments_per_call=S, eval_every=S
    )
    params = jax.tree.map(jnp.asarray, params)
    state = TrainState(
        step=jnp.zeros((), jnp.int32),
        params=params,
        opt_state=optimizer.init(params),
        memory=Memory.empty(config, B),
        rng=jax.random.key(0),
    )
    segments = Segment(
        inputs_SBL=cut(case["tokens"][:, :-1]),
        targets_SBL=cut(case["tokens"][:, 1:]),
        weights_SBL=np.ones((S, B, L), np.float32),
        first_SBL=np.zeros((S, B, L), bool),
        length_SB=np.full((S, B), L, np.int32),
    )
    step = make_train_step(TransformerXL(config), optimizer, schedule, how)
    _, metrics = tiny.jit(step)(state, segments)
    for metric, expected in (("loss", "losses"), ("grad_norm", "grad_norms")):
        np.testing.assert_allclose(
            metrics[metric], case[expected], rtol=LOSS_TOLERANCE, err_msg=metric
        )


def cut(tokens_BT: Array) -> Array:
    """Returns the tokens as segments, [S, B, L]."""
    return np.stack(np.split(tokens_BT, tokens_BT.shape[1] // L, axis=1))


@pytest.mark.filterwarnings("ignore")  # importing the port warns of much
@pytest.mark.parametrize("name", ["untied_r", "div_val_2"])
def test_the_published_code_live(name: str) -> None:
    for module in ("torch", "transformers"):
        if not importlib.util.find_spec(module):
            pytest.skip(f"{module} is not installed: tests/fixtures stands in")
    case = golden.evaluated(golden.CASES[name], seed=1000)
    assert_oracle_reads_alike(case)
    assert_model_reads_alike(case)
