"""Checkpoints of NVIDIA's PyTorch code: weights, configuration and vocabulary."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from txl_jax.convert import keys, pickle, pytorch
from txl_jax.errors import UserError
from txl_jax.model import config as models
from txl_jax.model.config import ModelConfig

BEST = "checkpoint_best.pt"
RENAMED = {
    "crit.out_layers_biases.{}": "crit.out_layers.{}.bias",
    "crit.out_layers_weights.{}": "crit.out_layers.{}.weight",
}
SHARED = "crit.shared_out_projs."  # duplicates of the embedding's


class Checkpoint(NamedTuple):
    """The content of a file; the vocabulary is a value of `pickle.read`."""

    model: ModelConfig
    params: pytorch.Params
    vocab: Any
    step: int


def read(path: Path) -> Checkpoint:
    """Reads a checkpoint, or the best one of a folder; raises UserError."""
    path = path / BEST if path.is_dir() else path
    saved = pickle.read(path)
    if not isinstance(saved, dict) or not isinstance(saved.get("model_state"), dict):
        raise UserError(f"{path} is not a checkpoint of NVIDIA's code: no model_state")
    fields = saved.get("model_config")
    if not isinstance(fields, dict):
        raise UserError(f"{path} is not a checkpoint of NVIDIA's code: no model_config")
    state = keys.arrays(saved["model_state"], path)
    try:
        model, params = _model(state, fields)
    except UserError as error:
        raise UserError(f"{path}: {error}") from error
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"{path}: its model_config is incomplete: {error}") from error
    step = saved.get("train_step")
    return Checkpoint(
        model, params, saved.get("vocab"), step if type(step) is int else 0
    )


def _model(
    state: Mapping[str, np.ndarray], fields: Mapping[str, Any]
) -> tuple[ModelConfig, pytorch.Params]:
    model, params = pytorch.from_state_dict(
        _rename(state),
        mem_len=int(fields["mem_len"]),
        cutoffs=[int(cutoff) for cutoff in fields["cutoffs"]],
        clamp_len=max(int(fields["clamp_len"]), 0),
        same_length=bool(fields["same_length"]),
        pre_lnorm=bool(fields["pre_lnorm"]),
    )
    for name in ("n_layer", "n_head", "d_head", "d_model", "d_inner"):
        if fields.get(name) not in (None, size := getattr(model, name)):
            raise UserError(
                f"model_config has {name} = {fields[name]!r}, the weights have {size}"
            )
    family = models.nvidia()
    model = dataclasses.replace(
        model,
        same_length_self=family.same_length_self,
        dropout=float(fields.get("dropout", model.dropout)),
        dropatt=float(fields.get("dropatt", model.dropatt)),
    )
    return model, params


def _rename(state: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Returns the state dict with the names of the paper's code."""
    renamed = {}
    for name, array in state.items():
        name = name.removeprefix("module.")
        if name.startswith(SHARED):
            continue
        for theirs, paper in RENAMED.items():
            start = theirs.removesuffix("{}")
            if name.startswith(start):
                name = paper.format(name.removeprefix(start))
        renamed[name] = array
    return renamed
