"""The oracle's variants against arithmetic by hand, each other and the paper's model.

Dims: as in `tests.reference`; G clusters, T tokens of several segments.
"""

import math
from typing import Any

import numpy as np
import pytest

from tests import reference
from tests.reference import Array, Params
from tests.support import reference_vocabulary
from tests.support.test_reference import (
    TIGHT,
    A,
    B,
    D,
    H,
    N,
    V,
    assert_close,
    assert_same_memory,
    make_params,
    make_tokens,
    read_segments,
)

P = 12  # rows of a learned table: as many as there are tokens
TOKENS_BT = make_tokens(P)
ONE_PASS, SEGMENTS = [0, P], [0, 4, 5, 9, P]


def draw(*shape: int) -> Array:
    return 0.5 * np.random.default_rng(3).normal(size=shape)


def shaw_params(n_position: int = P) -> Params:
    params = make_params()
    params["layers"]["attention"]["distances"] = draw(N, n_position, H, A)
    del params["u"], params["w"], params["layers"]["attention"]["r"]
    return params


def biased_params() -> Params:
    params = shaw_params()
    params["layers"]["attention"]["distance_bias"] = draw(N, P, H)
    return params | {"u": draw(N, H, A)}


def content_params() -> Params:
    params = make_params()
    del params["u"], params["w"], params["layers"]["attention"]["r"]
    return params


def untied_params() -> Params:
    return make_params() | {"u": draw(N, H, A), "w": draw(N, H, A)[::-1]}


# Positions.

RELATIVE: dict[str, tuple[Params, str]] = {
    "untied": (untied_params(), "transformer_xl"),
    "shaw": (shaw_params(), "shaw"),
    "shaw_short_table": (shaw_params(5), "shaw"),
    "shaw_biased": (biased_params(), "shaw_biased"),
    "none": (content_params(), "none"),
}


@pytest.mark.parametrize("params, position", RELATIVE.values(), ids=RELATIVE)
def test_segments_equal_one_long_pass(params: Params, position: str) -> None:
    settings: dict[str, Any] = {"mem_len": P, "position": position}
    expected_BLD, expected = read_segments(params, TOKENS_BT, ONE_PASS, **settings)
    hidden_BLD, memory = read_segments(params, TOKENS_BT, SEGMENTS, **settings)
    assert_close(hidden_BLD, expected_BLD)
    assert_same_memory(memory, expected)


@pytest.mark.parametrize("clamp_len", [0, 3])
def test_the_papers_model_as_learned_distances(clamp_len: int) -> None:
    """With the vectors W R, the biases w W R and u, shaw_biased is the paper's."""
    params = untied_params()
    expected_BLD, _ = read_segments(
        params, TOKENS_BT, SEGMENTS, mem_len=5, clamp_len=clamp_len
    )
    attention = params["layers"]["attention"]
    R_PD = [reference.position_encoding(P - 1 - row, D, 0) for row in range(P)]
    r_NPHA = np.einsum("PD,NHAD->NPHA", R_PD, attention.pop("r"))
    attention["distances"] = r_NPHA
    attention["distance_bias"] = np.einsum("NPHA,NHA->NPH", r_NPHA, params.pop("w"))
    actual_BLD, _ = read_segments(
        params,
        TOKENS_BT,
        SEGMENTS,
        mem_len=5,
        clamp_len=clamp_len,
        position="shaw_biased",
    )
    assert_close(actual_BLD, expected_BLD)


@pytest.mark.parametrize("farthest", [0, 3])
def test_far_distances_count_as_the_farthest(farthest: int) -> None:
    """Of the table (its first row; the last has distance 0), and of clamp_len."""
    long = shaw_params()
    table_NPHA = long["layers"]["attention"]["distances"]
    table_NPHA[:, : P - 1 - farthest] = table_NPHA[:, P - 1 - farthest, None]
    short, clamped = shaw_params(), shaw_params()
    short["layers"]["attention"]["distances"] = table_NPHA[:, P - 1 - farthest :]
    settings: dict[str, Any] = {"mem_len": P, "position": "shaw"}
    expected_BLD, _ = read_segments(long, TOKENS_BT, SEGMENTS, **settings)
    actual_BLD, _ = read_segments(short, TOKENS_BT, SEGMENTS, **settings)
    assert_close(actual_BLD, expected_BLD)
    if farthest:
        settings["clamp_len"] = farthest
        actual_BLD, _ = read_segments(clamped, TOKENS_BT, SEGMENTS, **settings)
        assert_close(actual_BLD, expected_BLD)


def test_learned_places_add_to_every_layers_input() -> None:
    params = content_params()
    R_PD = [reference.position_encoding(place, D, 0) for place in range(P)]
    params["layers"]["places"] = np.zeros((N, P, D))
    hidden_BLD = {}
    for position in ("none", "sinusoidal"):
        hidden_BLD[position], _ = read_segments(
            params, TOKENS_BT, SEGMENTS, mem_len=0, position=position
        )
    for layer, equal in ((0, True), (1, False)):
        params["layers"]["places"][:] = 0
        params["layers"]["places"][layer] = R_PD
        learned_BLD, _ = read_segments(
            params, TOKENS_BT, SEGMENTS, mem_len=0, position="learned"
        )
        difference_BL = np.abs(learned_BLD - hidden_BLD["sinusoidal"]).max(-1)
        assert (difference_BL < TIGHT).all() == equal
        assert (np.abs(learned_BLD - hidden_BLD["none"]).max(-1) > 1e-6).all()


def test_places_are_counted_from_the_segments_start() -> None:
    params, tokens_BL = content_params(), np.tile(make_tokens(4), 2)
    hidden_BLD, _ = read_segments(
        params, tokens_BL, [0, 4, 8], mem_len=0, position="sinusoidal"
    )
    assert_close(hidden_BLD[:, 4:], hidden_BLD[:, :4])
    # And a remembered token keeps its own.
    settings: dict[str, Any] = {"mem_len": 3, "position": "sinusoidal_repeated"}
    _, memory = read_segments(params, tokens_BL, [0, 4], **settings)
    for place in (1, 2, 3):
        row_D = params["embedding"]["table"][tokens_BL[0, place]] * math.sqrt(D)
        expected_D = row_D + reference.position_encoding(place, D, 0)
        assert_close(memory[0][0][place - 1], expected_D)


# What is seen.


def test_same_length_self_sees_one_key_more() -> None:
    params = make_params()
    wide, narrow = (
        read_segments(
            params,
            TOKENS_BT,
            SEGMENTS,
            mem_len=mem_len,
            same_length=True,
            same_length_self=same_length_self,
        )
        for mem_len, same_length_self in ((4, False), (3, True))
    )
    # Of N = 2 layers, the last token reads what lies up to 6 before it.
    assert_close(wide[0], narrow[0])
    settings = reference.Settings(mem_len=0, same_length=True, same_length_self=True)
    assert settings.reach == 1


def test_zeros_are_read_as_tokens_are() -> None:
    """One layer, one head: their scores are those of their positions, their value 0."""
    params = make_params(1)
    attention = {name: leaf[0] for name, leaf in list_weights(params)}
    M, settings = 3, reference.Settings(mem_len=3)
    h_1D = params["embedding"]["table"][:1] * math.sqrt(D)
    context_KD = np.concatenate([np.zeros((M, D)), h_1D])
    terms_4HLK = reference.four_terms(
        attention, params["u"], params["w"], settings, context_KD, 1
    )
    assert_close(terms_4HLK[[0, 2], :, 0, :M], np.zeros((2, H, M)))
    weights_HK = np.exp(terms_4HLK[:, :, 0].sum(0) / math.sqrt(A))
    own_H = weights_HK[:, M] / weights_HK.sum(-1)
    value_HA = np.einsum("D,HAD->HA", h_1D[0], attention["v"])
    expected_D = np.einsum("H,HA,HAD->D", own_H, value_HA, attention["o"])
    actual_1D = reference.attend(
        attention, params["u"], params["w"], settings, context_KD, [[0, 1, 2, 3]]
    )
    assert_close(actual_1D[0], expected_D)


def list_weights(params: Params) -> list[tuple[str, Array]]:
    attention = params["layers"]["attention"]
    return [(name, attention[name]) for name in "qkvro"]


# The vocabulary.

CUTOFFS = (4, 7)
G = len(CUTOFFS)
SIZES = np.diff([0, *CUTOFFS, V])


def one_table(E: int) -> Params:
    embedding = {"table": draw(V, E), "bias": draw(V)}
    if E != D:
        embedding["proj"] = draw(E, D)
    return embedding | {"cluster_table": draw(G, E), "cluster_bias": draw(G)}


def many_tables(div_val: int) -> Params:
    widths = [D // div_val**i for i in range(G + 1)]
    tables = {f"table_{i}": draw(SIZES[i], E) for i, E in enumerate(widths)}
    projs = {f"proj_{i}": draw(E, D) for i, E in enumerate(widths)}
    return one_table(D) | tables | projs | {"table": None}


def without(embedding: Params, *names: str) -> Params:
    return {name: leaf for name, leaf in embedding.items() if name not in names}


EMBEDDINGS: dict[str, Params] = {
    "one_table": one_table(D),
    "narrow": one_table(6),
    "div_val": without(many_tables(2), "table"),
    "div_val_untied_projections": without(many_tables(2), "table")
    | {f"out_proj_{i}": draw(D // 2**i, D)[::-1] for i in range(G + 1)},
    "untied_tables": one_table(D) | {"out_table": draw(V, D)[::-1]},
}


@pytest.mark.parametrize("embedding", EMBEDDINGS.values(), ids=EMBEDDINGS)
def test_probabilities_sum_to_one(embedding: Params) -> None:
    params = make_params() | {"embedding": embedding}
    targets_BL, empty = make_tokens(6, B, 2), reference.empty(N, B, D)
    settings: dict[str, Any] = {"mem_len": 4, "cutoffs": CUTOFFS}
    tokens_BL = TOKENS_BT[:, :6]
    logits_BLV, _ = reference.logits(params, tokens_BL, empty, **settings)
    assert_close(np.exp(logits_BLV).sum(-1), np.ones((B, 6)))
    nll_BL, _ = reference.nll(params, tokens_BL, targets_BL, empty, **settings)
    expected_BL1 = -np.take_along_axis(logits_BLV, targets_BL[..., None], -1)
    assert_close(nll_BL, expected_BL1[..., 0])


def test_clusters_by_hand() -> None:
    """Tokens 0; 1 and 2; 3: of them 1 to 3 are in clusters.

    The frequent softmax has odds 1 : 2 : 5 of token 0 and the two clusters, in their
    order; within the first cluster they are 1 : 3.
    """
    embedding = {
        "table": np.zeros((4, 2)),
        "bias": np.log([1.0, 1.0, 3.0, 7.0]),
        "cluster_table": np.array([[0.0, 0.0], [1.0, 0.0]]),
        "cluster_bias": np.log([2.0, 1.0]),
    }
    hidden_D = np.array([math.log(5.0), 0.0])
    log_p_V = reference_vocabulary.log_probs(embedding, (1, 3), hidden_D)
    assert_close(np.exp(log_p_V), [1 / 8, 1 / 16, 3 / 16, 5 / 8])


def test_embeddings_by_hand() -> None:
    embedding = {
        "table_0": np.array([[1.0, 2.0]]),
        "table_1": np.array([[3.0], [4.0]]),
        "proj_1": np.array([[10.0, -10.0]]),
    }
    rows = [reference_vocabulary.embed(embedding, (1,), token, 2) for token in range(3)]
    assert_close(np.array(rows) / math.sqrt(2), [[1, 2], [30, -30], [40, -40]])
