"""The oracle, where no published model proves it, against identities that must hold.

`tests.promises.test_published_models` compares it with Hugging Face's code: the paper's
positions, every vocabulary, a memory of zeros. Here are the other positions, documents,
padding and a memory that starts empty.

Dims: as in `tests.reference`; T tokens of several segments, P rows of a learned table.
"""

import dataclasses
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


def test_distances_are_clamped_at_the_farthest() -> None:
    """Of the table (its first row; the last has distance 0), and of clamp_len."""
    config = tiny.config(position="shaw", n_position=T, mem_len=T)
    params = tiny.make_params(config)
    attention, farthest = params["layers"]["attention"], 3
    clamped_BTD, _ = read(dataclasses.replace(config, clamp_len=farthest), params)
    table_NPHA, first = attention["distances"], T - 1 - farthest
    attention["distances"] = table_NPHA[:, first:]
    short_BTD, _ = read(config, params)
    table_NPHA[:, :first] = table_NPHA[:, first, None]
    attention["distances"] = table_NPHA
    expected_BTD, _ = read(config, params)
    tiny.assert_close(short_BTD, expected_BTD, TIGHT)
    tiny.assert_close(clamped_BTD, expected_BTD, TIGHT)


def test_learned_positions_are_added_to_every_layer() -> None:
    learned, sinusoidal, none = (
        tiny.config(position=position, mem_len=0, n_position=P)
        for position, P in (("learned", T), ("sinusoidal", 0), ("none", 0))
    )
    params = tiny.make_params(learned)
    places_NPD = params["layers"]["places"] = np.zeros((N, T, D))
    sinusoidal_BTD, none_BTD = (read(each, params)[0] for each in (sinusoidal, none))
    for layer in range(N):
        places_NPD[:] = 0
        places_NPD[layer] = [reference.position_encoding(i, D, 0) for i in range(T)]
        learned_BTD, _ = read(learned, params)
        same_BT = np.abs(learned_BTD - sinusoidal_BTD).max(-1) < TIGHT
        assert same_BT.all() == (layer == 0)
        assert (np.abs(learned_BTD - none_BTD).max(-1) > 1e-6).all()


def test_absolute_positions_start_at_the_segment() -> None:
    params = tiny.make_params(tiny.config(position="none"))
    tokens_BT = np.tile(TOKENS_BT[:, :4], 2)
    config = tiny.config(position="sinusoidal", mem_len=0)
    hidden_BTD, _ = read(config, params, [0, 4, 8], tokens_BT)
    tiny.assert_close(hidden_BTD[:, 4:], hidden_BTD[:, :4], TIGHT)


def test_same_length_includes_the_query_itself() -> None:
    params = tiny.make_params()
    wide = tiny.config(mem_len=4, same_length=True)
    narrow = tiny.config(mem_len=3, same_length=True, same_length_self=True)
    tiny.assert_close(read(wide, params)[0], read(narrow, params)[0], TIGHT)


@pytest.mark.parametrize("settings", [{}, tiny.ALL], ids=str)
def test_a_document_sees_nothing_before_it(settings: dict[str, Any]) -> None:
    config = tiny.config(**{"mem_len": 4, **settings})
    params, tokens_1T = tiny.make_params(config), tiny.make_tokens(1, 13)
    first_1T = np.zeros((1, 13), bool)
    first_1T[0, [0, 2, 7, 8, 12]] = True  # twice in a segment, at a segment's start
    hidden_1TD, memory = read(config, params, [0, 4, 8, 12, 13], tokens_1T, first_1T)
    expected = []
    for cuts in [(0, 2), (2, 4, 7), (7, 8), (8, 12), (12, 13)]:
        document_1LD, last_memory = read(config, params, cuts, tokens_1T)
        expected.append(document_1LD)
    tiny.assert_close(hidden_1TD, np.concatenate(expected, 1), TIGHT)
    tiny.assert_close(memory, last_memory, TIGHT)
    assert len(memory[0][0]) == 1


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
