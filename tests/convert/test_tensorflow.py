"""The paper's TensorFlow models give the same results after conversion."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.convert import bundles
from tests.convert.golden_tensorflow import FOLDER, L, S
from tests.support import tiny
from tests.support.refusal import refused
from txl_jax.convert import bundle, tensorflow
from txl_jax.model.memory import Memory

CASES = sorted(path.stem for path in FOLDER.glob("*.npz") if path.stem != "kinds")
SAME = ("cutoffs", "div_val", "untie_r", "n_layer", "d_model", "n_head", "d_head")


@pytest.mark.parametrize("name", CASES)
def test_losses_and_memory_are_those_of_tensorflow(name: str) -> None:
    saved = np.load(FOLDER / f"{name}.npz")
    fields = json.loads(str(saved["config"]))
    config, params, step = tensorflow.read(
        FOLDER / name,
        mem_len=fields["mem_len"],
        clamp_len=max(fields["clamp_len"], 0),
        same_length=fields["same_length"],
    )
    result = json.loads(json.dumps(dataclasses.asdict(config)))
    assert {key: result[key] for key in SAME} == {key: fields[key] for key in SAME}
    assert config.vocab_size == fields["n_token"]
    assert step == (1 if name == "wt103_large" else 0)

    config = dataclasses.replace(config, dropout=0.0)
    tokens_BT = saved["tokens"]
    memory, losses = Memory.empty(config, len(tokens_BT)), []
    for begin in range(0, S * L, L):
        x_BL = tokens_BT[:, begin : begin + L]
        y_BL = tokens_BT[:, begin + 1 : begin + L + 1]
        nll_BL, memory = tiny.apply(config, params, x_BL, y_BL, memory, method="nll")
        losses.append(nll_BL.mean())
    tiny.assert_close(np.array(losses), saved["losses"])
    tiny.assert_close(memory.h_NBMD.swapaxes(1, 2), saved["memory"])


VARIABLES = bundle.read(FOLDER / "wt103_large")


def changed(folder: Path, **changes: Any) -> Path:
    """Writes the trained golden model with some variables changed, or None removed."""
    variables: dict[str, Any] = dict(VARIABLES)
    for name, value in changes.items():
        path = f"transformer/{name}" if name not in ("global_step", "x") else name
        variables[path] = value
    kept = {name: value for name, value in variables.items() if value is not None}
    bundles.write(folder / "ckpt", kept)
    return folder


def zeros(*shape: int) -> Any:
    return np.zeros(shape, np.float32)


REFUSED: list[tuple[str, Any, str]] = [
    ("layer_1/ff/layer_1/kernel", None, r"bias has shape \(2, 2, 3\), not \(1, 2, 3\)"),
    ("layer_1/rel_attn/r/kernel", None, "rel_attn/r/kernel, of .* is missing"),
    ("r_w_bias", None, "r_w_bias, of shape .* is missing"),
    ("adaptive_softmax/cutoff_2/b", None, "cutoff_2/b, .* is missing"),
    ("adaptive_softmax/cutoff_0/cluster_W", None, "softmax/bias, .* is missing"),
    ("adaptive_embed/cutoff_1/lookup_table", None, "1/lookup_table, .* is missing"),
    ("adaptive_embed/cutoff_2/proj_W", None, "proj_W, .* is missing"),
    ("r_r_bias", zeros(2, 3), r"r_r_bias has shape \(2, 3\), not \(2, 2, 3\)"),
    ("r_w_bias", zeros(3), r"r_w_bias has shape \(3,\), not \(H, A\)"),
    ("r_w_bias", zeros(2, 0, 3), r"r_w_bias has shape \(2, 0, 3\), not \(N, H, A\)"),
    ("layer_0/rel_attn/qkv/kernel", zeros(16, 12), r"\(16, 12\), not \(16, 18\)"),
    ("layer_0/ff/layer_1/kernel", zeros(8), r"layer_1/kernel has .*, not \(D, F\)"),
    ("adaptive_embed/cutoff_1/lookup_table", zeros(3, 4), r"\(3, 4\), not \(5, 4\)"),
    ("adaptive_embed/cutoff_2/lookup_table", zeros(12, 3), r"proj_W .* \(3, 16\)"),
    ("adaptive_softmax/cutoff_0/cluster_b", zeros(3), r"\(3,\), not \(2,\)"),
    ("layer_0/rel_attn/q/kernel", zeros(8, 6), r"\(8, 6\), is not part of the model"),
    ("x", zeros(3), r"x, of shape \(3,\), is not part of the model"),
    ("global_step", np.arange(2), r"global_step has shape \(2,\), not \(\)"),
]


@pytest.mark.parametrize(("name", "value", "match"), REFUSED)
def test_variables_that_do_not_fit_are_refused(
    tmp_path: Path, name: str, value: Any, match: str
) -> None:
    with refused(match):
        tensorflow.read(changed(tmp_path, **{name: value}), mem_len=4)


def test_another_programs_checkpoint_is_refused() -> None:
    with refused("kinds/model.ckpt-7: "):
        tensorflow.read(FOLDER / "kinds", mem_len=4)


def test_widths_that_no_div_val_gives_are_refused(tmp_path: Path) -> None:
    scope = "adaptive_embed/cutoff_2"
    changes = {f"{scope}/lookup_table": zeros(12, 3), f"{scope}/proj_W": zeros(3, 16)}
    with refused(r"no div_val gives .* widths \[16, 4, 3\]"):
        tensorflow.read(changed(tmp_path, **changes), mem_len=4)


def test_half_precision_is_read_as_float32_and_the_step_in_full(tmp_path: Path) -> None:
    half = np.arange(10).astype("bfloat16")
    changes = {"layer_1/ff/layer_1/bias": half, "global_step": np.int64(2**33 + 1)}
    _, params, step = tensorflow.read(changed(tmp_path, **changes), mem_len=4)
    bias_NF = params["layers"]["feed_forward"]["in"]["bias"]
    assert bias_NF.dtype == np.float32
    np.testing.assert_array_equal(bias_NF[1], np.arange(10))
    assert step == 2**33 + 1
