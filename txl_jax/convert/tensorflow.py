"""Checkpoints of the paper's TensorFlow code: names and shapes of the variables.

Kernels are [in, out], and the rows of clusters are in order, as in this project.

Dims: N layers, D model, H heads, A head, F feed-forward, V vocabulary, E embedding,
G clusters.
"""

import itertools
from pathlib import Path
from typing import Any

import numpy as np

from txl_jax.convert import bundle
from txl_jax.convert.keys import Keys, infer_div_val, stack
from txl_jax.model import config as models
from txl_jax.model.config import ModelConfig

Params = dict[str, Any]

ROOT = "transformer"
EMBED = f"{ROOT}/adaptive_embed"
SOFTMAX = f"{ROOT}/adaptive_softmax"
LAYER = ROOT + "/layer_{}"
STEP = "global_step"
# Adam's variables: two for each variable of the model, and two scalars.
SLOTS = ("/Adam", "/Adam_1")
POWERS = ("beta1_power", "beta2_power")


def read(
    source: str | Path,
    *,
    mem_len: int,
    clamp_len: int = 0,
    same_length: bool = False,
) -> tuple[ModelConfig, Params, int]:
    """Returns the model of a checkpoint, its parameters, and its step or 0.

    `source` is the checkpoint's folder, the prefix of its files or its .index. Sizes,
    clusters and ties are inferred from the variables. Raises UserError for a variable
    that is missing, unknown or of a wrong shape, and for missing or damaged files.
    """
    variables = bundle.read(source)
    model = {
        name: variable
        for name, variable in variables.items()
        if name not in (STEP, *POWERS) and not _is_slot(name, variables)
    }
    keys = Keys(model, f"{bundle.find(source)}: ")
    sizes, embedding = _read_embedding(keys)
    untied = keys.rank(f"{ROOT}/r_w_bias") == 3
    heads = keys.shape(f"{ROOT}/r_w_bias", "NHA" if untied else "HA")[-2:]
    config = models.tensorflow(
        **sizes,
        n_layer=keys.count(LAYER + "/ff/layer_1/kernel"),
        n_head=heads[0],
        d_head=heads[1],
        d_inner=keys.shape(f"{LAYER.format(0)}/ff/layer_1/kernel", "DF")[1],
        untie_r=untied,
        mem_len=mem_len,
        clamp_len=clamp_len,
        same_length=same_length,
    )
    biases = (config.n_layer, *heads) if untied else heads
    params = {
        "embedding": embedding,
        "layers": stack([_read_layer(keys, n, config) for n in range(config.n_layer)]),
        "u": keys.take(f"{ROOT}/r_w_bias", *biases),
        "w": keys.take(f"{ROOT}/r_r_bias", *biases),
    }
    keys.close()
    step = 0
    if STEP in variables:
        state = Keys({STEP: variables[STEP]}, keys.where)
        state.shape(STEP, "")
        step = int(variables[STEP].read())
    return config, params, step


def _is_slot(name: str, variables: dict[str, bundle.Variable]) -> bool:
    """Returns whether a variable is one of the optimizer's for another variable."""
    return any(
        name.endswith(slot) and name.removesuffix(slot) in variables for slot in SLOTS
    )


def _read_layer(keys: Keys, n: int, config: ModelConfig) -> Params:
    D, H, A, F = config.d_model, config.n_head, config.d_head, config.d_inner
    layer = LAYER.format(n)

    def kernel(name: str, *shape: int) -> np.ndarray:
        return keys.take(f"{layer}/{name}/kernel", *shape)

    def dense(name: str, *shape: int) -> Params:
        bias = keys.take(f"{layer}/{name}/bias", shape[1])
        return {"kernel": kernel(name, *shape), "bias": bias}

    def norm(name: str) -> Params:
        scale, bias = (
            keys.take(f"{layer}/{name}/LayerNorm/{x}", D) for x in ("gamma", "beta")
        )
        return {"scale": scale, "bias": bias}

    q, k, v = kernel("rel_attn/qkv", D, 3 * H * A).T.reshape(3, H, A, D)
    return {
        "attention": {
            "q": q,
            "k": k,
            "v": v,
            "r": kernel("rel_attn/r", D, H * A).T.reshape(H, A, D),
            "o": kernel("rel_attn/o", H * A, D).reshape(H, A, D),
            "norm": norm("rel_attn"),
        },
        "feed_forward": {
            "in": dense("ff/layer_1", D, F),
            "out": dense("ff/layer_2", F, D),
            "norm": norm("ff"),
        },
    }


def _read_embedding(keys: Keys) -> tuple[dict[str, Any], Params]:
    """Returns the sizes that embedding and softmax imply, and their parameters.

    With clusters, the biases are always split; the tables only with div_val.
    """
    D = keys.shape(f"{LAYER.format(0)}/ff/layer_1/kernel", "DF")[0]
    biases = _read_biases(keys)
    V_i = [len(bias) for bias in biases]
    G = len(V_i) - 1
    split = f"{EMBED}/lookup_table" not in keys
    scopes = [f"{EMBED}/cutoff_{i}" for i in range(G + 1)] if split else [EMBED]
    E_i = [keys.shape(f"{scope}/lookup_table", "VE")[1] for scope in scopes]
    # Only a table of width D can lack a projection.
    same_dim = all(
        f"{scope}/proj_W" in keys
        for scope, E in zip(scopes, E_i, strict=True)
        if split and E == D
    )
    embedding: Params = {"bias": np.concatenate(biases)}
    for i, (scope, E) in enumerate(zip(scopes, E_i, strict=True)):
        suffix, V = (f"_{i}", V_i[i]) if split else ("", sum(V_i))
        table = keys.take(f"{scope}/lookup_table", V, E)
        embedding[f"table{suffix}"] = table
        if E != D or (split and same_dim):
            embedding[f"proj{suffix}"] = keys.take(f"{scope}/proj_W", E, D)
    if G:
        first = f"{SOFTMAX}/cutoff_0"
        embedding["cluster_table"] = keys.take(f"{first}/cluster_W", G, E_i[0])
        embedding["cluster_bias"] = keys.take(f"{first}/cluster_b", G)
    ties = []
    for i in range(G + 1):
        # The softmax has a projection, tied or not, where the embedding has one.
        shared = embedding.get(f"proj_{i}" if split else "proj")
        own = f"{SOFTMAX}/cutoff_{i}/proj"
        ties.append(shared is not None and own not in keys)
        if shared is not None and own in keys:
            embedding[f"out_proj_{i}"] = keys.take(own, *shared.shape)
    config: dict[str, Any] = {
        "vocab_size": sum(V_i),
        "d_model": D,
        "d_embed": 0 if E_i[0] == D else E_i[0],
        "cutoffs": tuple(itertools.accumulate(V_i[:-1])),
        "div_val": infer_div_val(E_i) if split else 1,
        "tie_projs": tuple(ties) if any(ties) else (),
        "proj_same_dim": same_dim,
    }
    return config, embedding


def _read_biases(keys: Keys) -> list[np.ndarray]:
    """Returns the biases of each cluster's tokens."""
    scope = f"{SOFTMAX}/cutoff_"
    names = [f"{SOFTMAX}/bias"]
    if f"{scope}0/cluster_W" in keys:
        G, _ = keys.shape(f"{scope}0/cluster_W", "GE")
        names = [f"{scope}{i}/b" for i in range(G + 1)]
    return [keys.take(name, *keys.shape(name, "V")) for name in names]
