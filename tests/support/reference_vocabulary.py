"""Embeddings and log-probabilities of tokens in numpy: a part of `tests.reference`.

One token, one query at a time. The parameters determine the variant: a table for all
tokens or one for each cluster (div_val), with a projection or without, shared with the
softmax (tied) or not.

Dims: D d_model, E d_embed (each cluster's own under div_val), V vocabulary, G clusters
beside the frequent one, C tokens of a cluster (for the frequent one, with G more rows).
"""

import math
from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]
Params = dict[str, Any]


def embed(embedding: Params, cutoffs: tuple[int, ...], token: int, D: int) -> Array:
    """Returns a token's h_D: its row, projected, times sqrt(D)."""
    cluster = sum(token >= cutoff for cutoff in cutoffs)
    row = token - (0, *cutoffs)[cluster]
    h_E = cluster_tables(embedding, "table", cutoffs)[cluster][row]
    proj_ED = projection(embedding, cluster)
    return (h_E if proj_ED is None else h_E @ proj_ED) * math.sqrt(D)


def log_probs(embedding: Params, cutoffs: tuple[int, ...], hidden_D: Array) -> Array:
    """Returns the log-probability of every token, in the order of the vocabulary.

    The frequent cluster's softmax has one more row for each other cluster, in their
    order (TensorFlow's and Hugging Face's). A rare token's probability is its
    cluster's times its own within the cluster.
    """
    out = "out_table" if {"out_table", "out_table_0"} & embedding.keys() else "table"
    ends = (0, *cutoffs, len(embedding["bias"]))
    within = []
    for cluster, table_CE in enumerate(cluster_tables(embedding, out, cutoffs)):
        bias_C = embedding["bias"][ends[cluster] : ends[cluster + 1]]
        if cluster == 0 and cutoffs:
            table_CE = np.concatenate([table_CE, embedding["cluster_table"]])
            bias_C = np.concatenate([bias_C, embedding["cluster_bias"]])
        proj_ED = embedding.get(f"out_proj_{cluster}", projection(embedding, cluster))
        hidden_E = hidden_D if proj_ED is None else proj_ED @ hidden_D
        within.append(log_softmax(table_CE @ hidden_E + bias_C))
    frequent = ends[1]
    parts = [within[0][:frequent]]
    for cluster in range(1, len(within)):
        parts.append(within[0][frequent + cluster - 1] + within[cluster])
    return np.concatenate(parts)


def cluster_tables(
    embedding: Params, name: str, cutoffs: tuple[int, ...]
) -> list[Array]:
    """Returns each cluster's rows, from its own table or from the shared one."""
    if name in embedding:
        return np.split(embedding[name], cutoffs)
    return [embedding[f"{name}_{cluster}"] for cluster in range(len(cutoffs) + 1)]


def projection(embedding: Params, cluster: int) -> Array | None:
    """Returns a cluster's projection from embeddings to d_model, if there is one."""
    return embedding.get(f"proj_{cluster}", embedding.get("proj"))


def log_softmax(score_C: Array) -> Array:
    """Returns the logarithms of the softmax."""
    score_C = score_C - max(score_C)
    return score_C - math.log(sum(np.exp(score_C)))
