"""The first non-finite number of an update is named."""

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
from txl_jax.sharding.mesh import make_mesh
from txl_jax.sharding.options import MeshConfig
from txl_jax.sharding.rules import place_segments
from txl_jax.update.bad_numbers import Diagnosis, find_bad
from txl_jax.update.guard import REASONS
from txl_jax.update.init import init_state
from txl_jax.update.options import TrainConfig

pytestmark = pytest.mark.promise("Non-finite updates are never applied")

PLAIN = tiny.config(n_layer=3)
# Where nothing divides a large gradient by a large number.
PRE_LNORM = dataclasses.replace(PLAIN, pre_lnorm=True)
N = 1  # the damaged layer
HUGE = 3e38


def diagnose(
    model: ModelConfig,
    damage: Callable[[Any], None],
    config: TrainConfig | None = None,
    devices: int = 1,
) -> str:
    """Returns the diagnosis of an update with damaged parameters."""
    config = config or make_config(segments_per_update=1, batch_chunk=1)
    state = make_state(model, ADAM, config.batch_size, "threefry2x32")
    damage(state.params)
    mesh = make_mesh(MeshConfig(), jax.devices()[:devices])
    _, places = init_state(model, ADAM, config.batch_size, 0, mesh, averages=True)
    state = jax.device_put(state, places)
    group: Any = make_segments(config.segments_per_update, config.batch_size)
    return find_bad(model, config, state, 3, place_segments(mesh, group))


def infinite_bias(params: Any) -> None:
    params["layers"]["feed_forward"]["in"]["bias"][N, 4] = np.inf


def overflowing_gradient(params: Any) -> None:
    """Its output is fair, but the gradients of the layers below overflow as well."""
    feed_forward = params["layers"]["feed_forward"]
    feed_forward["in"]["kernel"][N] *= 1e-37
    feed_forward["in"]["bias"][N] *= 1e-37
    feed_forward["out"]["kernel"][N] = HUGE


def overflowing_square(params: Any) -> None:
    """A zero hides a huge number from the loss, not from the zero's own gradient."""
    params["layers"]["feed_forward"]["in"]["kernel"][N] *= 1e25
    params["layers"]["feed_forward"]["out"]["kernel"][N] = 0


LAYER = f"layers[{N}]/feed_forward"
NONE = "none, with an empty memory and the parameters of the checkpoint"


@pytest.mark.parametrize(
    ("damage", "expected"),
    [
        (infinite_bias, f"the output of {LAYER}/in"),
        (overflowing_square, f"the norm of the gradient of {LAYER}/out/kernel"),
        (lambda params: None, NONE),
    ],
)
def test_first_bad_number(damage: Callable[[Any], None], expected: str) -> None:
    assert diagnose(PLAIN, damage) == expected


@pytest.mark.long
def test_outputs_of_all_segments_of_a_call_are_searched() -> None:
    model = dataclasses.replace(PLAIN, **tiny.TOKENS)
    config = make_config(gradient_segments=2)
    assert diagnose(model, infinite_bias, config) == f"the output of {LAYER}/in"


OTHERS: list[tuple[Any, Any, int]] = [
    ({"remat_policy": "full", "dropout": 0.2, "dropatt": 0.2}, {}, 1),
    ({"unroll": 3, "kernel": "chunked", "cutoffs": (4, 9), "div_val": 2}, {}, 1),
    ({}, {"batch_size": 16}, 8),
]


@pytest.mark.parametrize(
    ("changes", "fields", "devices"),
    [({}, {}, 1), *(pytest.param(*x, marks=pytest.mark.long) for x in OTHERS)],
    ids=["in parts", "remat, dropout", "unrolled, clusters", "eight devices"],
)
def test_overflowing_gradient_is_named(changes: Any, fields: Any, devices: int) -> None:
    model = dataclasses.replace(PRE_LNORM, **changes)
    result = diagnose(model, overflowing_gradient, make_config(**fields), devices)
    assert result == f"the norm of the gradient of {LAYER}/in/kernel"


# Too many in a row.


def bad(in_row: int, reason: str = REASONS[-1]) -> dict[str, Any]:
    """Returns what the loop sees of a skipped update."""
    numbers = {"loss": 9.0, "mean_loss": 2.0, "skipped_in_row": in_row}
    return {**numbers, "skipped": in_row > 0, "reason": reason}


def test_a_diagnosis_stops_at_the_first_update_with_too_many() -> None:
    diagnosis = Diagnosis(PLAIN, make_config(updates=2, max_bad_steps=3))
    state, segments = make_state(PLAIN), make_segments(4)
    for step, updates in (10, [bad(1), bad(2)]), (12, [bad(0), bad(1)]):
        diagnosis.fetched(step, updates, segments)
        diagnosis.raise_if_found(state)
        assert not diagnosis.ends()
    diagnosis.fetched(14, [bad(2), bad(3)], segments)
    diagnosis.fetched(16, [bad(4), bad(0)], segments)
    assert diagnosis.ends()
    with pytest.raises(BadNumbers) as caught:
        diagnosis.raise_if_found(state)
    assert str(caught.value) == (
        "update 16 was skipped, number 3 in a row (train.max_bad_steps = 3), since "
        f"{REASONS[-1]}; the loss is 9, the mean 2. No skipped update has changed "
        "checkpoint 0"
    )


def test_a_diagnosis_uses_the_segments_of_the_bad_update() -> None:
    """Of all segments, one alone reads the huge row of the table."""
    config = make_config(segments_per_call=2, segments_per_update=1, max_bad_steps=1)
    diagnosis = Diagnosis(PLAIN, config)
    state, segments = make_state(PLAIN), make_segments(2)
    zeros = segments._replace(inputs_SBL=np.zeros_like(segments.inputs_SBL))
    row = segments._replace(inputs_SBL=np.array([[[0]], [[7]]]) + zeros.inputs_SBL)
    state.params["embedding"]["table"][7] = HUGE
    diagnosis.fetched(0, [bad(0), bad(0)], zeros)
    diagnosis.fetched(2, [bad(0), bad(1, REASONS[1])], row)
    diagnosis.fetched(4, [bad(0), bad(0)], zeros)
    with pytest.raises(BadNumbers, match=r"update 4 .* the output of embedding/embed"):
        diagnosis.raise_if_found(state)
