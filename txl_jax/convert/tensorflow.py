"""Checkpoints of the paper's TensorFlow code: their variables' names and shapes.

Kernels are [in, out] there, as here; a cluster's row has our order.

Dims: N layers, D model, H heads, A head, F feed-forward, V vocabulary, E embedding,
G clusters.
"""

import itertools
from pathlib import Path
from typing import Any

import numpy as np

from txl_jax.convert import bundle
from txl_jax.convert.bundle import Bundle
from txl_jax.errors import UserError
from txl_jax.model import config as models
from txl_jax.model.config import ModelConfig

Params = dict[str, Any]

ROOT = "transformer"
EMBED = f"{ROOT}/adaptive_embed"
SOFTMAX = f"{ROOT}/adaptive_softmax"
LAYER = ROOT + "/layer_{}"
STEP = "global_step"
# What Adam keeps beside each variable, and beside them all.
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
    clusters and ties come from the variables; what none shows is an argument. Raises
    UserError for a variable that is missing, too many or of a wrong shape, and for
    files that are missing or damaged.
    """
    variables = _Variables(bundle.read(source))
    vocabulary, embedding = _read_vocabulary(variables)
    untied = len(variables.shape(f"{ROOT}/r_w_bias")) == 3
    heads = variables.sizes(f"{ROOT}/r_w_bias", "NHA" if untied else "HA")[-2:]
    config = models.tensorflow(
        **vocabulary,
        n_layer=variables.count(LAYER.format("")),
        n_head=heads[0],
        d_head=heads[1],
        d_inner=variables.sizes(f"{LAYER.format(0)}/ff/layer_1/kernel", "DF")[1],
        untie_r=untied,
        mem_len=mem_len,
        clamp_len=clamp_len,
        same_length=same_length,
    )
    biases = (config.n_layer, *heads) if untied else heads
    layers = [_read_layer(variables, n, config) for n in range(config.n_layer)]
    params = {
        "embedding": embedding,
        "layers": _stack(layers),
        "u": variables.take(f"{ROOT}/r_w_bias", *biases),
        "w": variables.take(f"{ROOT}/r_r_bias", *biases),
    }
    step = 0
    if STEP in variables:
        variables.sizes(STEP, "")
        step = int(variables.bundle.read(STEP))
    variables.close()
    return config, params, step


class _Variables:
    """The variables of a checkpoint, each taken once and in a known shape."""

    def __init__(self, bundle: Bundle) -> None:
        self.bundle = bundle
        self.left = dict.fromkeys(bundle.entries)

    def __contains__(self, name: str) -> bool:
        return name in self.bundle.entries

    def count(self, prefix: str) -> int:
        """Returns how many scopes begin with a prefix, such as transformer/layer_."""
        inside = (name for name in self.bundle.entries if name.startswith(prefix))
        return len({name[len(prefix) :].split("/")[0] for name in inside})

    def shape(self, name: str) -> tuple[int, ...]:
        """Returns the shape of a variable."""
        if name not in self:
            raise UserError(
                f"{self.bundle.prefix} has no variable {name}: it is no checkpoint of "
                "the paper's TensorFlow code, or not a whole one"
            )
        return self.bundle.entries[name].shape

    def sizes(self, name: str, dims: str) -> tuple[int, ...]:
        """Returns the shape of a variable with one dimension per letter of `dims`."""
        shape = self.shape(name)
        if len(shape) != len(dims) or not all(shape):
            wanted = ", ".join(dims)
            raise UserError(
                f"{self.bundle.prefix}: {name} has shape {shape}, not ({wanted})"
            )
        return shape

    def take(self, name: str, *shape: int) -> np.ndarray:
        """Returns a variable in float32; raises UserError for another shape."""
        if (found := self.shape(name)) != shape:
            raise UserError(
                f"{self.bundle.prefix}: {name} has shape {found}, not {shape}"
            )
        del self.left[name]
        return self.bundle.read(name).astype(np.float32, copy=False)

    def close(self) -> None:
        """Raises UserError if any variable but the optimiser's was not taken."""
        for name in self.left:
            owner = next((name.removesuffix(x) for x in SLOTS if name.endswith(x)), "")
            if owner not in self and name not in (STEP, *POWERS):
                raise UserError(
                    f"{self.bundle.prefix}: {name} of shape {self.shape(name)} has no "
                    "place in the paper's model"
                )


def _stack(each: list[Any]) -> Any:
    if isinstance(each[0], dict):
        return {name: _stack([one[name] for one in each]) for name in each[0]}
    return np.stack(each)


def _read_layer(variables: _Variables, n: int, config: ModelConfig) -> Params:
    D, H, A, F = config.d_model, config.n_head, config.d_head, config.d_inner
    layer = LAYER.format(n)

    def kernel(name: str, *shape: int) -> np.ndarray:
        return variables.take(f"{layer}/{name}/kernel", *shape)

    def dense(name: str, *shape: int) -> Params:
        bias = variables.take(f"{layer}/{name}/bias", shape[1])
        return {"kernel": kernel(name, *shape), "bias": bias}

    def norm(name: str) -> Params:
        scale, bias = (
            variables.take(f"{layer}/{name}/LayerNorm/{x}", D)
            for x in ("gamma", "beta")
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


def _read_vocabulary(variables: _Variables) -> tuple[dict[str, Any], Params]:
    """Returns what the vocabulary's two ends show of the model, and their parameters.

    With clusters the biases are always split; the tables are with div_val alone.
    """
    D = variables.sizes(f"{LAYER.format(0)}/ff/layer_1/kernel", "DF")[0]
    biases = _read_biases(variables)
    V_i = [len(bias) for bias in biases]
    G = len(V_i) - 1
    split = f"{EMBED}/lookup_table" not in variables
    scopes = [f"{EMBED}/cutoff_{i}" for i in range(G + 1)] if split else [EMBED]
    E_i = [variables.sizes(f"{scope}/lookup_table", "VE")[1] for scope in scopes]
    # Only a cluster of D features can be without a projection.
    same_dim = all(
        f"{scope}/proj_W" in variables
        for scope, E in zip(scopes, E_i, strict=True)
        if split and E == D
    )
    embedding: Params = {"bias": np.concatenate(biases)}
    for i, (scope, E) in enumerate(zip(scopes, E_i, strict=True)):
        suffix, V = (f"_{i}", V_i[i]) if split else ("", sum(V_i))
        table = variables.take(f"{scope}/lookup_table", V, E)
        embedding[f"table{suffix}"] = table
        if E != D or (split and same_dim):
            embedding[f"proj{suffix}"] = variables.take(f"{scope}/proj_W", E, D)
    if G:
        first = f"{SOFTMAX}/cutoff_0"
        embedding["cluster_table"] = variables.take(f"{first}/cluster_W", G, E_i[0])
        embedding["cluster_bias"] = variables.take(f"{first}/cluster_b", G)
    ties = []
    for i in range(G + 1):
        # The softmax projects where the embedding does, by its own or the same.
        shared = embedding.get(f"proj_{i}" if split else "proj")
        own = f"{SOFTMAX}/cutoff_{i}/proj"
        ties.append(shared is not None and own not in variables)
        if shared is not None and own in variables:
            embedding[f"out_proj_{i}"] = variables.take(own, *shared.shape)
    config: dict[str, Any] = {
        "vocab_size": sum(V_i),
        "d_model": D,
        "d_embed": 0 if E_i[0] == D else E_i[0],
        "cutoffs": tuple(itertools.accumulate(V_i[:-1])),
        "div_val": _div_val(E_i) if split else 1,
        "tie_projs": tuple(ties) if any(ties) else (),
        "proj_same_dim": same_dim,
    }
    return config, embedding


def _read_biases(variables: _Variables) -> list[np.ndarray]:
    """Returns the biases of each cluster's tokens."""
    scope = f"{SOFTMAX}/cutoff_"
    if not variables.count(scope):
        name = f"{SOFTMAX}/bias"
        return [variables.take(name, *variables.sizes(name, "V"))]
    G, _ = variables.sizes(f"{scope}0/cluster_W", "GE")
    names = (f"{scope}{i}/b" for i in range(G + 1))
    return [variables.take(name, *variables.sizes(name, "V")) for name in names]


def _div_val(sizes: list[int]) -> int:
    """Returns what the tables' widths are divided by, from each to the next."""
    for divisor in range(2, sizes[0] + 1):
        if all(sizes[0] // divisor**i == size for i, size in enumerate(sizes)):
            return divisor
    raise UserError(
        f"the widths {sizes} of the embedding's tables do not fall by one divisor, as "
        "those of the paper's models do"
    )
