"""The paper's Transformer-XL in numpy, slow and literal: the oracle of every test.

Dai et al. 2019, sections 3.2 and 3.3, and the variants that the released code bases
have. Each score is written as the paper's four terms, for one query and one key, at
their own distance: there is no relative shift, no mask array and no padded memory here.
A token that may not be seen is never visited.

Everything is float64 and deterministic (no dropout). A stream is a batch row; streams
never interact, so all of the mathematics below is written for one stream.

Dims: B streams, L tokens of the segment, M tokens that a stream remembers (ragged: from
0 up to mem_len), K = M + L keys, D d_model, H heads, A size of a head, F d_inner, V
vocabulary, N layers, P rows of a learned table, 4 the terms (a) to (d).
"""

import dataclasses
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from tests.support import reference_gate
from tests.support.reference_positions import at_distance, position_encoding, rotated
from tests.support.reference_vocabulary import embed, log_probs

Array = np.ndarray[Any, np.dtype[Any]]
Params = dict[str, Any]
# memory[stream][layer] is h_MD: that layer's inputs, oldest first.
Memory = list[list[Array]]

_float64 = partial(np.asarray, dtype=np.float64)


@dataclasses.dataclass(frozen=True)
class Settings:
    """The settings that a model's parameters do not show, named as in its config."""

    mem_len: int
    clamp_len: int = 0
    same_length: bool = False
    same_length_self: bool = False
    pre_lnorm: bool = False
    layer_norm_epsilon: float = 1e-5
    position: str = "transformer_xl"
    feed_forward: str = "relu"
    cutoffs: tuple[int, ...] = ()

    @property
    def reach(self) -> int:
        """The largest number of keys that a query sees, its own included; 0 = no bound.

        same_length means mem_len keys in the PyTorch and Hugging Face code, and one
        more in TensorFlow's and NVIDIA's (same_length_self).
        """
        return self.mem_len + self.same_length_self if self.same_length else 0


def empty(n_layer: int, batch: int, d_model: int) -> Memory:
    """Returns the memory of streams that have read nothing."""
    return [[np.zeros((0, d_model)) for _ in range(n_layer)] for _ in range(batch)]


def zeros(n_layer: int, batch: int, d_model: int, mem_len: int) -> Memory:
    """Returns a memory of mem_len zeros, which are visible like any token.

    The TensorFlow and Hugging Face code start so: contents score 0, positions count.
    """
    return [
        [np.zeros((mem_len, d_model)) for _ in range(n_layer)] for _ in range(batch)
    ]


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
    first_BL: Array | None = None,
    length_B: Array | None = None,
    **fields: Any,
) -> tuple[Array, Memory]:
    """Reads one segment: returns the last layer's output and the next memory.

    `fields` are `Settings`' fields. `first_BL` marks tokens that start a document,
    `length_B` counts the real tokens. Padding is never read: its rows of the output are
    zeros. The given memory, of at most mem_len tokens, is left as it was.
    """
    settings = Settings(**fields)
    B, L = np.shape(tokens_BL)
    first_BL = np.zeros((B, L), bool) if first_BL is None else np.asarray(first_BL)
    length_B = np.full(B, L) if length_B is None else np.asarray(length_B)
    hidden_BLD = np.zeros((B, L, memory[0][0].shape[1]))
    next_memory = list(memory)
    for b, length in enumerate(length_B):
        if length > 0:
            tokens_L, first_L = np.asarray(tokens_BL)[b, :length], first_BL[b, :length]
            hidden_BLD[b, :length], next_memory[b] = read(
                params, tokens_L, first_L, memory[b], settings
            )
    return hidden_BLD, next_memory


def logits(
    params: Params, tokens_BL: Array, memory: Memory, **settings: Any
) -> tuple[Array, Memory]:
    """Returns log-probabilities [B, L, V] and the next memory; see `forward`.

    A tied softmax has the embedding's tables, without their factor sqrt(D), and its own
    bias. Rows of padding hold the log-probabilities of a zero hidden state.
    """
    hidden_BLD, memory = forward(params, tokens_BL, memory, **settings)
    embedding = _map(_float64, params["embedding"])
    cutoffs = settings.get("cutoffs", ())
    logits_BLV = [
        [log_probs(embedding, cutoffs, hidden_D) for hidden_D in hidden_LD]
        for hidden_LD in hidden_BLD
    ]
    return np.array(logits_BLV), memory


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
    settings: Settings,
) -> tuple[Array, list[Array]]:
    """Reads one stream's real tokens: returns its output h_LD and its next memory.

    The memory keeps each layer's input, not normalized (embeddings for the first).
    """
    params, M = _map(_float64, params), len(layers[0])
    h_LD = embeddings(params, tokens_L, settings)
    document_K = [0] * M + [int(number) for number in np.cumsum(first_L)]
    visible_L = [
        visible_keys(M + i, document_K, settings.reach) for i in range(len(tokens_L))
    ]
    last = document_K[-1]
    document = [key for key, number in enumerate(document_K) if number == last]
    kept = document[max(0, len(document) - settings.mem_len) :]
    next_layers = []
    for n, h_MD in enumerate(layers):
        if (
            settings.position == "learned"
        ):  # Al-Rfou et al.: each layer adds its positions
            h_LD = h_LD + [params["layers"]["places"][n, i] for i in range(len(h_LD))]
        context_KD = np.concatenate([h_MD, h_LD])
        h_LD = block(params, n, context_KD, visible_L, settings)
        next_layers.append(context_KD[kept])
    return h_LD, next_layers


def embeddings(params: Params, tokens_L: Array, settings: Settings) -> Array:
    """Returns the first layer's input h_LD.

    Vaswani et al. add the sinusoid of each token's place, counted from 0 at the start
    of its segment.
    """
    D = params["layers"]["attention"]["q"].shape[-1]
    rows = [embed(params["embedding"], settings.cutoffs, t, D) for t in tokens_L]
    if settings.position == "sinusoidal":
        rows = [row_D + position_encoding(i, D, 0) for i, row_D in enumerate(rows)]
    return np.array(rows)


def visible_keys(query: int, document_K: list[int], reach: int) -> list[int]:
    """Returns the keys that a query may see; the query is given by its own key.

    They are in its document and not in its future. `reach` > 0 (same_length) is their
    largest number: distances 0 to reach - 1.
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
    settings: Settings,
) -> Array:
    """Returns layer n's output h_LD; its input h_LD is the end of the context."""
    layer = _map(lambda leaf: leaf[n], params["layers"])
    attention, feed_forward = layer["attention"], layer["feed_forward"]
    shape_HA = attention["q"].shape[:2]
    u_HA, w_HA = (layer_bias(params.get(name), n, shape_HA) for name in "uw")
    norm = partial(layer_norm, epsilon=settings.layer_norm_epsilon)
    position_wise = partial(feed, settings.feed_forward)
    read_from = partial(attend, attention, u_HA, w_HA, settings)
    h_LD = context_KD[len(context_KD) - len(visible_L) :]
    if settings.pre_lnorm:
        normal_KD = norm(context_KD, attention["norm"])
        y_LD = reference_gate.add(attention, h_LD, read_from(normal_KD, visible_L))
        fed_LD = position_wise(feed_forward, norm(y_LD, feed_forward["norm"]))
        return reference_gate.add(feed_forward, y_LD, fed_LD)
    y_LD = norm(h_LD + read_from(context_KD, visible_L), attention["norm"])
    return norm(y_LD + position_wise(feed_forward, y_LD), feed_forward["norm"])


def layer_bias(bias: Array | None, n: int, shape_HA: tuple[int, int]) -> Array:
    """Returns layer n's u or w: its own (untied), the shared one, or zeros."""
    if bias is None:
        return np.zeros(shape_HA)
    return bias if bias.ndim == 2 else bias[n]


def attend(
    attention: Params,
    u_HA: Array,
    w_HA: Array,
    settings: Settings,
    context_KD: Array,
    visible_L: list[list[int]],
) -> Array:
    """Returns the attention of the last L rows to the context, before the residual."""
    L, (H, A, D) = len(visible_L), attention["q"].shape
    terms_4HLK = four_terms(attention, u_HA, w_HA, settings, context_KD, L)
    output_LD = np.zeros((L, D))
    for i, keys in enumerate(visible_L):
        for h in range(H):
            scores = [sum(terms_4HLK[:, h, i, j]) / math.sqrt(A) for j in keys]
            weights = np.exp(np.array(scores) - max(scores))
            probabilities = weights / sum(weights)
            read_A = np.zeros(A)
            for probability, j in zip(probabilities, keys, strict=True):
                read_A += probability * (attention["v"][h] @ context_KD[j])
            output_LD[i] += read_A @ attention["o"][h]
    return output_LD


def four_terms(
    attention: Params,
    u_HA: Array,
    w_HA: Array,
    settings: Settings,
    context_KD: Array,
    n_query: int,
) -> Array:
    """Returns terms (a) to (d) of A^rel (section 3.3), unscaled, as [4, H, L, K].

    The queries are the last L = n_query rows of the context, `attention` has one
    layer's parameters. The paper's matrices W are one head's [A, D] here, its W R is r,
    its v is w. A key in a query's future has no distance and no terms: NaN.
    """
    K, H = len(context_KD), attention["q"].shape[0]
    where = settings.position, attention, w_HA, settings.clamp_len
    epsilon = settings.layer_norm_epsilon
    terms_4HLK = np.full((4, H, n_query, K), np.nan)
    for h in range(H):
        Wq, Wk = attention["q"][h], attention["k"][h]
        near = [at_distance(*where, distance, h) for distance in range(K)]
        for i in range(K - n_query, K):
            for j in range(i + 1):
                E_i, E_j, (r_ij, bias_ij) = context_KD[i], context_KD[j], near[i - j]
                q_i, k_j = Wq @ E_i, Wk @ E_j
                if "q_norm" in attention:
                    q_i = layer_norm(q_i, attention["q_norm"], epsilon)
                    k_j = layer_norm(k_j, attention["k_norm"], epsilon)
                k_j = rotated(settings.position, k_j, i - j)
                terms_4HLK[:, h, i - (K - n_query), j] = (
                    q_i @ k_j,
                    q_i @ r_ij,
                    u_HA[h] @ k_j,
                    bias_ij,
                )
    return terms_4HLK


def layer_norm(x_LD: Array, norm: Params, epsilon: float) -> Array:
    """Normalizes each row over its features; without a bias it is RMSNorm."""
    bias = norm.get("bias")
    centred_LD = x_LD if bias is None else x_LD - x_LD.mean(-1, keepdims=True)
    variance_L1 = (centred_LD**2).mean(-1, keepdims=True)
    scaled_LD = centred_LD / np.sqrt(variance_L1 + epsilon) * norm["scale"]
    return scaled_LD if bias is None else scaled_LD + bias


def feed(kind: str, feed_forward: Params, y_LD: Array) -> Array:
    """Returns the feed-forward network's output, before the residual."""

    def dense(name: str, x: Array) -> Array:
        return x @ feed_forward[name]["kernel"] + feed_forward[name]["bias"]

    inner_LF = dense("in", y_LD)
    if kind == "relu":
        return dense("out", np.maximum(inner_LF, 0.0))
    x_LF = dense("gate", y_LD)
    # GELU by tanh, written as a logistic function of twice its argument.
    cubic_LF = math.sqrt(8 / math.pi) * (x_LF + 0.044715 * x_LF**3)
    gate_LF = x_LF / (1 + np.exp(-(cubic_LF if kind == "geglu" else x_LF)))
    return dense("out", gate_LF * inner_LF)


def _map(function: Callable[[Any], Any], tree: Any) -> Any:
    if isinstance(tree, dict):
        return {name: _map(function, branch) for name, branch in tree.items()}
    return function(tree)
