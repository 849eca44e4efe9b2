"""Models of Hugging Face's transfo-xl, imported.

A folder has config.json, model.safetensors or pytorch_model.bin, and a vocabulary.

Dims: N layers, H heads, A head, G clusters.
"""

import functools
import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import safetensors
import safetensors.numpy

from txl_jax.convert import pickle, pytorch
from txl_jax.convert.pytorch import Keys, State, arrays
from txl_jax.data.byte_ranges import reading
from txl_jax.errors import UserError, prefixed
from txl_jax.model import config as models
from txl_jax.model.config import ModelConfig
from txl_jax.model.modules import Params
from txl_jax.runtime.storage import DAMAGE

CONFIG = "config.json"
WEIGHTS = ("model.safetensors", "pytorch_model.bin")
PREFIX = "transformer."
UNTIED = ("r_w_bias", "r_r_bias")
# Values of fields that config.json may omit.
DEFAULTS: pytorch.Fields = {
    "cutoffs": [20_000, 40_000, 200_000],
    "mem_len": 1600,
    "clamp_len": 1000,
    "same_length": True,
    "pre_lnorm": False,
    "untie_r": True,
    "proj_share_all_but_first": True,
    "tie_word_embeddings": True,
    "layer_norm_epsilon": 1e-5,
    "dropout": 0.1,
    "dropatt": 0.0,
    "init_std": 0.02,
    "proj_init_std": 0.01,
}
OLD_NAMES = {"n_token": "vocab_size", "tie_weight": "tie_word_embeddings"}
SIZES = ("vocab_size", "n_layer", "d_model", "n_head", "d_head", "d_inner")


def from_pretrained(folder: str | Path) -> tuple[ModelConfig, Params]:
    """Returns the model of a folder, and its parameters."""
    folder = Path(folder)
    config, weights = folder / CONFIG, weight_file(folder)
    try:
        with reading(config):
            fields = json.loads(config.read_text("utf-8-sig"))
        with reading(weights), prefixed(folder):
            return from_state_dict(_read_weights(weights), fields)
    except (*DAMAGE, safetensors.SafetensorError) as error:
        raise UserError(
            f"{folder} is damaged, or is no model of transfo-xl: {error!r}"
        ) from error


def weight_file(folder: Path) -> Path:
    """Returns the file of the weights."""
    for name in WEIGHTS:
        if (folder / name).is_file():
            return folder / name
    raise UserError(f"{folder} has neither {' nor '.join(WEIGHTS)}")


def _read_weights(path: Path) -> State:
    if path.suffix == ".safetensors":
        return safetensors.numpy.load_file(path)
    return arrays(pickle.read_pickle(path), path)


def from_state_dict(
    state: Mapping[str, np.ndarray], config: pytorch.Fields
) -> tuple[ModelConfig, Params]:
    """Returns the model of a state dict and the fields of a config.json.

    Arrays that the fields tie are taken from the embedding, as in the library. Raises
    UserError for arrays that do not fit, and an error of DAMAGE for other fields.
    """
    stated = {OLD_NAMES.get(name, name): value for name, value in config.items()}
    fields = {**DEFAULTS, **stated}
    scales = ("layer_norm_epsilon", "init_std", "proj_init_std")
    numbers = {name: float(fields[name]) for name in scales}
    family = functools.partial(models.huggingface, **numbers)
    model, params = pytorch.from_fields(_rename(state, fields), fields, family)
    sizes = {name: getattr(model, name) for name in SIZES}
    sizes["d_embed"] = model.embed_size
    if model.cutoffs:
        sizes["div_val"] = model.div_val
    for name, size in sizes.items():
        if stated.get(name, size) != size:
            raise UserError(
                f"{CONFIG} has {name} = {stated[name]!r}, but the weights have {size}"
            )
    return model, params


def _rename(state: Mapping[str, np.ndarray], fields: pytorch.Fields) -> State:
    """Returns the state dict of the paper's code, without tied arrays."""
    renamed = {name.removeprefix(PREFIX): array for name, array in state.items()}
    for name in ("crit.cluster_weight", "crit.cluster_bias"):
        if name in renamed:
            renamed[name] = np.atleast_1d(renamed[name])[::-1]
    if fields["tie_word_embeddings"]:
        for name in filter(_is_out_table, list(renamed)):
            table = renamed.pop(name)
            renamed.setdefault(name.replace("crit.out", "word_emb.emb"), table)
    elif not any(map(_is_out_table, renamed)):
        raise _untied("crit.out_layers.0.weight")
    _drop_tied_projections(renamed, fields)
    layers = Keys(renamed).count("layers.{}.dec_attn.qkv_net.weight")
    for name in UNTIED:
        # A bias that all layers share may be stored once per layer.
        copies = (f"layers.{n}.dec_attn.{name}" for n in range(layers))
        biases = [renamed.pop(copy, None) for copy in copies]
        if fields["untie_r"] and biases and all(bias is not None for bias in biases):
            renamed[name] = np.stack([bias for bias in biases if bias is not None])
    return renamed


def _drop_tied_projections(state: State, fields: pytorch.Fields) -> None:
    clusters = len(fields["cutoffs"])
    ties = fields.get("tie_projs")
    if ties is None:
        ties = [False] + [fields["proj_share_all_but_first"]] * clusters
    for i in range(clusters + 1):
        name = f"crit.out_projs.{i}"
        if i < len(ties) and ties[i]:
            state.pop(name, None)
        elif "word_emb.emb_projs.0" in state and name not in state:
            raise _untied(name)


def _untied(name: str) -> UserError:
    return UserError(f"{CONFIG} does not tie {name}, which the weights lack")


def _is_out_table(name: str) -> bool:
    return name.startswith("crit.out_layers.") and name.endswith(".weight")
