"""Embedding and softmax in a state dict: tables, projections, clusters and ties.

Dims: D model, V vocabulary, E embedding, G clusters.
"""

import itertools
from typing import Any

import numpy as np

from txl_jax.convert.keys import Keys, infer_div_val
from txl_jax.errors import UserError
from txl_jax.model.config import ModelConfig

Params = dict[str, Any]


def read_embedding(
    keys: Keys, cutoffs: tuple[int, ...]
) -> tuple[dict[str, Any], Params]:
    """Returns the sizes that the tables imply, and embedding and softmax parameters."""
    tables = keys.count("word_emb.emb_layers.{}.weight")
    shapes = [
        keys.shape(f"word_emb.emb_layers.{i}.weight", "VE")
        for i in range(max(tables, 1))
    ]
    D = keys.shape("layers.0.pos_ff.CoreNet.0.weight", "FD")[1]
    E = shapes[0][1]
    projected = "word_emb.emb_projs.0" in keys
    split = len(shapes) > 1 or (projected and D == E)
    cutoffs = _cutoffs(keys, [V for V, _ in shapes], cutoffs)
    config: dict[str, Any] = {
        "vocab_size": sum(V for V, _ in shapes),
        "d_embed": 0 if E == D else E,
        "cutoffs": cutoffs,
        "div_val": infer_div_val([e for _, e in shapes]) if split else 1,
    }
    params: Params = {}

    def name(kind: str, i: int) -> str:
        return f"{kind}_{i}" if split else kind

    for i, shape in enumerate(shapes):
        params[name("table", i)] = keys.take(f"word_emb.emb_layers.{i}.weight", *shape)
        if projected:
            proj = keys.take(f"word_emb.emb_projs.{i}", D, shape[1])
            params[name("proj", i)] = np.ascontiguousarray(proj.T)
    biases = [
        keys.take(f"crit.out_layers.{i}.bias", V) for i, (V, _) in enumerate(shapes)
    ]
    params["bias"] = np.concatenate(biases)
    if cutoffs:
        G = len(cutoffs)
        # The paper's code has the last cluster first; here row g is for cluster g + 1.
        params["cluster_table"] = keys.take("crit.cluster_weight", G, E)[::-1].copy()
        params["cluster_bias"] = keys.take("crit.cluster_bias", G)[::-1].copy()
    config["tie_weights"] = not (untied := _out_tables(keys, shapes, params, name))
    params |= untied
    if projected:
        tied, untied = _out_projs(keys, len(cutoffs) + 1, params)
        config["tie_projs"] = tied if any(tied) else ()
        params |= untied
    return config, params


def _cutoffs(keys: Keys, sizes: list[int], cutoffs: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the cutoffs that split tables imply, or else the argument."""
    if implied := tuple(itertools.accumulate(sizes[:-1])):
        if cutoffs not in ((), implied):
            raise UserError(f"cutoffs = {cutoffs} differ from the tables' {implied}")
        return implied
    G = 0
    if "crit.cluster_weight" in keys:
        G, _ = keys.shape("crit.cluster_weight", "GE")
    if len(cutoffs) != G:
        raise UserError(
            f"the softmax has {G} clusters beside the frequent words, and a single "
            f"table does not determine their bounds: give {G} cutoffs, not {cutoffs}"
        )
    return cutoffs


def _equal(x: np.ndarray, y: np.ndarray) -> bool:
    return np.array_equal(x.view(np.int32), y.view(np.int32))


def _out_tables(keys: Keys, shapes: Any, params: Params, name: Any) -> Params:
    """Returns the softmax's tables; empty if they equal the embedding's."""
    weights = [f"crit.out_layers.{i}.weight" for i in range(len(shapes))]
    if not any(weight in keys for weight in weights):
        return {}
    own = {
        name("out_table", i): keys.take(weight, *shape)
        for i, (weight, shape) in enumerate(zip(weights, shapes, strict=True))
    }
    same = all(
        _equal(table, params[key.removeprefix("out_")]) for key, table in own.items()
    )
    return {} if same else own


def _out_projs(
    keys: Keys, clusters: int, params: Params
) -> tuple[tuple[bool, ...], Params]:
    """Returns which projections of the softmax are tied, and the others."""
    own: Params = {}
    for i in range(clusters):
        shared = np.ascontiguousarray(
            params["proj" if "proj" in params else f"proj_{i}"].T
        )
        if (key := f"crit.out_projs.{i}") in keys:
            proj = keys.take(key, *shared.shape)
            if not _equal(proj, shared):
                own[f"out_proj_{i}"] = np.ascontiguousarray(proj.T)
    return tuple(f"out_proj_{i}" not in own for i in range(clusters)), own


def write_embedding(config: ModelConfig, embedding: Params) -> Params:
    """Returns the state dict of embedding and softmax, as views."""
    state: Params = {}
    split = config.div_val > 1
    sizes = config.embed_sizes
    ends = (0, *config.cutoffs, config.vocab_size)

    def find(kind: str, i: int) -> Any:
        return embedding.get(f"{kind}_{i}" if split else kind)

    def proj(name: str, i: int) -> np.ndarray:
        """Returns [D, E]; the identity where only the other code has a projection."""
        array = embedding.get(name)
        return np.eye(config.d_model) if array is None else np.asarray(array).T

    for i in range(len(sizes) if split else 1):
        out = "table" if config.tie_weights else "out_table"
        state[f"word_emb.emb_layers.{i}.weight"] = find("table", i)
        state[f"crit.out_layers.{i}.weight"] = find(out, i)
        bias = embedding["bias"]
        state[f"crit.out_layers.{i}.bias"] = (
            bias[ends[i] : ends[i + 1]] if split else bias
        )
    if split or sizes[0] != config.d_model:
        tied = config.tie_projs or (False,) * len(sizes)
        for i in range(len(sizes)):
            shared = f"proj_{i}" if split else "proj"
            if split or i == 0:
                state[f"word_emb.emb_projs.{i}"] = proj(shared, i)
            own = shared if tied[i] else f"out_proj_{i}"
            state[f"crit.out_projs.{i}"] = proj(own, i)
    if config.cutoffs:
        state["crit.cluster_weight"] = embedding["cluster_table"][::-1]
        state["crit.cluster_bias"] = embedding["cluster_bias"][::-1]
    return state
