"""Memory tokens in numpy (Bulatov et al. 2022, decoder form): `reference`, extended.

Dims: as in `tests.reference`; W memory tokens, T = 2 W + L.
"""

from typing import Any

import numpy as np

from tests import reference
from tests.reference import Array, Params
from tests.support.reference_vocabulary import log_probs


class Stream:
    """One stream: each layer's memory of text, and the next memory tokens.

    tokens_WD is None at the start, when the learned tokens are read.
    """

    def __init__(self, params: Params, mem_len: int, **fields: Any) -> None:
        self.params = reference._map(reference._float64, params)
        self.settings = reference.Settings(mem_len, **fields)
        N, *_, D = self.params["layers"]["attention"]["q"].shape
        self.text = reference.empty(N, 1, D)[0]
        self.tokens_WD: Array | None = None

    def read(self, tokens_L: Array, first_L: Array | None = None) -> Array:
        """Returns the last layer's output h_LD of a segment's real tokens."""
        L, starts = len(tokens_L), first_L is not None and first_L.any()
        first_L = np.zeros(L, bool) if first_L is None else first_L
        learned_WD = self.params["memory_tokens"]
        before_WD = learned_WD if self.tokens_WD is None else self.tokens_WD
        read_WD = learned_WD if first_L[0] else before_WD
        write_WD = learned_WD if starts else before_WD
        W, M = len(learned_WD), len(self.text[0])
        number_L = np.cumsum(first_L)
        # The memory tokens belong to the document at the segment's start.
        documents = [0] * M + [number_L[0]] * W + [*number_L] + [number_L[-1]] * W
        visible_T = [
            reference.visible_keys(key, documents, 0)
            for key in range(M, len(documents))
        ]
        is_text = [True] * M + [False] * W + [True] * L + [False] * W
        kept = [
            key
            for key, number in enumerate(documents)
            if is_text[key] and number == number_L[-1]
        ]
        kept = kept[max(len(kept) - self.settings.mem_len, 0) :]
        h_LD = reference.embeddings(self.params, tokens_L, self.settings)
        h_TD, after = np.concatenate([read_WD, h_LD, write_WD]), []
        for n, h_MD in enumerate(self.text):
            h_KD = np.concatenate([h_MD, h_TD])
            after.append(h_KD[kept])
            h_TD = reference.block(self.params, n, h_KD, visible_T, self.settings)
        self.text, self.tokens_WD = after, h_TD[W + L :]
        return h_TD[W : W + L]

    def nll(
        self, tokens_L: Array, targets_L: Array, first_L: Array | None = None
    ) -> Array:
        """Returns the nll of a segment's targets."""
        table, cutoffs = self.params["embedding"], self.settings.cutoffs
        rows = zip(self.read(tokens_L, first_L), targets_L, strict=True)
        return np.array([-log_probs(table, cutoffs, h_D)[t] for h_D, t in rows])

    def read_text(self, text_T: Array, tgt_len: int) -> Array:
        """Returns the nll of all tokens but the first, in segments of tgt_len."""
        cuts = range(tgt_len, len(text_T) - 1, tgt_len)
        parts = zip(
            np.split(text_T[:-1], cuts), np.split(text_T[1:], cuts), strict=True
        )
        return np.concatenate([self.nll(*part) for part in parts])
