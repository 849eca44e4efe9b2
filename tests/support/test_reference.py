"""The oracle, where no published model proves it, against identities that must hold.

`tests.promises.test_published_models` compares it with Hugging Face's code: the paper's
positions, every vocabulary, a memory of zeros. Here are padding, a memory that starts
empty, and learned distances, of which the paper's are a case.

Dims: as in `tests.reference`; T tokens of several segments, P rows of a learned table.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from tests import reference
from tests.reference import Array, Params
from tests.support import tiny
from txl_jax.model.config import ModelConfig

B, T, D, N = 2, 12, tiny.D, tiny.N
TOKENS_BT = tiny.make_tokens(B, T)
ONE_PASS, SEGMENTS = [0, T], [0, 4, 5, 9, T]
TIGHT = 1e-10  # float64: the same sums in another order


def read(
    config: ModelConfig,
    params: Params,
    cuts: Sequence[int] = SEGMENTS,
    tokens_BT: Array = TOKENS_BT,
    first_BT: Array | None = None,
) -> tuple[Array, reference.Memory]:
    """Reads from an empty memory, one segment from each cut to the next."""
    first_BT = np.zeros(tokens_BT.shape, bool) if first_BT is None else first_BT
    memory, pieces = reference.empty(N, len(tokens_BT), D), []
    for begin, end in pairwise(cuts):
        piece_BLD, memory = reference.forward(
            params,
            tokens_BT[:, begin:end],
            memory,
            first_BL=first_BT[:, begin:end],
            **tiny.reference_settings(config),
        )
        pieces.append(piece_BLD)
    return np.concatenate(pieces, 1), memory


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"mem_len": 4, "same_length": True},
        {"position": "shaw", "n_position": 5},
        {"position": "shaw_biased", "n_position": T},
        {"position": "none"},
    ],
    ids=str,
)
def test_segments_equal_one_long_pass(changes: dict[str, Any]) -> None:
    config = tiny.config(**{"mem_len": T, **changes})
    params = tiny.make_params(config)
    expected = read(config, params, ONE_PASS)
    tiny.assert_close(read(config, params), expected, TIGHT)


@pytest.mark.parametrize("clamp_len", [0, 3])
def test_sinusoids_equal_matching_learned_distances(clamp_len: int) -> None:
    """With the vectors W R, the biases w W R and u, shaw_biased is the paper's."""
    paper = tiny.config(untie_r=True, clamp_len=clamp_len)
    params = tiny.make_params(paper)
    expected_BTD, _ = read(paper, params)
    attention = params["layers"]["attention"]
    R_PD = [reference.position_encoding(T - 1 - row, D, 0) for row in range(T)]
    r_NPHA = np.einsum("PD,NHAD->NPHA", R_PD, attention.pop("r"))
    attention["distances"] = r_NPHA
    attention["distance_bias"] = np.einsum("NPHA,NHA->NPH", r_NPHA, params.pop("w"))
    shaw = tiny.config(position="shaw_biased", n_position=T, clamp_len=clamp_len)
    tiny.assert_close(read(shaw, params)[0], expected_BTD, TIGHT)


def test_padding_is_never_read() -> None:
    params = tiny.make_params()
    settings: dict[str, Any] = {"mem_len": 6}
    tokens_BL, targets_BL = tiny.make_tokens(3, 5), tiny.make_tokens(3, 5, 2)
    _, memory = reference.forward(
        params, tiny.make_tokens(3, 3, 4), reference.empty(N, 3, D), **settings
    )
    length_B, first_BL = np.array([5, 2, 0]), np.zeros((3, 5), bool)
    first_BL[:, 4] = True  # in the padding of streams 1 and 2, where it has no effect

    def read(streams: slice, **more: Any) -> tuple[Array, reference.Memory]:
        length = more.get("length_B", length_B[streams])[0]
        inputs_BL, outputs_BL, starts_BL = (
            x_BL[streams, :length] for x_BL in (tokens_BL, targets_BL, first_BL)
        )
        more |= {**settings, "first_BL": starts_BL}
        return reference.nll(params, inputs_BL, outputs_BL, memory[streams], **more)

    nll_BL, after = read(slice(3), length_B=length_B)
    assert [len(layers[0]) for layers in after] == [1, 5, 3]
    for b, length in enumerate(length_B):
        expected_1L, expected = read(slice(b, b + 1))
        tiny.assert_close(nll_BL[b, :length], expected_1L[0], TIGHT)
        assert (nll_BL[b, length:] == 0).all()
        tiny.assert_close(after[b : b + 1], expected, TIGHT)
