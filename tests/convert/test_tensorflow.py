"""The paper's TensorFlow models, read, are the same models with the same results."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from tests.convert import bundles
from tests.convert.golden_tensorflow import FOLDER, L, S
from tests.support import tiny
from tests.support.refusal import refused
from txl_jax.convert import tensorflow
from txl_jax.model import config as models
from txl_jax.model.config import ModelConfig
from txl_jax.model.memory import Memory

CASES = sorted(path.stem for path in FOLDER.glob("*.npz") if path.stem != "kinds")
SAME = ("cutoffs", "div_val", "untie_r", "n_layer", "d_model", "n_head", "d_head")
SIZES: dict[str, Any] = {
    "vocab_size": tiny.V,
    "n_layer": tiny.N,
    "d_model": tiny.D,
    "n_head": tiny.H,
    "d_head": tiny.A,
    "d_inner": tiny.F,
}
CLUSTERS: dict[str, Any] = {"cutoffs": (3, 7), "untie_r": True}
TREES: dict[str, dict[str, Any]] = {
    "characters": {},
    "words": CLUSTERS,
    "first own": {**CLUSTERS, "div_val": 2, "tie_projs": (False, True, True)},
    "none tied": {**CLUSTERS, "div_val": 2, "proj_same_dim": False},
    "all tied": {**CLUSTERS, "div_val": 3, "d_embed": 9, "tie_projs": (True,) * 3},
    "wide": {**CLUSTERS, "div_val": 2, "d_embed": 16, "proj_same_dim": False},
    "narrow": {"d_embed": 6, "tie_projs": (True,)},
    "narrow clusters": {**CLUSTERS, "d_embed": 6, "tie_projs": (True, False, True)},
}


@pytest.mark.parametrize("name", CASES)
def test_computes_what_tensorflow_does(name: str) -> None:
    saved = np.load(FOLDER / f"{name}.npz")
    given = json.loads(str(saved["config"]))
    config, params, step = tensorflow.read(
        FOLDER / name,
        mem_len=given["mem_len"],
        clamp_len=max(given["clamp_len"], 0),
        same_length=given["same_length"],
    )
    result = json.loads(json.dumps(dataclasses.asdict(config)))
    assert {key: result[key] for key in SAME} == {key: given[key] for key in SAME}
    assert config.vocab_size == given["n_token"]
    assert step == (1 if name == "wt103_large" else 0)

    still = dataclasses.replace(config, dropout=0.0)
    tokens_BT = saved["tokens"]
    memory, losses = Memory.empty(still, len(tokens_BT)), []
    for begin in range(0, S * L, L):
        x_BL = tokens_BT[:, begin : begin + L]
        y_BL = tokens_BT[:, begin + 1 : begin + L + 1]
        nll_BL, memory = tiny.apply(still, params, x_BL, y_BL, memory, method="nll")
        losses.append(nll_BL.mean())
    tiny.assert_close(np.array(losses), saved["losses"])
    tiny.assert_close(memory.h_NBMD.swapaxes(1, 2), saved["memory"])


PLACES = {
    "table": "adaptive_embed/{}lookup_table",
    "proj": "adaptive_embed/{}proj_W",
    "out_proj": "adaptive_softmax/{}proj",
    "cluster_table": "adaptive_softmax/cutoff_0/cluster_W",
    "cluster_bias": "adaptive_softmax/cutoff_0/cluster_b",
}


def vocabulary_of(config: ModelConfig, embedding: Any) -> dict[str, Any]:
    """Returns the variables of the two ends of the vocabulary."""
    made = {}
    for name, value in embedding.items():
        kind, _, number = name.rpartition("_")
        if name in PLACES:
            made[PLACES[name].format("")] = value
        elif number.isdigit():
            made[PLACES[kind].format(f"cutoff_{number}/")] = value
    bias = embedding["bias"]
    if not config.cutoffs:
        return made | {"adaptive_softmax/bias": bias}
    for i, part in enumerate(np.split(bias, config.cutoffs)):
        made[f"adaptive_softmax/cutoff_{i}/b"] = part
    return made


def layer_of(config: ModelConfig, layers: Any, n: int) -> dict[str, Any]:
    """Returns the variables of a layer."""
    made = {}
    D = config.d_model
    for scope, part in (("rel_attn", "attention"), ("ff", "feed_forward")):
        norm = layers[part]["norm"]
        made[f"{scope}/LayerNorm/gamma"] = norm["scale"][n]
        made[f"{scope}/LayerNorm/beta"] = norm["bias"][n]
    heads = {name: layers["attention"][name][n] for name in "qkvro"}
    flat = [heads[name].reshape(-1, D).T for name in "qkv"]
    made["rel_attn/qkv/kernel"] = np.concatenate(flat, axis=1)
    made["rel_attn/r/kernel"] = heads["r"].reshape(-1, D).T
    made["rel_attn/o/kernel"] = heads["o"].reshape(-1, D)
    for name, ours in (("layer_1", "in"), ("layer_2", "out")):
        for kind in ("kernel", "bias"):
            made[f"ff/{name}/{kind}"] = layers["feed_forward"][ours][kind][n]
    return {f"layer_{n}/{name}": value for name, value in made.items()}


def variables_of(config: ModelConfig, params: Any) -> dict[str, Any]:
    """Returns our parameters as the paper's TensorFlow code names and shapes them."""
    made = {"r_w_bias": params["u"], "r_r_bias": params["w"]}
    made |= vocabulary_of(config, params["embedding"])
    for n in range(config.n_layer):
        made |= layer_of(config, params["layers"], n)
    return {f"transformer/{name}": value for name, value in made.items()}


@pytest.mark.parametrize("name", TREES)
def test_every_parameter_lands_in_its_place(tmp_path: Path, name: str) -> None:
    given: dict[str, Any] = {"mem_len": 9, "clamp_len": 4, "same_length": True}
    config = models.tensorflow(**SIZES, **given, **TREES[name])
    params = tiny.make_params(config)
    variables = variables_of(config, params)
    slots = {f"{n}{s}": x for n, x in variables.items() for s in ("/Adam", "/Adam_1")}
    powers = {"beta1_power": np.float32(0.5), "beta2_power": np.float32(0.5)}
    steps = {"global_step": np.int64(2**33)}
    bundles.write(tmp_path / "ckpt", variables | slots | powers | steps, shards=2)
    result = tensorflow.read(tmp_path, **given)
    assert result[0] == config
    assert result[2] == 2**33
    tiny.assert_equal(result[1], params)
    assert all(leaf.dtype == np.float32 for leaf in jax.tree.leaves(result[1]))


def write(folder: Path, **changes: Any) -> dict[str, Any]:
    """Writes a model with some variables changed, those that are None left out."""
    config = models.tensorflow(**{**SIZES, "n_layer": 3, **TREES["first own"]})
    variables = variables_of(config, tiny.make_params(config))
    for name, value in changes.items():
        path = f"transformer/{name}" if name not in ("global_step", "x") else name
        variables[path] = value
    kept = {name: value for name, value in variables.items() if value is not None}
    bundles.write(folder / "ckpt", kept)
    return kept


def zeros(*shape: int) -> Any:
    """Returns an array of a shape."""
    return np.zeros(shape, np.float32)


REFUSED: list[tuple[str, Any, str]] = [
    ("layer_1/ff/layer_1/kernel", None, r"bias has shape \(3, 2, 3\), not \(1, 2, 3\)"),
    ("layer_2/rel_attn/r/kernel", None, "rel_attn/r/kernel, of .* is missing"),
    ("r_w_bias", None, "r_w_bias, of shape .* is missing"),
    ("adaptive_softmax/cutoff_1/b", None, "cutoff_1/b, .* is missing"),
    ("adaptive_softmax/cutoff_2/b", None, "cutoff_2/b, .* is missing"),
    ("adaptive_softmax/cutoff_0/cluster_W", None, "softmax/bias, .* is missing"),
    ("adaptive_embed/cutoff_1/lookup_table", None, "1/lookup_table, .* is missing"),
    ("adaptive_embed/cutoff_2/proj_W", None, "proj_W, .* is missing"),
    ("r_r_bias", zeros(2, 3), r"r_r_bias has shape \(2, 3\), not \(3, 2, 3\)"),
    ("r_w_bias", zeros(3), r"r_w_bias has shape \(3,\), not \(H, A\)"),
    ("r_w_bias", zeros(3, 0, 3), r"r_w_bias has shape \(3, 0, 3\), not \(N, H, A\)"),
    ("layer_0/rel_attn/qkv/kernel", zeros(8, 12), r"\(8, 12\), not \(8, 18\)"),
    ("layer_0/ff/layer_1/kernel", zeros(8), r"layer_1/kernel has .*, not \(D, F\)"),
    ("adaptive_embed/cutoff_1/lookup_table", zeros(3, 4), r"\(3, 4\), not \(4, 4\)"),
    (
        "adaptive_embed/cutoff_2/lookup_table",
        zeros(5, 3),
        r"proj_W has .* \(3, 8\)",
    ),
    ("adaptive_softmax/cutoff_0/cluster_b", zeros(3), r"\(3,\), not \(2,\)"),
    (
        "layer_0/rel_attn/q/kernel",
        zeros(8, 6),
        r"q/kernel, of shape \(8, 6\), is not pa",
    ),
    ("adaptive_softmax/bias", zeros(12), "adaptive_softmax/bias, of shape .* not part"),
    ("gone/Adam", zeros(3), "transformer/gone/Adam, of shape .* is not part of the"),
    ("x", zeros(3), r"x, of shape \(3,\), is not part of the model"),
    ("global_step", np.arange(2), r"global_step has shape \(2,\), not \(\)"),
]


@pytest.mark.parametrize(("name", "value", "match"), REFUSED)
def test_refuses_what_does_not_fit(
    tmp_path: Path, name: str, value: Any, match: str
) -> None:
    write(tmp_path, **{name: value})
    with refused(match):
        tensorflow.read(tmp_path, mem_len=4)


def test_refuses_another_programs_checkpoint() -> None:
    with refused("kinds/model.ckpt-7: transformer/.* is missing"):
        tensorflow.read(FOLDER / "kinds", mem_len=4)


def test_refuses_widths_that_no_div_val_makes(tmp_path: Path) -> None:
    scope = "adaptive_embed/cutoff_2"
    changes = {f"{scope}/lookup_table": zeros(5, 3), f"{scope}/proj_W": zeros(3, 8)}
    write(tmp_path, **changes)
    with refused(r"no div_val gives the widths \[8, 4, 3\]"):
        tensorflow.read(tmp_path, mem_len=4)


def test_reads_half_precision_as_float32(tmp_path: Path) -> None:
    half = np.arange(tiny.F).astype("bfloat16")
    write(tmp_path, **{"layer_1/ff/layer_1/bias": half})
    _, params, _ = tensorflow.read(tmp_path, mem_len=4)
    bias_NF = params["layers"]["feed_forward"]["in"]["bias"]
    assert bias_NF.dtype == np.float32
    np.testing.assert_array_equal(bias_NF[1], np.arange(tiny.F))
