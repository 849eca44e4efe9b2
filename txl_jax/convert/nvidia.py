"""Checkpoints of NVIDIA's PyTorch code: a file with the weights and what they are."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from txl_jax.convert import pickle, pytorch
from txl_jax.errors import UserError
from txl_jax.model import config as models
from txl_jax.model.config import ModelConfig

BEST = "checkpoint_best.pt"
RENAMED = {
    "crit.out_layers_biases.{}": "crit.out_layers.{}.bias",
    "crit.out_layers_weights.{}": "crit.out_layers.{}.weight",
}
SHARED = "crit.shared_out_projs."  # the embedding's, a second time


class Checkpoint(NamedTuple):
    """What a file holds; the vocabulary is as `pickle.read` gives it."""

    model: ModelConfig
    params: pytorch.Params
    vocab: Any
    step: int


def read(path: Path) -> Checkpoint:
    """Reads a checkpoint, or the best one of a folder; raises UserError."""
    path = path / BEST if path.is_dir() else path
    saved = pickle.read(path)
    if not isinstance(saved, dict) or not isinstance(saved.get("model_state"), dict):
        raise UserError(f"{path} is no checkpoint of NVIDIA's code: no model_state")
    said = saved.get("model_config")
    if not isinstance(said, dict):
        raise UserError(f"{path} is no checkpoint of NVIDIA's code: no model_config")
    try:
        model, params = _model(pickle.arrays(saved["model_state"], path), said)
    except UserError as error:
        raise UserError(f"{path}: {error}") from error
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"{path}: its model_config is incomplete: {error}") from error
    step = saved.get("train_step")
    return Checkpoint(
        model, params, saved.get("vocab"), step if type(step) is int else 0
    )


def _model(
    state: Mapping[str, np.ndarray], said: Mapping[str, Any]
) -> tuple[ModelConfig, pytorch.Params]:
    model, params = pytorch.from_state_dict(
        _rename(state),
        mem_len=int(said["mem_len"]),
        cutoffs=[int(cutoff) for cutoff in said["cutoffs"]],
        clamp_len=max(int(said["clamp_len"]), 0),
        same_length=bool(said["same_length"]),
        pre_lnorm=bool(said["pre_lnorm"]),
    )
    for name in ("n_layer", "n_head", "d_head", "d_model", "d_inner"):
        if said.get(name) not in (None, size := getattr(model, name)):
            raise UserError(
                f"model_config says {name} = {said[name]!r}, the weights have {size}"
            )
    family = models.nvidia()
    model = dataclasses.replace(
        model,
        same_length_self=family.same_length_self,
        dropout=float(said.get("dropout", model.dropout)),
        dropatt=float(said.get("dropatt", model.dropatt)),
    )
    return model, params


def _rename(state: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Returns the state dict as the paper's code has it."""
    made = {}
    for name, array in state.items():
        name = name.removeprefix("module.")
        if name.startswith(SHARED):
            continue
        for theirs, paper in RENAMED.items():
            start = theirs.removesuffix("{}")
            if name.startswith(start):
                name = paper.format(name.removeprefix(start))
        made[name] = array
    return made
