"""The first module with a bad number is the one that was broken.

Dims: N layers, G segments in an update; otherwise as in the glossary of `txl_jax`.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest

from tests.support import tiny
from tests.update.test_step import ADAM, make_config, make_segments, make_state
from txl_jax.errors import BadNumbers
from txl_jax.model.config import ModelConfig
from txl_jax.model.txl import TransformerXL
from txl_jax.runtime.options import MeshConfig
from txl_jax.sharding import make_mesh, place_segments
from txl_jax.update.bad_numbers import Diagnosis, find_bad
from txl_jax.update.guard import REASONS
from txl_jax.update.init import init_state
from txl_jax.update.options import TrainConfig

pytestmark = pytest.mark.promise("Non-finite updates are never applied")

Params = Any
PLAIN = tiny.config(n_layer=3)
# Where nothing divides a large gradient by a large number.
PRE_LNORM = dataclasses.replace(PLAIN, pre_lnorm=True)
NONE = "none, with an empty memory and the parameters of the checkpoint"


def diagnose(
    model: ModelConfig,
    damage: Callable[[Params], None],
    config: TrainConfig | None = None,
    devices: int = 1,
) -> str:
    """Returns the diagnosis of a state with damaged parameters."""
    config = config or make_config()
    params = tiny.make_params(model)
    damage(params)
    state = make_state(model, ADAM, config.batch_size, "threefry2x32")
    state = dataclasses.replace(state, params=params)
    mesh = make_mesh(MeshConfig(), jax.devices()[:devices])
    _, places = init_state(model, ADAM, config.batch_size, 0, mesh, averages=True)
    state = jax.device_put(state, places)
    G = config.segments_per_update
    group: Any = place_segments(mesh, make_segments(G, config.batch_size))
    return find_bad(TransformerXL(model), config, state, 3, group)


def infinite_bias(params: Params, n: int) -> None:
    params["layers"]["feed_forward"]["in"]["bias"][n, 4] = np.inf


def overflowing_output(params: Params, n: int) -> None:
    """Each parameter is finite, and so is the norm that a layer begins with."""
    params["layers"]["feed_forward"]["out"]["kernel"][n] = 3e38


def overflowing_gradient(params: Params, n: int) -> None:
    """The first product is as small as the second is large, so the output is fair."""
    feed_forward = params["layers"]["feed_forward"]
    feed_forward["in"]["kernel"][n] *= 1e-37
    feed_forward["in"]["bias"][n] *= 1e-37
    feed_forward["out"]["kernel"][n] = 3e38


def overflowing_square(params: Params, n: int) -> None:
    """A zero hides a huge number from the loss, not from the zero's own gradient."""
    params["layers"]["feed_forward"]["in"]["kernel"][n] *= 1e25
    params["layers"]["feed_forward"]["out"]["kernel"][n] = 0


@pytest.mark.parametrize("n", [0, 2])
def test_the_layer_of_a_broken_parameter_is_named(n: int) -> None:
    result = diagnose(PLAIN, lambda params: infinite_bias(params, n))
    name = f"layers[{n}]/feed_forward/in"
    assert result == (
        f"the output of {name}; the parameter {name}/bias itself is not finite"
    )


def test_the_layer_that_overflows_is_named() -> None:
    n = 2
    result = diagnose(PLAIN, lambda params: overflowing_output(params, n))
    assert result == f"the output of layers[{n}]/feed_forward/out"


def test_the_layer_whose_gradient_overflows_is_named() -> None:
    n = 2
    """The gradients of the layers below it are not finite either."""
    result = diagnose(PRE_LNORM, lambda params: overflowing_gradient(params, n))
    assert result == f"the gradient of the parameter layers[{n}]/feed_forward/in/bias"


def test_the_parameter_whose_gradient_has_no_norm_is_named() -> None:
    result = diagnose(PLAIN, lambda params: overflowing_square(params, 1))
    name = "layers[1]/feed_forward/out/kernel"
    assert result.startswith(
        f"a square, of the gradient of the parameter {name} (norm "
    )


def test_a_row_of_the_embedding_is_found_where_it_is_read() -> None:
    def damage(params: Params) -> None:
        params["embedding"]["table"][make_segments(1).inputs_SBL.min()] = np.nan

    assert diagnose(PLAIN, damage) == (
        "the output of embedding.embed; the parameter embedding/table itself is not "
        "finite"
    )


@pytest.mark.long
def test_a_row_of_the_output_table_is_found_where_it_is_scored() -> None:
    def damage(params: Params) -> None:
        params["embedding"]["out_table"][make_segments(1).targets_SBL.min()] = np.nan

    untied = dataclasses.replace(PLAIN, tie_weights=False)
    assert diagnose(untied, damage).startswith(
        "the output of embedding.nll; the parameter embedding/out_"
    )


def test_what_is_sound_is_not_blamed() -> None:
    assert diagnose(PLAIN, lambda params: None) == NONE


@pytest.mark.parametrize(
    ("changes", "fields", "devices"),
    [
        pytest.param(
            *({"remat_policy": "full", "dropout": 0.2, "dropatt": 0.2}, {}, 1),
            marks=pytest.mark.long,
        ),
        pytest.param(
            *({"unroll": 3, "kernel": "chunked", "cutoffs": (4, 9), "div_val": 2},),
            *({}, 1),
            marks=pytest.mark.long,
        ),
        ({}, {"segments_per_call": 2, "segments_per_update": 2, "batch_chunk": 2}, 1),
        ({}, {"batch_size": 16, "batch_chunk": 2}, 8),
    ],
    ids=["remat, dropout", "unrolled, clusters", "in parts", "eight devices"],
)
def test_the_layer_is_named_however_an_update_is_computed(
    changes: Any, fields: Any, devices: int
) -> None:
    model = dataclasses.replace(PRE_LNORM, **changes)

    def damage(params: Params) -> None:
        overflowing_gradient(params, 1)

    result = diagnose(model, damage, make_config(**fields), devices)
    assert result == "the gradient of the parameter layers[1]/feed_forward/in/bias"


# Too many in a row.


def bad(in_row: int, reason: str = REASONS[-1]) -> dict[str, Any]:
    """Returns what the loop sees of a skipped update."""
    numbers = {"loss": 9.0, "mean_loss": 2.0, "skipped_in_row": in_row}
    return {**numbers, "skipped": in_row > 0, "reason": reason}


def test_a_diagnosis_stops_at_the_first_update_with_too_many() -> None:
    config = make_config(max_bad_steps=3, segments_per_call=2)
    diagnosis, state = Diagnosis(PLAIN, config), make_state(PLAIN)
    for step, updates in (10, [bad(1), bad(2)]), (12, [bad(0), bad(1)]):
        diagnosis.dispatched(make_segments(2))
        diagnosis.fetched(step, updates)
        diagnosis.raise_if_found(state)
        assert not diagnosis.found()
    for _ in range(2):
        diagnosis.dispatched(make_segments(2))
    diagnosis.fetched(14, [bad(2), bad(3)])
    diagnosis.fetched(16, [bad(4), bad(0)])
    assert diagnosis.found()
    with pytest.raises(BadNumbers) as caught:
        diagnosis.raise_if_found(state)
    assert str(caught.value) == (
        "update 16 was skipped, number 3 in a row (train.max_bad_steps = 3), since "
        f"{REASONS[-1]}; the loss is 9, the mean 2. No skipped update has changed "
        "checkpoint 0"
    )


def test_a_diagnosis_looks_at_the_segments_of_the_bad_update() -> None:
    """Of all that were dispatched, one alone reads the broken row of the table."""
    config = make_config(max_bad_steps=1, segments_per_call=2)
    state, segments = make_state(PLAIN), make_segments(2)
    params = tiny.make_params(PLAIN)
    zeros = segments._replace(inputs_SBL=np.zeros_like(segments.inputs_SBL))
    row = segments._replace(inputs_SBL=np.array([[[0]], [[7]]]) + zeros.inputs_SBL)
    params["embedding"]["table"][7] = np.nan
    state = dataclasses.replace(state, params=params)
    diagnosis = Diagnosis(PLAIN, config)
    for each in (zeros, row, zeros):
        diagnosis.dispatched(each)
    diagnosis.fetched(0, [bad(0), bad(0)])
    diagnosis.fetched(2, [bad(0), bad(1, REASONS[1])])
    with pytest.raises(BadNumbers, match=r"update 4 .* the output of embedding.embed"):
        diagnosis.raise_if_found(state)
