"""Retrieval from a store in numpy (Wu et al. 2022, section 3): `reference`, extended.

Dims: L tokens of the segment, K keys of the local attention, Y tokens of the store and
of the segment, D d_model, H heads, A size of a head.
"""

import math
from functools import partial
from typing import Any
from unittest import mock

import numpy as np

from tests import reference
from tests.reference import Array, Params, Settings
from tests.support.reference_vocabulary import log_probs

Stored = list[tuple[Array, Array]]  # each token's k_HA and v_HA, oldest first


def unit(x_A: Array) -> Array:
    """Divides by the root of the mean square."""
    return x_A / math.sqrt(np.mean(x_A**2) + 1e-6)


class Stream:
    """One stream: its memory, and the store of layer `layer`, counted from 0."""

    def __init__(
        self, params: Params, layer: int, size: int, top_k: int, **fields: Any
    ):
        self.params, self.layer, self.size, self.top_k = params, layer, size, top_k
        self.settings = Settings(**fields)
        N, *_, D = params["layers"]["attention"]["q"].shape
        self.memory = reference.empty(N, 1, D)[0]
        self.stored: Stored = []

    def nll(self, tokens_L: Array, targets_L: Array, first_L: Array) -> Array:
        """Returns the nll of real tokens, and keeps memory and store after them."""
        hidden_LD = self.read(tokens_L, first_L)
        table, cutoffs = self.params["embedding"], self.settings.cutoffs
        table = {name: np.asarray(x, np.float64) for name, x in table.items()}
        rows = zip(hidden_LD, targets_L, strict=True)
        return np.array([-log_probs(table, cutoffs, h_D)[t] for h_D, t in rows])

    def read(self, tokens_L: Array, first_L: Array) -> Array:
        """Returns the last layer's output."""
        block, attend = reference.block, reference.attend
        gate_H = 1 / (1 + np.exp(-np.asarray(self.params["retrieval_gate"], float)))
        mixed = partial(self.attend, attend, gate_H, np.cumsum(first_L))

        def at_layer(params: Params, n: int, *context: Any) -> Array:
            with mock.patch.object(
                reference, "attend", mixed if n == self.layer else attend
            ):
                return block(params, n, *context)

        with mock.patch.object(reference, "block", at_layer):
            hidden_LD, self.memory = reference.read(
                self.params, tokens_L, first_L, self.memory, self.settings
            )
        return hidden_LD

    def attend(
        self,
        attend: Any,
        gate_H: Array,
        document_L: Array,
        weights: Params,
        u_HA: Array,
        w_HA: Array,
        settings: Settings,
        context_KD: Array,
        visible_L: list[list[int]],
    ) -> Array:
        """Returns the segment's attention, local and from the store."""
        L, before = len(visible_L), len(self.stored)
        memory = len(context_KD) - L
        own_LD = context_KD[memory:]

        def head(name: str, x_D: Array) -> Array:
            x_HA = weights[name] @ x_D
            if name != "v" and "q_norm" in weights:
                norm = weights[f"{name}_norm"]
                x_HA = reference.layer_norm(x_HA, norm, settings.layer_norm_epsilon)
            return x_HA if name == "v" else np.array([unit(x_A) for x_A in x_HA])

        entries = [*self.stored, *((head("k", x_D), head("v", x_D)) for x_D in own_LD)]
        document_Y = [0] * before + [int(number) for number in document_L]
        local = partial(attend, u_HA=u_HA, w_HA=w_HA, settings=settings)
        keys = {"context_KD": context_KD, "visible_L": visible_L}
        out_LD = local(weights, **keys)
        shut = {**weights, "o": weights["o"] * (1 - gate_H)[:, None, None]}
        shut_LD = local(shut, **keys)
        for i in range(L):
            query, oldest_local = before + i, min(visible_L[i]) - memory + before
            far = [
                y
                for y in range(max(query - self.size, 0), min(query, oldest_local))
                if document_Y[y] == document_Y[query]
            ]
            if not far:
                continue
            out_LD[i] = shut_LD[i]
            q_HA = head("q", own_LD[i])
            for h, q_A in enumerate(q_HA):
                score = {y: q_A @ entries[y][0][h] for y in far}
                best = sorted(far, key=score.__getitem__, reverse=True)[: self.top_k]
                p = np.exp([score[y] / math.sqrt(len(q_A)) for y in best])
                read_A = p @ [entries[y][1][h] for y in best] / sum(p)
                out_LD[i] += gate_H[h] * read_A @ weights["o"][h]
        kept = [y for y, number in enumerate(document_Y) if number == document_Y[-1]]
        self.stored = [entries[y] for y in kept][-self.size :]
        return out_LD
