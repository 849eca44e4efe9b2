"""The compressive memory in numpy (Rae et al. 2019, section 3), for `tests.reference`.

A stream's memory is a list of states, and its compressed memory a list of slots, oldest
first. None replaces hidden entries: states before the text or document, and slots that
contain such states.

Dims: as in `tests.reference`; Z compressed slots, C states of a block.
"""

import dataclasses
import math
from typing import Any

import numpy as np

from tests import reference
from tests.reference import Array, Params
from tests.support.reference_vocabulary import log_probs

State = Array | None


class Stream:
    """One stream's memories in every layer."""

    def __init__(self, params: Params, config: Any) -> None:
        self.params = reference._map(reference._float64, params)
        self.config = config
        known = {field.name for field in dataclasses.fields(reference.Settings)}
        fields = {name: getattr(config, name) for name in known}
        # The transcription of the paper must not drop any state.
        self.settings = reference.Settings(**fields | {"mem_len": 10**6})
        N = config.n_layer
        self.states: list[list[State]] = [[None] * config.mem_len for _ in range(N)]
        self.slots: list[list[State]] = [[] for _ in range(N)]

    @property
    def visible(self) -> list[Array]:
        """Returns each layer's visible slots and states."""
        D = self.config.d_model
        layers = []
        for slots, states in zip(self.slots, self.states, strict=True):
            seen = [x for x in slots + states if x is not None]
            assert all(x is None for x in (slots + states)[: -len(seen) or None])
            layers.append(np.array(seen).reshape(-1, D))
        return layers

    def read(self, tokens_L: Array, first_L: Array) -> tuple[Array, float]:
        """Returns (h_LD, the reconstruction error) of a segment's real tokens."""
        L, C = len(tokens_L), self.config.compression_rate
        read = reference.read(
            self.params, tokens_L, first_L, self.visible, self.settings
        )
        starts = np.flatnonzero(first_L)
        seen = L - starts[-1] if len(starts) else L
        error = 0.0
        for n, h_KD in enumerate(read[1]):
            if len(starts):
                self.states[n] = [None] * len(self.states[n])
                self.slots[n] = [None] * len(self.slots[n])
            self.states[n] += [None] * (L - seen) + list(h_KD[len(h_KD) - seen :])
            old: list[Array] = []
            new: list[Array] = []
            while len(self.states[n]) >= self.config.mem_len + C:
                block, self.states[n] = self.states[n][:C], self.states[n][C:]
                whole = [state for state in block if state is not None]
                slot = self.compress(n, np.array(whole)) if len(whole) == C else None
                if slot is not None:
                    old, new = old + whole, [*new, slot]
                self.slots[n] = [*self.slots[n], slot][-self.config.compressed_len :]
            if new and seen == L:
                h_LD = h_KD[len(h_KD) - L :]
                error += self.difference(n, h_LD, np.array(old), np.array(new))
        return read[0], error

    def nll(self, text_T: Array, tgt_len: int = 1) -> Array:
        """Returns the nll of all tokens but the first, in segments of tgt_len."""
        losses = []
        for at in range(0, len(text_T) - 1, tgt_len):
            inputs_L = text_T[at : min(at + tgt_len, len(text_T) - 1)]
            h_LD, _ = self.read(inputs_L, np.zeros(len(inputs_L), bool))
            for h_D, target in zip(h_LD, text_T[at + 1 :], strict=False):
                losses.append(-log_probs(self.params["embedding"], (), h_D)[target])
        return np.array(losses)

    def compress(self, n: int, block_CD: Array) -> Array:
        """Returns f_c of the states of a block."""
        if self.config.compression == "mean":
            return block_CD.sum(axis=0) / len(block_CD)
        if self.config.compression == "max":
            return np.max(block_CD, axis=0)
        conv_CDD = self.params["layers"]["compression"]["conv"][n]
        products = [h_D @ w_DD for h_D, w_DD in zip(block_CD, conv_CDD, strict=True)]
        return np.sum(products, axis=0)

    def difference(self, n: int, h_LD: Array, old: Array, new: Array) -> float:
        """Returns the mean square of attn(h, old) - attn(h, new)."""
        p = reference._map(lambda x: x[n], self.params["layers"]["attention"])
        epsilon = self.config.layer_norm_epsilon
        if self.config.pre_lnorm:
            h_LD, old, new = (
                reference.layer_norm(x, p["norm"], epsilon) for x in (h_LD, old, new)
            )

        def product(x: Array, name: str, head: int) -> Array:
            y = x @ p[name][head].T
            norm = p.get(f"{name}_norm")
            return y if norm is None else reference.layer_norm(y, norm, epsilon)

        def attend(m_KD: Array, head: int) -> Array:
            q_LA = product(h_LD, "q", head)
            score_LK = q_LA @ product(m_KD, "k", head).T / math.sqrt(q_LA.shape[1])
            e_LK = np.exp(score_LK)
            return e_LK / e_LK.sum(1, keepdims=True) @ product(m_KD, "v", head)

        heads = range(self.config.n_head)
        return float(np.mean([(attend(old, h) - attend(new, h)) ** 2 for h in heads]))
