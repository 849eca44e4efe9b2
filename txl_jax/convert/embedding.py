"""Embedding and softmax in a state dict: tables, projections, clusters and ties.

Dims: D model, V vocabulary, E embedding, G clusters.
"""

import itertools
from typing import Any

import numpy as np

from txl_jax.convert.keys import Keys, infer_div_val
from txl_jax.errors import UserError

Params = dict[str, Any]


def read_embedding(
    keys: Keys, cutoffs: tuple[int, ...]
) -> tuple[dict[str, Any], Params]:
    """Returns the sizes that the tables imply, and embedding and softmax parameters."""
    name, out_name = "word_emb.emb_layers.{}.weight", "crit.out_layers.{}.weight"
    numbers = range(max(keys.count(name), 1))
    tables = [keys.take(name.format(i), "V", "E") for i in numbers]
    D = keys.shape("layers.0.pos_ff.CoreNet.0.weight", "F", "D")[1]
    V_i, E_i = ([table.shape[axis] for table in tables] for axis in (0, 1))
    # Only a table of width D can lack a projection.
    projected = [E != D or f"word_emb.emb_projs.{i}" in keys for i, E in enumerate(E_i)]
    split = len(tables) > 1 or (projected[0] and D == E_i[0])
    suffixes = [f"_{i}" for i in numbers] if split else [""]
    cutoffs = _cutoffs(keys, V_i, cutoffs)
    params: Params = {}
    for i, suffix in enumerate(suffixes):
        params[f"table{suffix}"] = tables[i]
        if projected[i]:
            proj = keys.take(f"word_emb.emb_projs.{i}", D, E_i[i])
            params[f"proj{suffix}"] = np.ascontiguousarray(proj.T)
    biases = [keys.take(f"crit.out_layers.{i}.bias", V_i[i]) for i in numbers]
    params["bias"] = np.concatenate(biases)
    if cutoffs:
        G = len(cutoffs)
        # The paper's code has the last cluster first; here row g is for cluster g + 1.
        rows = keys.take("crit.cluster_weight", G, E_i[0])
        params["cluster_table"] = rows[::-1].copy()
        params["cluster_bias"] = keys.take("crit.cluster_bias", G)[::-1].copy()
    own: list[np.ndarray] = []
    if any(out_name.format(i) in keys for i in numbers):
        own = [keys.take(out_name.format(i), *tables[i].shape) for i in numbers]
    if not (tied := all(map(_equal, own, tables))):
        names = [f"out_table{suffix}" for suffix in suffixes]
        params |= dict(zip(names, own, strict=True))
    config = {
        "vocab_size": sum(V_i),
        "d_embed": 0 if E_i[0] == D else E_i[0],
        "cutoffs": cutoffs,
        "div_val": infer_div_val(E_i) if split else 1,
        "tie_weights": tied,
        "tie_projs": _take_out_projs(keys, len(cutoffs) + 1, params),
        "proj_same_dim": not split or all(projected),
    }
    return config, params


def _cutoffs(keys: Keys, sizes: list[int], cutoffs: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the cutoffs that split tables imply, or else the argument."""
    if implied := tuple(itertools.accumulate(sizes[:-1])):
        if cutoffs not in ((), implied):
            raise UserError(f"cutoffs = {cutoffs} differ from the tables' {implied}")
        return implied
    G = 0
    if "crit.cluster_weight" in keys:
        G, _ = keys.shape("crit.cluster_weight", "G", "E")
    if len(cutoffs) != G:
        raise UserError(
            f"the softmax has {G} clusters beside the frequent words, and a single "
            f"table does not determine their bounds: give {G} cutoffs, not {cutoffs}"
        )
    return cutoffs


def _equal(x: np.ndarray, y: np.ndarray) -> bool:
    return np.array_equal(x.view(np.int32), y.view(np.int32))


def _take_out_projs(keys: Keys, clusters: int, params: Params) -> tuple[bool, ...]:
    """Adds the softmax's own projections to `params`; returns which ones are tied.

    The softmax has a projection, tied or not, where the embedding has one.
    """
    ties = []
    for i in range(clusters):
        shared = params.get("proj" if "table" in params else f"proj_{i}")
        tied = shared is not None
        if shared is not None and (key := f"crit.out_projs.{i}") in keys:
            proj = np.ascontiguousarray(keys.take(key, *shared.T.shape).T)
            if not (tied := _equal(proj, shared)):
                params[f"out_proj_{i}"] = proj
        ties.append(tied)
    return tuple(ties) if any(ties) else ()
