"""The oracle's learned distances, which no published model proves.

`tests.promises.test_published_models` compares the oracle with Hugging Face's code, and
`tests.model.test_txl` the model with the oracle.

Dims: as in `tests.reference`; T tokens, P rows of a learned table.
"""

import numpy as np
import pytest

from tests import reference
from tests.reference import Array, Params
from tests.support import tiny
from txl_jax.model.config import ModelConfig

T, D = 12, tiny.D


def read(config: ModelConfig, params: Params) -> Array:
    """Returns the hidden states of three segments, read from an empty memory."""
    tokens_BT = tiny.make_tokens(2, T)
    memory, pieces = reference.empty(tiny.N, 2, D), []
    for begin in range(0, T, 4):
        piece_BLD, memory = reference.forward(
            params,
            tokens_BT[:, begin : begin + 4],
            memory,
            **tiny.reference_settings(config),
        )
        pieces.append(piece_BLD)
    return np.concatenate(pieces, 1)


@pytest.mark.parametrize("clamp_len", [0, 3])
def test_sinusoids_equal_matching_learned_distances(clamp_len: int) -> None:
    """With the vectors W R, the biases w W R and u, shaw_biased is the paper's."""
    paper = tiny.config(untie_r=True, clamp_len=clamp_len)
    params = tiny.make_params(paper)
    expected_BTD = read(paper, params)
    attention = params["layers"]["attention"]
    R_PD = [reference.position_encoding(T - 1 - row, D, 0) for row in range(T)]
    r_NPHA = np.einsum("PD,NHAD->NPHA", R_PD, attention.pop("r"))
    attention["distances"] = r_NPHA
    attention["distance_bias"] = np.einsum("NPHA,NHA->NPH", r_NPHA, params.pop("w"))
    shaw = tiny.config(position="shaw_biased", n_position=T, clamp_len=clamp_len)
    # In float64: the same sums in another order.
    tiny.assert_close(read(shaw, params), expected_BTD, 1e-10)
