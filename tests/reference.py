"""The paper's Transformer-XL in numpy, slow and literal: the oracle of every test.

Dai et al. 2019, sections 3.2 and 3.3. Each score is written as the paper's four terms,
for one query and one key, at their own distance: there is no relative shift, no mask
array and no padded memory here. A token that may not be seen is never visited.

Everything is float64 and deterministic (no dropout). A stream is a batch row; streams
never meet, so all of the mathematics below is written for one of them.

Dims: B streams, L tokens of the segment, M tokens that a stream remembers (ragged: from
0 up to mem_len), K = M + L keys, D d_model, H heads, A size of a head, F d_inner, V
vocabulary, N layers, 4 the terms (a) to (d).
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]
Params = dict[str, Any]
# memory[stream][layer] is h_MD: that layer's inputs, oldest first.
Memory = list[list[Array]]

_float64 = partial(np.asarray, dtype=np.float64)


def empty(n_layer: int, batch: int, d_model: int) -> Memory:
    """Returns the memory of streams that have read nothing."""
    return [[np.zeros((0, d_model)) for _ in range(n_layer)] for _ in range(batch)]


def padded(memory: Memory, mem_len: int) -> tuple[Array, Array]:
    """Returns h_NBMD and filled_B, the fixed-size layout of `txl_jax.model.memory`.

    Here M = mem_len: the newest token is at the right end, unused slots are zeros.
    """
    h_NBMD = np.zeros((len(memory[0]), len(memory), mem_len, memory[0][0].shape[1]))
    for b, layers in enumerate(memory):
        for n, h_MD in enumerate(layers):
            h_NBMD[n, b, mem_len - len(h_MD) :] = h_MD
    return h_NBMD, np.array([len(layers[0]) for layers in memory], np.int32)


def forward(
    params: Params,
    tokens_BL: Array,
    memory: Memory,
    *,
    mem_len: int,
    clamp_len: int = 0,
    same_length: bool = False,
    pre_lnorm: bool = False,
    first_BL: Array | None = None,
    length_B: Array | None = None,
) -> tuple[Array, Memory]:
    """Reads one segment: returns the last layer's output and the next memory.

    `first_BL` marks tokens that start a document, `length_B` counts the real tokens.
    Padding is never read: its rows of the output are zeros. The given memory is left
    as it was. Raises ValueError where a query would see nothing or `memory` is longer
    than `mem_len`.
    """
    if same_length and mem_len == 0:
        raise ValueError("same_length with mem_len 0 leaves nothing to attend to")
    if any(len(layers[0]) > mem_len for layers in memory):
        raise ValueError(f"a stream remembers more than mem_len = {mem_len} tokens")
    B, L = np.shape(tokens_BL)
    first_BL = np.zeros((B, L), bool) if first_BL is None else np.asarray(first_BL)
    length_B = np.full(B, L) if length_B is None else np.asarray(length_B)
    settings = mem_len, clamp_len, mem_len if same_length else 0, pre_lnorm
    hidden_BLD = np.zeros((B, L, np.shape(params["embedding"]["table"])[1]))
    next_memory = list(memory)
    for b, length in enumerate(length_B):
        if length > 0:
            tokens_L, first_L = np.asarray(tokens_BL)[b, :length], first_BL[b, :length]
            hidden_BLD[b, :length], next_memory[b] = read(
                params, tokens_L, first_L, memory[b], *settings
            )
    return hidden_BLD, next_memory


def logits(
    params: Params, tokens_BL: Array, memory: Memory, **settings: Any
) -> tuple[Array, Memory]:
    """Returns log-probabilities [B, L, V] and the next memory; see `forward`.

    The softmax shares the embedding's table, without its factor sqrt(D), and has its
    own bias. Rows of padding hold the log-probabilities of a zero hidden state.
    """
    hidden_BLD, memory = forward(params, tokens_BL, memory, **settings)
    embedding = _map(_float64, params["embedding"])
    score_BLV = hidden_BLD @ embedding["table"].T + embedding["bias"]
    score_BLV -= score_BLV.max(-1, keepdims=True)
    return score_BLV - np.log(np.exp(score_BLV).sum(-1, keepdims=True)), memory


def nll(
    params: Params, tokens_BL: Array, targets_BL: Array, memory: Memory, **settings: Any
) -> tuple[Array, Memory]:
    """Returns -log p(target) in nats, 0 at padding, and the next memory."""
    logits_BLV, memory = logits(params, tokens_BL, memory, **settings)
    B, L = np.shape(tokens_BL)
    length_B = settings.get("length_B")
    nll_BL = np.zeros((B, L))
    for b in range(B):
        for i in range(L if length_B is None else length_B[b]):
            nll_BL[b, i] = -logits_BLV[b, i, np.asarray(targets_BL)[b, i]]
    return nll_BL, memory


def read(
    params: Params,
    tokens_L: Array,
    first_L: Array,
    layers: list[Array],
    mem_len: int,
    clamp_len: int,
    reach: int,
    pre_lnorm: bool,
) -> tuple[Array, list[Array]]:
    """Reads one stream's real tokens: returns its output h_LD and its next memory.

    The memory keeps each layer's input, not normalised (embeddings for the first).
    `reach` is mem_len with same_length, else 0: see `visible_keys`.
    """
    params = _map(_float64, params)
    table_VD, (M, D) = params["embedding"]["table"], layers[0].shape
    h_LD = table_VD[tokens_L] * math.sqrt(D)
    document_K = [0] * M + [int(number) for number in np.cumsum(first_L)]
    visible_L = [visible_keys(M + i, document_K, reach) for i in range(len(tokens_L))]
    last = document_K[-1]
    document = [key for key, number in enumerate(document_K) if number == last]
    kept = document[max(0, len(document) - mem_len) :]
    next_layers = []
    for n, h_MD in enumerate(layers):
        context_KD = np.concatenate([h_MD, h_LD])
        next_layers.append(context_KD[kept])
        h_LD = block(params, n, context_KD, visible_L, clamp_len, pre_lnorm)
    return h_LD, next_layers


def visible_keys(query: int, document_K: list[int], reach: int) -> list[int]:
    """Returns the keys that a query, which is itself named by its key, may see.

    They are of its document and not in its future. `reach` > 0 (same_length, in the
    PyTorch code's convention) is how many at most: distances 0 to reach - 1.
    """
    return [
        key
        for key in range(query + 1)
        if document_K[key] == document_K[query] and (not reach or query - key < reach)
    ]


def block(
    params: Params,
    n: int,
    context_KD: Array,
    visible_L: list[list[int]],
    clamp_len: int,
    pre_lnorm: bool,
) -> Array:
    """Returns layer n's output h_LD; its input h_LD is the end of the context."""
    layer = _map(lambda leaf: leaf[n], params["layers"])
    attention, feed_forward = layer["attention"], layer["feed_forward"]
    scoring = params["u"], params["w"], clamp_len
    h_LD = context_KD[len(context_KD) - len(visible_L) :]
    if pre_lnorm:
        normal_KD = layer_norm(context_KD, attention["norm"])
        y_LD = h_LD + attend(attention, *scoring, normal_KD, visible_L)
        normal_LD = layer_norm(y_LD, feed_forward["norm"])
        return y_LD + position_wise(feed_forward, normal_LD)
    y_LD = h_LD + attend(attention, *scoring, context_KD, visible_L)
    y_LD = layer_norm(y_LD, attention["norm"])
    return layer_norm(y_LD + position_wise(feed_forward, y_LD), feed_forward["norm"])


def attend(
    attention: Params,
    u_HA: Array,
    w_HA: Array,
    clamp_len: int,
    context_KD: Array,
    visible_L: list[list[int]],
) -> Array:
    """Returns what the last L rows of the context read from it, before the residual."""
    L, (D, H, A) = len(visible_L), attention["q"].shape
    terms_4HLK = four_terms(attention, u_HA, w_HA, clamp_len, context_KD, L)
    output_LD = np.zeros((L, D))
    for i, keys in enumerate(visible_L):
        for h in range(H):
            scores = [sum(terms_4HLK[:, h, i, j]) / math.sqrt(A) for j in keys]
            weights = np.exp(np.array(scores) - max(scores))
            probabilities = weights / sum(weights)
            read_A = np.zeros(A)
            for probability, j in zip(probabilities, keys, strict=True):
                read_A += probability * (context_KD[j] @ attention["v"][:, h])
            output_LD[i] += read_A @ attention["o"][h]
    return output_LD


def four_terms(
    attention: Params,
    u_HA: Array,
    w_HA: Array,
    clamp_len: int,
    context_KD: Array,
    n_query: int,
) -> Array:
    """Returns terms (a) to (d) of A^rel (section 3.3), unscaled, as [4, H, L, K].

    The queries are the last L = n_query rows of the context, `attention` one layer's
    parameters. The paper's matrices W^T are one head's [D, A] here, its v is w. A key
    in a query's future has no distance and no terms: NaN.
    """
    (K, D), (_, H, _) = context_KD.shape, attention["q"].shape
    R = [position_encoding(distance, D, clamp_len) for distance in range(K)]
    terms_4HLK = np.full((4, H, n_query, K), np.nan)
    for h in range(H):
        Wq, Wk, Wr = (attention[name][:, h] for name in "qkr")
        for i in range(K - n_query, K):
            for j in range(i + 1):
                E_i, E_j, R_ij = context_KD[i], context_KD[j], R[i - j]
                terms_4HLK[:, h, i - (K - n_query), j] = (
                    (E_i @ Wq) @ (E_j @ Wk),
                    (E_i @ Wq) @ (R_ij @ Wr),
                    u_HA[h] @ (E_j @ Wk),
                    w_HA[h] @ (R_ij @ Wr),
                )
    return terms_4HLK


def position_encoding(distance: int, d_model: int, clamp_len: int) -> Array:
    """Returns R at a distance: all sines, then all cosines (not interleaved)."""
    position = min(distance, clamp_len) if clamp_len > 0 else distance
    angles = [position * 10000.0 ** (-2 * k / d_model) for k in range(d_model // 2)]
    return np.array([math.sin(x) for x in angles] + [math.cos(x) for x in angles])


def layer_norm(x_LD: Array, norm: Params) -> Array:
    """Normalises each row over its features."""
    centred_LD = x_LD - x_LD.mean(-1, keepdims=True)
    variance_L1 = (centred_LD**2).mean(-1, keepdims=True)
    return centred_LD / np.sqrt(variance_L1 + 1e-5) * norm["scale"] + norm["bias"]


def position_wise(feed_forward: Params, y_LD: Array) -> Array:
    """Returns the feed-forward network's output, before the residual."""
    inner, outer = feed_forward["in"], feed_forward["out"]
    inner_LF = np.maximum(y_LD @ inner["kernel"] + inner["bias"], 0.0)
    return inner_LF @ outer["kernel"] + outer["bias"]


def _map(function: Callable[[Any], Any], tree: Any) -> Any:
    if isinstance(tree, dict):
        return {name: _map(function, branch) for name, branch in tree.items()}
    return function(tree)
