"""Fast weights in numpy, token by token: `reference`, extended.

Every query computes its matrices again, from all states of its document that are older
than the memory.

Dims: L tokens of the segment, K keys, D d_model, H heads, A size of a head.
"""

from functools import partial
from typing import Any
from unittest import mock

import numpy as np

from tests import reference
from tests.reference import Array, Params, Settings
from tests.support.reference_vocabulary import log_probs


def logistic(x: Array) -> Array:
    return 1 / (1 + np.exp(-x))


def feature(k_HA: Array) -> Array:
    """Returns unit(silu(k))."""
    x_HA = k_HA * logistic(k_HA)
    return x_HA / np.sqrt(np.sum(x_HA**2, axis=-1, keepdims=True) + 1e-6)


class Stream:
    """One stream: its memory, and all states of each layer's current document."""

    def __init__(self, params: Params, **fields: Any):
        self.params, self.settings = params, Settings(**fields)
        N, *_, D = params["layers"]["attention"]["q"].shape
        self.memory = reference.empty(N, 1, D)[0]
        self.states: list[list[Array]] = [[] for _ in range(N)]

    def nll(self, tokens_L: Array, targets_L: Array, first_L: Array) -> Array:
        """Returns the nll of real tokens, and keeps memory and states after them."""
        hidden_LD = self.read(tokens_L, first_L)
        table, cutoffs = self.params["embedding"], self.settings.cutoffs
        table = {name: np.asarray(x, np.float64) for name, x in table.items()}
        rows = zip(hidden_LD, targets_L, strict=True)
        return np.array([-log_probs(table, cutoffs, h_D)[t] for h_D, t in rows])

    def read_text(self, text_T: Array, tgt_len: int) -> Array:
        """Returns the nll of all tokens but the first, in segments."""
        parts = []
        for at in range(0, len(text_T) - 1, tgt_len):
            text_L = text_T[at : at + tgt_len + 1]
            none_L = np.zeros(len(text_L) - 1, bool)
            parts.append(self.nll(text_L[:-1], text_L[1:], none_L))
        return np.concatenate(parts)

    def read(self, tokens_L: Array, first_L: Array) -> Array:
        """Returns the last layer's output."""
        block, attend = reference.block, reference.attend

        def at_layer(params: Params, n: int, *context: Any) -> Array:
            mixed = partial(self.attend, attend, n, first_L)
            with mock.patch.object(reference, "attend", mixed):
                return block(params, n, *context)

        with mock.patch.object(reference, "block", at_layer):
            hidden_LD, self.memory = reference.read(
                self.params, tokens_L, first_L, self.memory, self.settings
            )
        return hidden_LD

    def attend(
        self,
        attend: Any,
        n: int,
        first_L: Array,
        weights: Params,
        u_HA: Array,
        w_HA: Array,
        settings: Settings,
        context_KD: Array,
        visible_L: list[list[int]],
    ) -> Array:
        """Returns what the segment reads, from the memory and from the matrices."""
        out_LD = attend(weights, u_HA, w_HA, settings, context_KD, visible_L)

        def key(x_D: Array) -> Array:
            k_HA = weights["k"] @ x_D
            if "k_norm" in weights:
                norm, epsilon = weights["k_norm"], settings.layer_norm_epsilon
                k_HA = reference.layer_norm(k_HA, norm, epsilon)
            return feature(k_HA)

        def rate(name: str, x_D: Array) -> Array:
            dense = weights["fast"][name]
            return logistic(x_D @ dense["kernel"] + dense["bias"])

        for i, x_D in enumerate(context_KD[len(context_KD) - len(visible_L) :]):
            self.states[n] = [*([] if first_L[i] else self.states[n]), x_D]
            older = self.states[n][: -1 - settings.mem_len]
            H, A, _ = weights["v"].shape
            S_HAA = np.zeros((H, A, A))
            k_HA = key(older[0]) if older else np.zeros((H, A))
            for old_D in older:
                S_HAA *= rate("decay", old_D)[:, None, None]
                error_HA = weights["v"] @ old_D - np.einsum("hua,ha->hu", S_HAA, k_HA)
                written_HA = rate("write", old_D)[:, None] * error_HA
                S_HAA += np.einsum("hu,ha->hua", written_HA, k_HA)
                k_HA = key(old_D)
            read_HA = np.einsum("hua,ha->hu", S_HAA, key(x_D))
            gated_HA = rate("gate", x_D)[:, None] * read_HA
            out_LD[i] += np.einsum("ha,had->d", gated_HA, weights["o"])
        return out_LD
