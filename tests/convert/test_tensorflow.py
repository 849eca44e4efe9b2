"""The paper's TensorFlow models give the same results after conversion.

Each case in tests/convert/tensorflow_checkpoints is a folder with a checkpoint of the
paper's published code, all of whose variables are random, and an .npz with the config,
the tokens, the nll of each segment and the last memory. The program that made them with
tensorflow-cpu 2.21.0 is tests/convert/golden_tensorflow.py of revision ffbf60d.

Dims: B streams, S segments, L segment, T = S L + 1 tokens, M memory, D model.
"""

import dataclasses
import json
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import numpy as np
import pytest

from tests import reference
from tests.support import tiny
from tests.support.refusal import refused
from txl_jax.convert import tensorflow
from txl_jax.update.state import abstract_params

FOLDER = Path(__file__).with_name("tensorflow_checkpoints")
B, S, L = 2, 4, 5
CASES = sorted(path.stem for path in FOLDER.glob("*.npz") if path.stem != "kinds")
SAME = ("cutoffs", "div_val", "untie_r", "n_layer", "d_model", "n_head", "d_head")


@pytest.mark.parametrize("name", CASES)
def test_losses_and_memory_match_tensorflow(name: str) -> None:
    """The oracle computes them; `tests.model.test_txl` compares it with the model."""
    saved = np.load(FOLDER / f"{name}.npz")
    fields = json.loads(str(saved["config"]))
    config, params, step = tensorflow.read_checkpoint(
        FOLDER / name,
        mem_len=fields["mem_len"],
        clamp_len=max(fields["clamp_len"], 0),
        same_length=fields["same_length"],
    )
    result = json.loads(json.dumps(dataclasses.asdict(config)))
    assert {key: result[key] for key in SAME} == {key: fields[key] for key in SAME}
    assert config.vocab_size == fields["n_token"]
    assert config.initial_memory == "zeros"
    assert step == (1 if name == "wt103_large" else 0)
    shapes = nn.unbox(abstract_params(config))
    assert jax.tree.map(np.shape, params) == jax.tree.map(np.shape, shapes)

    tokens_BT, M = saved["tokens"], config.mem_len
    memory, losses = reference.zeros(config.n_layer, B, config.d_model, M), []
    for begin in range(0, S * L, L):
        x_BL = tokens_BT[:, begin : begin + L]
        y_BL = tokens_BT[:, begin + 1 : begin + L + 1]
        settings = tiny.reference_settings(config)
        nll_BL, memory = reference.nll(params, x_BL, y_BL, memory, **settings)
        losses.append(nll_BL.mean())
    tiny.assert_close(np.array(losses), saved["losses"])
    h_NBMD, _ = reference.padded(memory, M)
    tiny.assert_close(h_NBMD.swapaxes(1, 2), saved["memory"])


VARIABLES = tensorflow.read_variables(FOLDER / "wt103_large")


def read_changed(monkeypatch: pytest.MonkeyPatch, **changes: Any) -> Any:
    """Reads the trained golden model with some variables changed, or None removed."""
    variables: dict[str, Any] = dict(VARIABLES)
    for name, value in changes.items():
        path = f"transformer/{name}" if name not in ("global_step", "x") else name
        variables[path] = value
    kept = {name: value for name, value in variables.items() if value is not None}

    def read(source: Any, omit: tuple[str, ...]) -> dict[str, Any]:
        return {name: value for name, value in kept.items() if not name.endswith(omit)}

    monkeypatch.setattr(tensorflow, "read_variables", read)
    return tensorflow.read_checkpoint(FOLDER / "wt103_large", mem_len=4)


def zeros(*shape: int) -> Any:
    return np.zeros(shape, np.float32)


EMBED = "adaptive_embed/cutoff_2"
# Kernels and projections are transposed in the messages.
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"r_w_bias": None}, "transformer/r_w_bias is missing"),
    ({"r_w_bias": zeros(2, 0, 3)}, r"r_w_bias is float32 \(2, 0, 3\): expected .*H, A"),
    ({f"{EMBED}/lookup_table": zeros(12, 3)}, r"proj_W .* \(16, 3\)"),
    (
        {f"{EMBED}/lookup_table": zeros(12, 3), f"{EMBED}/proj_W": zeros(3, 16)},
        r"no div_val gives .* widths \[16, 4, 3\]",
    ),
    (
        {"adaptive_softmax/cutoff_0/cluster_b": zeros()},
        r"float32 \(\): exp.*\(2,\)",
    ),
    ({"x": zeros(3)}, r"x, of shape \(3,\), is not part of the model"),
    ({"global_step": zeros(1)}, "global_step is no whole number"),
]


@pytest.mark.parametrize(("changes", "match"), REFUSED)
def test_variables_that_do_not_fit_are_refused(
    monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], match: str
) -> None:
    with refused(match):
        read_changed(monkeypatch, **changes)


def test_half_precision_is_read_as_float32_and_the_step_in_full(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    half = np.arange(10).astype("bfloat16")
    changes = {"layer_1/ff/layer_1/bias": half, "global_step": np.int64(2**33 + 1)}
    _, params, step = read_changed(monkeypatch, **changes)
    bias_NF = params["layers"]["feed_forward"]["in"]["bias"]
    assert bias_NF.dtype == np.float32
    np.testing.assert_array_equal(bias_NF[1], np.arange(10))
    assert step == 2**33 + 1
