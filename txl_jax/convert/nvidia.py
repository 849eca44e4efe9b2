"""Checkpoints of NVIDIA's PyTorch code: weights, configuration and vocabulary."""

import re
from pathlib import Path
from typing import Any

from txl_jax.convert import keys, pickle, pytorch
from txl_jax.errors import UserError
from txl_jax.model import config as models
from txl_jax.model.config import ModelConfig

BEST = "checkpoint_best.pt"
SHARED = "crit.shared_out_projs."  # duplicates of the embedding's


def read(path: Path) -> tuple[ModelConfig, pytorch.Params, Any, int]:
    """Returns a checkpoint's model, parameters, vocabulary and step or 0.

    The vocabulary is a value of `pickle.read`. Raises UserError for another file.
    """
    saved = pickle.read(path)
    for name in ("model_state", "model_config"):
        if not isinstance(saved, dict) or not isinstance(saved.get(name), dict):
            raise UserError(f"{path} is not a checkpoint of NVIDIA's code: no {name}")
    state = keys.arrays(saved["model_state"], path)
    try:
        renamed = {
            # The names of the paper's code.
            re.sub(r"_(bias|weight)e?s(\.\d+)$", r"\2.\1", name): array
            for name, array in state.items()
            if not name.removeprefix("module.").startswith(SHARED)
        }
        fields = saved["model_config"]
        model, params = pytorch.from_fields(renamed, fields, models.nvidia)
    except UserError as error:
        raise UserError(f"{path}: {error}") from error
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"{path}: its model_config is incomplete: {error}") from error
    step = saved.get("train_step")
    return model, params, saved.get("vocab"), step if type(step) is int else 0
