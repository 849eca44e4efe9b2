"""Checkpoints of the paper's TensorFlow code: names and shapes of the variables.

The rows of clusters are in order, as in this project.

Dims: N layers, D model, H heads, A head, F feed-forward, V vocabulary, E embedding,
G clusters.
"""

import itertools
from pathlib import Path
from typing import Any

import numpy as np

from txl_jax.convert import bundle
from txl_jax.convert.keys import Keys, infer_div_val
from txl_jax.convert.pytorch import Params, read_layers
from txl_jax.model import config as models
from txl_jax.model.config import ModelConfig

ROOT = "transformer"
EMBED = f"{ROOT}/adaptive_embed"
SOFTMAX = f"{ROOT}/adaptive_softmax"
LAYER = ROOT + "/layer_{}/{}"
# The arrays of a layer by their names in `pytorch.LAYER`. Kernels are [in, out].
NAMES = {
    "attention.qkv": "rel_attn/qkv/kernel",
    "attention.r": "rel_attn/r/kernel",
    "attention.o": "rel_attn/o/kernel",
    "attention.norm.scale": "rel_attn/LayerNorm/gamma",
    "attention.norm.bias": "rel_attn/LayerNorm/beta",
    "feed_forward.in.kernel": "ff/layer_1/kernel",
    "feed_forward.in.bias": "ff/layer_1/bias",
    "feed_forward.out.kernel": "ff/layer_2/kernel",
    "feed_forward.out.bias": "ff/layer_2/bias",
    "feed_forward.norm.scale": "ff/LayerNorm/gamma",
    "feed_forward.norm.bias": "ff/LayerNorm/beta",
}
STEP = "global_step"
# Adam's variables: two for each variable of the model, and two scalars.
ADAM = ("/Adam", "/Adam_1", "beta1_power", "beta2_power")


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
    variables = bundle.read(source, lambda name: not name.endswith(ADAM))
    where = f"{bundle.find(source)}: "
    step = variables.pop(STEP, np.int64(0))
    Keys({STEP: step}, where).shape(STEP)
    keys = Keys(variables, where)
    untied = keys.rank(f"{ROOT}/r_w_bias") == 3
    biases = keys.shape(f"{ROOT}/r_w_bias", *("NHA" if untied else "HA"))
    kernel = NAMES["feed_forward.in.kernel"]
    D, F = keys.shape(LAYER.format(0, kernel), "D", "F")
    sizes, embedding = _read_embedding(keys, D)
    config = models.tensorflow(
        **sizes,
        d_model=D,
        n_layer=keys.count(LAYER.format("{}", kernel)),
        n_head=biases[-2],
        d_head=biases[-1],
        d_inner=F,
        untie_r=untied,
        mem_len=mem_len,
        clamp_len=clamp_len,
        same_length=same_length,
    )

    def take(n: int, name: str, *shape: int) -> np.ndarray:
        return keys.take(LAYER.format(n, NAMES[name]), *shape[::-1]).T

    biases = (config.n_layer, *biases[-2:]) if untied else biases
    params = {
        "embedding": embedding,
        "layers": read_layers(config, take),
        "u": keys.take(f"{ROOT}/r_w_bias", *biases),
        "w": keys.take(f"{ROOT}/r_r_bias", *biases),
    }
    keys.close()
    return config, params, int(step)


def _read_embedding(keys: Keys, D: int) -> tuple[dict[str, Any], Params]:
    """Returns the sizes that embedding and softmax imply, and their parameters.

    With clusters, the biases are always split; the tables only with div_val.
    """
    clustered = f"{SOFTMAX}/cutoff_0/cluster_W"
    names = [f"{SOFTMAX}/bias"]
    if clustered in keys:
        clusters, _ = keys.shape(clustered, "G", "E")
        names = [f"{SOFTMAX}/cutoff_{i}/b" for i in range(clusters + 1)]
    biases = [keys.take(name, "V") for name in names]
    V_i = [len(bias) for bias in biases]
    G = len(V_i) - 1
    split = f"{EMBED}/lookup_table" not in keys
    scopes = [f"{EMBED}/cutoff_{i}" for i in range(G + 1)] if split else [EMBED]
    E_i = [keys.shape(f"{scope}/lookup_table", "V", "E")[1] for scope in scopes]
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
        embedding["cluster_table"] = keys.take(clustered, G, E_i[0])
        embedding["cluster_bias"] = keys.take(f"{SOFTMAX}/cutoff_0/cluster_b", G)
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
        "d_embed": 0 if E_i[0] == D else E_i[0],
        "cutoffs": tuple(itertools.accumulate(V_i[:-1])),
        "div_val": infer_div_val(E_i) if split else 1,
        "tie_projs": tuple(ties) if any(ties) else (),
        "proj_same_dim": same_dim,
    }
    return config, embedding
