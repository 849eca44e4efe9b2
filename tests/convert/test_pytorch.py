"""State dicts of the paper's code are converted both ways, or refused.

`tests.promises.test_published_models` tests the results of the converted models.
"""

import json
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
import pytest

from tests.convert import recorded
from tests.support import golden, tiny
from tests.support.refusal import refusal
from tests.support.tiny import assert_equal
from txl_jax.convert import huggingface, pytorch
from txl_jax.convert.pickle import read_pickle
from txl_jax.convert.pytorch import arrays
from txl_jax.model import config as models
from txl_jax.model.config import ModelConfig

State = dict[str, np.ndarray]


def load_case(name: str) -> dict[str, np.ndarray]:
    """Returns the arrays of a case of tests.support.golden."""
    with np.load(golden.FOLDER / f"{name}.npz") as saved:
        return dict(saved)


def parse_case(saved: Mapping[str, np.ndarray]) -> tuple[dict[str, Any], State]:
    """Returns the config fields and the state dict of a case, in float32."""
    state = {
        name.removeprefix("state/"): value.astype(np.float32)
        for name, value in saved.items()
        if name.startswith("state/")
    }
    return json.loads(str(saved["config"])), state


def case_of(saved: Mapping[str, np.ndarray]) -> tuple[ModelConfig, Any]:
    """Returns the model of a case."""
    fields, state = parse_case(saved)
    return huggingface.from_state_dict(state, fields)


def saved_case(name: str) -> tuple[dict[str, Any], State]:
    return parse_case(load_case(name))


def case(name: str) -> tuple[ModelConfig, Any]:
    return case_of(load_case(name))


@pytest.mark.parametrize("layout", ["module.stream", "module.zip", "stream", "zip"])
@pytest.mark.parametrize("name", recorded.PAPER)
def test_files_of_torch_are_read(name: str, layout: str) -> None:
    path = recorded.FOLDER / f"{name}.{layout}.pt"
    config, params = case(name)
    result, weights = pytorch.from_state_dict(
        arrays(read_pickle(path), path), mem_len=config.mem_len
    )
    assert_equal(weights, params)
    same = ("vocab_size", "n_layer", "d_model", "d_embed", "n_head", "d_head")
    also = ("d_inner", "cutoffs", "div_val", "tie_weights", "tie_projs", "mem_len")
    fields = {field: getattr(config, field) for field in (*same, *also)}
    assert result == models.pytorch(**fields)


def test_learned_distances_are_converted() -> None:
    """The reference code's Shaw variant has one table of distances for each layer."""
    draw = np.random.default_rng(0).random
    state = {
        name: array
        for name, array in recorded.paper_state("plain").items()
        if name != "r_r_bias" and "r_net" not in name
    }
    shapes = {"r_emb": (2, 7, 2, 5), "r_bias": (2, 7, 2), "r_w_bias": (2, 2, 5)}
    state |= {name: draw(shape, np.float32) for name, shape in shapes.items()}
    config, params = pytorch.from_state_dict(state, mem_len=4)
    assert (config.position, config.n_position) == ("shaw_biased", 7)
    expected = tiny.make_params(config)
    assert jax.tree.map(np.shape, params) == jax.tree.map(np.shape, expected)
    attention = params["layers"]["attention"]
    assert_equal(attention["distances"], state["r_emb"])
    assert_equal(attention["distance_bias"], state["r_bias"])
    assert_equal(params["u"], state["r_w_bias"])


# A name, whose array is removed or gets another shape, and a part of the error.
BROKEN = """
word_emb.emb_layers.0.weight           | 0.weight is missing: expected
word_emb.emb_layers.0.weight 3,        | 0.weight is float32 (3,): expected
word_emb.emb_layers.1.weight           | give 3 cutoffs
layers.1.dec_attn.qkv_net.weight       | missing: expected floats of shape (30, 12)
layers.1.x 2,                          | layers.1.x, of shape (2,), is not part
r_emb 2,4,2,5                          | r_bias is missing
"""


@pytest.mark.parametrize("row", BROKEN.strip().splitlines())
def test_a_state_dict_that_does_not_fit_is_refused(row: str) -> None:
    change, reason = row.split(" | ")
    name, _, shape = change.strip().partition(" ")
    state = recorded.paper_state("div_val_2_all_tied")
    if shape:
        state[name] = np.zeros([int(n) for n in shape.split(",") if n], np.float32)
    else:
        del state[name]
    assert reason in refusal(lambda: pytorch.from_state_dict(state, mem_len=2))


def test_many_widths_are_refused() -> None:
    widths = [100_000, *[1] * 5000]
    assert "no div_val gives" in refusal(pytorch._infer_div_val, widths)


@pytest.mark.parametrize(
    "name, cutoffs, reason",
    [
        ("clusters", (), "3 clusters"),
        ("clusters", (9, 17, 28), ""),
        ("div_val_2_all_tied", (), ""),
        ("div_val_2_all_tied", (9, 17, 29), "(9, 17, 29) differ from the tables' (9, "),
        ("plain", (9,), "0 clusters"),
    ],
)
def test_cutoffs_are_required_where_no_table_implies_them(
    name: str, cutoffs: tuple[int, ...], reason: str
) -> None:
    state = recorded.paper_state(name)
    # The case with clusters has a u and w for each layer.
    state |= dict.fromkeys(("r_w_bias", "r_r_bias"), np.zeros((2, 2, 5), np.float32))

    def convert() -> ModelConfig:
        return pytorch.from_state_dict(state, mem_len=2, cutoffs=cutoffs)[0]

    if reason:
        assert reason in refusal(convert)
    else:
        assert convert().cutoffs == (9, 17, 28)
