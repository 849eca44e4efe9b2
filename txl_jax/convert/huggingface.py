"""Models of Hugging Face's port, transfo-xl: read, and written for others to read.

A folder has config.json, model.safetensors or pytorch_model.bin, and a vocabulary.

Dims: N layers, H heads, A head, G clusters.
"""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
import safetensors.numpy

from txl_jax.convert import pickle, pytorch
from txl_jax.convert.keys import Keys
from txl_jax.data import vocab as vocabulary
from txl_jax.data.vocab import Vocab
from txl_jax.data.word import WordVocab
from txl_jax.errors import UserError
from txl_jax.model import config as models
from txl_jax.model.config import ModelConfig
from txl_jax.seal import DAMAGE

CONFIG = "config.json"
WEIGHTS = ("model.safetensors", "pytorch_model.bin")
PREFIX = "transformer."
UNTIED = ("r_w_bias", "r_r_bias")
# What a config.json that leaves a field out means.
DEFAULTS: dict[str, Any] = {
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
    "init": "normal",
    "init_range": 0.01,
    "init_std": 0.02,
    "proj_init_std": 0.01,
    "attn_type": 0,
    "sample_softmax": -1,
}
ALSO = {"n_token": "vocab_size", "tie_weight": "tie_word_embeddings"}  # older names
SIZES = ("vocab_size", "n_layer", "d_model", "n_head", "d_head", "d_inner")


def from_pretrained(folder: str | Path) -> tuple[ModelConfig, pytorch.Params]:
    """Returns the model of a folder, and its parameters; raises UserError."""
    folder = Path(folder)
    path = folder / CONFIG
    try:
        config = json.loads(path.read_text("utf-8"))
        if not isinstance(config, dict):
            raise ValueError("it holds no fields")
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error
    except DAMAGE as error:
        raise UserError(f"{path} is no JSON: {error}") from error
    state: dict[str, np.ndarray] = {}
    for file in weight_files(folder):
        state |= _read_weights(file)
    try:
        return from_state_dict(state, config)
    except UserError as error:
        raise UserError(f"{folder}: {error}") from error


def weight_files(folder: Path) -> list[Path]:
    """Returns the files of the weights: one, or the parts that an index names."""
    for name in WEIGHTS:
        if (folder / name).is_file():
            return [folder / name]
        index = folder / f"{name}.index.json"
        if index.is_file():
            try:
                parts = set(json.loads(index.read_text("utf-8"))["weight_map"].values())
                return sorted(folder / Path(part).name for part in parts)
            except (*DAMAGE, OSError) as error:
                raise UserError(f"{index} is no index of weights: {error}") from error
    raise UserError(f"{folder} has neither {' nor '.join(WEIGHTS)}")


def _read_weights(path: Path) -> dict[str, np.ndarray]:
    if path.suffix != ".safetensors":
        return pickle.arrays(pickle.read(path), path)
    try:
        path.open("rb").close()  # for whose errors the library has no words
        return safetensors.numpy.load_file(path)
    except FileNotFoundError:
        raise UserError(f"no file {str(path)!r}") from None
    except PermissionError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error
    except (OSError, safetensors.SafetensorError, KeyError, TypeError) as error:
        raise UserError(f"{path} is damaged or cut: {error}") from error


def from_state_dict(
    state: Mapping[str, np.ndarray], config: Mapping[str, Any]
) -> tuple[ModelConfig, pytorch.Params]:
    """Returns the model of a state dict and a config.json's fields.

    What the config says is tied is the embedding's, as the port makes it on loading.
    """
    said = {ALSO.get(name, name): value for name, value in config.items()}
    _refuse_unknown(said)
    fields = DEFAULTS | said
    try:
        cutoffs = [int(cutoff) for cutoff in fields["cutoffs"]]
        model, params = pytorch.from_state_dict(
            _rename(state, fields, cutoffs),
            mem_len=max(int(fields["mem_len"]), 0),
            cutoffs=cutoffs,
            clamp_len=max(int(fields["clamp_len"]), 0),
            same_length=bool(fields["same_length"]),
            pre_lnorm=bool(fields["pre_lnorm"]),
        )
        uniform = fields["init"] == "uniform"
        std = float(fields["init_std"])
        model = dataclasses.replace(
            model,
            initial_memory=models.huggingface().initial_memory,
            layer_norm_epsilon=float(fields["layer_norm_epsilon"]),
            dropout=float(fields["dropout"]),
            dropatt=float(fields["dropatt"]),
            init_std=std,
            norm_init_std=std,
            cluster_init_std=std,
            init_range=float(fields["init_range"]) if uniform else 0.0,
            proj_init_std=float(fields["proj_init_std"]),
        )
    except DAMAGE as error:
        raise UserError(f"a field of {CONFIG} is of a wrong type: {error}") from error
    _compare(said, model)
    return model, params


def _refuse_unknown(said: dict[str, Any]) -> None:
    kind = said.get("model_type", "transfo-xl")
    if kind != "transfo-xl":
        raise UserError(f"{CONFIG} is of a model of type {kind!r}, not 'transfo-xl'")
    for name, known in (("attn_type", (0,)), ("sample_softmax", (-1, 0))):
        if said.get(name, known[0]) not in known:
            raise UserError(
                f"{CONFIG} says {name} = {said[name]!r}: only {known[0]} can be read"
            )


def _compare(said: Mapping[str, Any], model: ModelConfig) -> None:
    """Raises UserError where the config and the weights' shapes differ."""
    seen: dict[str, Any] = {name: getattr(model, name) for name in SIZES}
    seen["d_embed"] = model.embed_size
    if model.cutoffs:
        seen["div_val"] = model.div_val
    for name, size in seen.items():
        if said.get(name, size) != size:
            raise UserError(
                f"{CONFIG} says {name} = {said[name]!r}, but the weights have {size}"
            )


def _rename(
    state: Mapping[str, np.ndarray], fields: Mapping[str, Any], cutoffs: list[int]
) -> dict[str, np.ndarray]:
    """Returns the state dict as the paper's code has it, without what is tied."""
    made = {name.removeprefix(PREFIX): array for name, array in state.items()}
    for name in ("crit.cluster_weight", "crit.cluster_bias"):
        if name in made:
            made[name] = made[name][::-1]
    if fields["tie_word_embeddings"]:
        for name in filter(_is_out_table, list(made)):
            table = made.pop(name)
            made.setdefault(name.replace("crit.out", "word_emb.emb"), table)
    elif not any(map(_is_out_table, made)):
        raise UserError(f"{CONFIG} ties no tables, but the weights have one set")
    _drop_tied_projections(made, fields, len(cutoffs))
    layers = Keys(made).count("layers.{}.dec_attn.qkv_net.weight")
    for name in UNTIED:
        # One for all layers may be there under each layer's name as well.
        own = [made.pop(f"layers.{n}.dec_attn.{name}", None) for n in range(layers)]
        if fields["untie_r"] and own and all(array is not None for array in own):
            made[name] = np.stack([array for array in own if array is not None])
    return made


def _drop_tied_projections(
    state: dict[str, np.ndarray], fields: Mapping[str, Any], clusters: int
) -> None:
    ties = fields.get("tie_projs")
    if ties is None:
        ties = [False] + [fields["proj_share_all_but_first"]] * clusters
    for i in range(clusters + 1):
        name = f"crit.out_projs.{i}"
        if i < len(ties) and ties[i]:
            state.pop(name, None)
        elif "word_emb.emb_projs.0" in state and name not in state:
            raise UserError(f"{CONFIG} does not tie {name}, which the weights lack")


def _is_out_table(name: str) -> bool:
    return name.startswith("crit.out_layers.") and name.endswith(".weight")


def save_pretrained(
    config: ModelConfig, params: pytorch.Params, vocab: Vocab, folder: Path
) -> list[str]:
    """Writes a folder that the port's from_pretrained reads.

    vocab.json is the vocabulary as it is here, and vocab.txt its words. Returns what
    the port will do otherwise than this model, as sentences; raises UserError for
    positions that the port does not have.
    """
    if config.position != "transformer_xl":
        raise UserError(
            f'model.position = "{config.position}" is not in Hugging Face\'s port, '
            "which has transformer_xl alone"
        )
    state = _rename_back(config, pytorch.to_state_dict(config, params))
    fields = _describe(config, vocab)
    folder.mkdir(parents=True, exist_ok=True)
    safetensors.numpy.save_file(state, folder / WEIGHTS[0], {"format": "pt"})
    vocabulary.save(vocab, folder / "vocab.json")
    if isinstance(vocab, WordVocab):
        words = "".join(f"{word}\n" for word in vocab.words)
        (folder / "vocab.txt").write_text(words, "utf-8")
    (folder / CONFIG).write_text(json.dumps(fields, indent=2) + "\n", "utf-8")
    return _differences(config)


def _differences(config: ModelConfig) -> list[str]:
    found = []
    if config.initial_memory == "empty" and config.mem_len:
        found.append(
            "it begins with a memory of zeros that tokens see, not an empty one, so "
            f"the first {config.mem_len} tokens of a text get other probabilities"
        )
    if config.variational or config.word_dropout:
        found.append("it trains without model.variational and model.word_dropout")
    return found


def _describe(config: ModelConfig, vocab: Vocab) -> dict[str, Any]:
    """Returns the fields of config.json."""
    same = ("d_model", "n_head", "d_head", "d_inner", "n_layer", "vocab_size")
    also = ("div_val", "same_length", "pre_lnorm", "untie_r", "dropout", "dropatt")
    std = ("init_std", "proj_init_std", "layer_norm_epsilon")
    ties = list(config.tie_projs) or [False] * (len(config.cutoffs) + 1)
    # The port shows mem_len keys in all where this model may show one more.
    more = int(config.same_length and config.same_length_self)
    ends = vocab.encode("\n").tolist() if isinstance(vocab, WordVocab) else [None]
    return {
        "model_type": "transfo-xl",
        "architectures": ["TransfoXLLMHeadModel"],
        **{name: getattr(config, name) for name in (*same, *also, *std)},
        "d_embed": config.embed_size,
        "cutoffs": list(config.cutoffs),
        "mem_len": config.mem_len + more,
        "clamp_len": config.clamp_len or -1,
        "tie_word_embeddings": config.tie_weights,
        "tie_projs": ties,
        "proj_share_all_but_first": ties == [False] + [True] * len(config.cutoffs),
        "init": "uniform" if config.init_range else "normal",
        "init_range": config.init_range or DEFAULTS["init_range"],
        "adaptive": True,
        "attn_type": 0,
        "sample_softmax": -1,
        "eos_token_id": ends[0],
        "torch_dtype": "float32",
    }


def _rename_back(
    config: ModelConfig, state: Mapping[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """Returns the paper's state dict as the port has it, what is tied once."""
    made = {}
    for name, array in state.items():
        if name in UNTIED and config.untie_r:
            for n, own in enumerate(array):
                made[f"{PREFIX}layers.{n}.dec_attn.{name}"] = own
        elif name.startswith("crit.cluster_"):
            made[name] = array[::-1]
        elif not name.startswith("crit."):
            made[PREFIX + name] = array
        elif not _is_tied(name, config):
            made[name] = array
    return {name: np.ascontiguousarray(array) for name, array in made.items()}


def _is_tied(name: str, config: ModelConfig) -> bool:
    if _is_out_table(name):
        return config.tie_weights
    number = name.rpartition(".")[2]
    return number.isdecimal() and config.tie_projs[int(number) :][:1] == (True,)
