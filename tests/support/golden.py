"""What Hugging Face's Transformer-XL computes, and the cases in tests/fixtures.

Torch and transformers==4.35.2, the last release whose port works, wrote those; the
program is this file of revision a41055f. Each file has the config as JSON, the weights
under their published names, the tokens, and what the published code makes of them: see
`tests.promises.test_published_models`. The models are small and random in every
parameter, biases and norms too, so that no term of the mathematics can hide.

Dims: N layers, B streams, S segments, L segment, T = S L tokens, M memory, D model.
"""

import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np

from tests.reference import Array

FOLDER = Path(__file__).parents[1] / "fixtures"
B, S, L = 2, 5, 5
SPREAD = 0.35  # of every parameter: logits, scores and their parts are all about 1

BASE: dict[str, Any] = {"vocab_size": 37, "cutoffs": [], "div_val": 1}
BASE |= {"d_model": 12, "d_embed": 12, "n_head": 2, "d_head": 5, "d_inner": 14}
BASE |= {"n_layer": 2, "mem_len": 7, "clamp_len": 0, "same_length": False}
BASE |= {"untie_r": True, "dropout": 0.0, "dropatt": 0.0}
CLUSTERS: dict[str, Any] = {"cutoffs": [9, 17, 28]}
DIV_2: dict[str, Any] = {**CLUSTERS, "div_val": 2}
UNTIED: dict[str, Any] = {"tie_projs": [False] * 4, "tie_word_embeddings": False}
FIRST_OWN = [False, True, True, True]
CASES: dict[str, dict[str, Any]] = {
    "plain": {"untie_r": False},
    "untied_r": {},
    "untied_weights": {"tie_word_embeddings": False},
    "no_memory": {"mem_len": 0},
    "short_memory": {"mem_len": 3, "same_length": True, "untie_r": False},
    "long_memory": {"mem_len": 40, "clamp_len": 9, "n_layer": 3},
    "pre_lnorm": {"pre_lnorm": True, "clamp_len": 4, "layer_norm_epsilon": 1e-2},
    "narrow_embeddings": {"d_embed": 8, "tie_projs": [True]},
    "one_table_div_val_2": {"div_val": 2, "untie_r": False},
    "clusters": {**CLUSTERS, "same_length": True},
    "narrow_clusters": {**CLUSTERS, "d_embed": 8, "tie_projs": FIRST_OWN},
    "narrow_untied_clusters": {**CLUSTERS, "d_embed": 8, **UNTIED},
    "div_val_2": {**DIV_2, "tie_projs": FIRST_OWN, "same_length": True, "clamp_len": 5},
    "div_val_2_all_tied": {
        **{**DIV_2, "tie_projs": [True] * 4},
        **{"d_embed": 16, "untie_r": False, "mem_len": 2},
    },
    "div_val_2_all_untied": {**DIV_2, **UNTIED, "pre_lnorm": True},
    "div_val_4": {
        **{"cutoffs": [9, 20], "div_val": 4, "tie_projs": [False] * 3},
        "d_embed": 16,
    },
}
UPDATES = 30  # of a case of training


def build(changes: dict[str, Any], seed: int) -> Any:
    """Returns a random TransfoXLLMHeadModel of BASE with some fields changed."""
    with warnings.catch_warnings():
        # It is old for this torch, and tells of a version 5 which has no such model.
        warnings.simplefilter("ignore")
        import torch
        from transformers import TransfoXLConfig, TransfoXLLMHeadModel

        model = TransfoXLLMHeadModel(TransfoXLConfig(**BASE | changes)).eval()
    rng = np.random.default_rng(seed)
    for name, parameter in model.named_parameters():
        centre = float("layer_norm.weight" in name)
        value = centre + SPREAD * rng.normal(size=parameter.shape)
        # Exact in half precision, so that a file takes half the bytes.
        parameter.data = torch.tensor(value.astype(np.float16).astype(np.float32))
    return model


def every_token(vocab_size: int, seed: int) -> Array:
    """Returns random tokens [B, T + 1] in which all of the vocabulary occurs."""
    rng = np.random.default_rng(seed)
    more = rng.integers(0, vocab_size, B * (S * L + 1) - vocab_size)
    return np.concatenate([rng.permutation(vocab_size), more]).reshape(B, -1)


def read(model: Any, tokens_BL: Array, targets_BL: Array, mems: Any) -> Any:
    """Returns (nll_BL as a tensor, the next mems) of one segment.

    From the probabilities of the whole vocabulary: the port's own losses, whose mean is
    the same, come grouped by cluster and not in the order of the tokens.
    """
    import torch

    output = model(torch.tensor(tokens_BL), mems=mems)
    targets_BL1 = torch.tensor(targets_BL)[..., None]
    nll_BL = -output.prediction_scores.gather(-1, targets_BL1)[..., 0]
    return nll_BL, output.mems


def evaluated(changes: dict[str, Any], seed: int) -> dict[str, Array]:
    """Returns one case: the model, tokens, nll_BT and the memory after each segment."""
    import torch

    model = build(changes, seed)
    tokens_BT = every_token(model.config.vocab_size, seed)
    nll, memories, mems = [], [], None
    with torch.no_grad():
        for begin in range(0, S * L, L):
            inputs_BL = tokens_BT[:, begin : begin + L]
            targets_BL = tokens_BT[:, begin + 1 : begin + L + 1]
            nll_BL, mems = read(model, inputs_BL, targets_BL, mems)
            nll.append(nll_BL.numpy())
            if mems is not None:
                # Of the port it is a list of [M, B, D].
                memories.append(np.stack([h_MBD.swapaxes(0, 1) for h_MBD in mems]))
    case = described(model) | {
        "tokens": tokens_BT.astype(np.int32),
        "nll": np.concatenate(nll, axis=1),
    }
    # The first memory has the zeros in which the port begins, the last has none.
    return case | {
        f"memory_{s}": memories[s] for s in (0, S - 1) if model.config.mem_len
    }


def described(model: Any) -> dict[str, Array]:
    """Returns the config and the weights, these under state/<published name>."""
    state = {
        f"state/{name}": tensor.numpy().copy()
        for name, tensor in model.state_dict().items()
    }
    config = model.config.to_json_string(use_diff=False)
    return {"config": np.array(json.dumps(json.loads(config)))} | state
