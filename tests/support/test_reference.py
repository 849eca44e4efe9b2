"""The oracle against itself, against arithmetic by hand and against the matrix form.

Dims: as in `tests.reference`; here M may also be a memory that is padded with zeros.
"""

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from tests import reference
from tests.reference import Array, Params

V, D, H, A, F, N = 11, 8, 2, 3, 12, 2
B = 2
PLAIN = reference.Settings(mem_len=0)
TIGHT = 1e-10  # float64: the same sums in another order
SETTINGS = [
    {},
    {"pre_lnorm": True},
    {"clamp_len": 3},
    {"same_length": True},
    {"pre_lnorm": True, "clamp_len": 2, "same_length": True},
]


def make_params(n_layer: int = N) -> Params:
    rng = np.random.default_rng(0)

    def normal(*shape: int) -> Array:
        return 0.5 * rng.normal(size=shape)

    def norm() -> Params:
        return {"scale": 1 + normal(n_layer, D), "bias": normal(n_layer, D)}

    def dense(n_in: int, n_out: int) -> Params:
        return {"kernel": normal(n_layer, n_in, n_out), "bias": normal(n_layer, n_out)}

    attention = {name: normal(n_layer, H, A, D) for name in "qkvr"}
    return {
        "embedding": {"table": normal(V, D), "bias": normal(V)},
        "u": normal(H, A),
        "w": normal(H, A),
        "layers": {
            "attention": attention | {"o": normal(n_layer, H, A, D), "norm": norm()},
            "feed_forward": {"in": dense(D, F), "out": dense(F, D), "norm": norm()},
        },
    }


def make_tokens(length: int, batch: int = B, seed: int = 1) -> Array:
    return np.random.default_rng(seed).integers(0, V, (batch, length))


def read_segments(
    params: Params,
    tokens_BL: Array,
    cuts: Sequence[int],
    first_BL: Array | None = None,
    **settings: Any,
) -> tuple[Array, reference.Memory]:
    """Reads from an empty memory, one segment from each cut to the next."""
    first_BL = np.zeros(tokens_BL.shape, bool) if first_BL is None else first_BL
    n_layer, batch = len(params["layers"]["attention"]["q"]), len(tokens_BL)
    memory, pieces = reference.empty(n_layer, batch, D), []
    for begin, end in pairwise(cuts):
        tokens, first = tokens_BL[:, begin:end], first_BL[:, begin:end]
        piece_BLD, memory = reference.forward(
            params, tokens, memory, first_BL=first, **settings
        )
        pieces.append(piece_BLD)
    return np.concatenate(pieces, 1), memory


def assert_close(actual: Any, expected: Any, tolerance: float = TIGHT) -> None:
    np.testing.assert_allclose(actual, expected, rtol=tolerance, atol=tolerance)


def assert_same_memory(actual: reference.Memory, expected: reference.Memory) -> None:
    for actual_layers, expected_layers in zip(actual, expected, strict=True):
        for actual_MD, expected_MD in zip(actual_layers, expected_layers, strict=True):
            assert_close(actual_MD, expected_MD)


# Arithmetic by hand.


def test_position_encoding_by_hand() -> None:
    at_3 = [0.1411200081, 0.0299955002, -0.9899924966, 0.9995500337]
    assert_close(reference.position_encoding(3, 4, 0), at_3, 1e-9)
    assert_close(reference.position_encoding(5, 4, 3), at_3, 1e-9)
    assert_close(reference.position_encoding(3, 4, 5), at_3, 1e-9)
    assert_close(reference.position_encoding(0, 4, 0), [0, 0, 1, 1])


def test_layer_norm_by_hand() -> None:
    norm = {"scale": np.array([1.0, 10.0]), "bias": np.array([0.0, 1.0])}
    # A deviation of 3/4 sqrt(epsilon) makes 3/5.
    deviation = 0.75 * math.sqrt(1e-5)
    x_LD = np.array([[2 + deviation, 2 - deviation], [1e4, 0.0]])
    assert_close(reference.layer_norm(x_LD, norm, 1e-5), [[0.6, -5], [1, -9]])


def test_four_terms_by_hand() -> None:
    attention = {
        "q": np.array([1.0, 0.0]).reshape(1, 1, 2),
        "k": np.array([0.0, 1.0]).reshape(1, 1, 2),
        "r": np.array([1.0, 1.0]).reshape(1, 1, 2),
    }
    context_KD = np.array([[3.0, 1.0], [1.0, 2.0]])
    u_HA, w_HA = np.array([[0.5]]), np.array([[2.0]])
    terms_4HLK = reference.four_terms(attention, u_HA, w_HA, PLAIN, context_KD, 1)
    assert terms_4HLK.shape == (4, 1, 1, 2)
    # q = 1 and k = 1, 2; r is sin(1) + cos(1) at distance 1 and 1 at distance 0.
    assert_close(terms_4HLK[:, 0, 0, 0], [1, 1.3817732907, 0.5, 2.7635465814], 1e-9)
    assert_close(terms_4HLK[:, 0, 0, 1], [2, 1, 1, 2], 1e-9)


def test_one_layer_by_hand() -> None:
    """Pre-norm, D = 2, everything else 1; tokens 0 and 1 are far apart and opposite.

    The normalized rows of D = 2 are [1, -1] and [-1, 1] (to 1e-11), so attention reads
    [2, 0] and [-2, 2]: q = 2, -2; k = 0, 2; v = 2, 0; r(distance) = sin(distance).
    Token 0 reads itself: 2. Token 1 scores token 0 with (-2 + 3) sin(1) and itself with
    -4 + 2: the probability of token 0 is 1 / (1 + exp(-2 - sin(1))) = 0.944876...
    The feed-forward's inner unit is 1.5 for token 0 and max(-0.5, 0) for token 1.
    """
    table_VD = np.array([[1000.0, -1000.0], [-1000.0, 1000.0]]) / math.sqrt(2)
    params = {
        "embedding": {"table": table_VD, "bias": np.zeros(2)},
        "u": np.array([[1.0]]),
        "w": np.array([[3.0]]),
        "layers": {
            "attention": {
                "q": np.array([1.0, 0.0]).reshape(1, 1, 1, 2),
                "k": np.array([0.0, 1.0]).reshape(1, 1, 1, 2),
                "v": np.array([1.0, 1.0]).reshape(1, 1, 1, 2),
                "r": np.array([1.0, 0.0]).reshape(1, 1, 1, 2),
                "o": np.array([1.0, 0.5]).reshape(1, 1, 1, 2),
                "norm": {"scale": np.array([[2.0, 1]]), "bias": np.array([[0.0, 1]])},
            },
            "feed_forward": {
                "in": {"kernel": np.array([[[2.0], [1.0]]]), "bias": np.array([[0.5]])},
                "out": {
                    "kernel": np.array([[[3.0, -1]]]),
                    "bias": np.array([[0.5, 0]]),
                },
                "norm": {"scale": np.ones((1, 2)), "bias": np.zeros((1, 2))},
            },
        },
    }
    hidden_BLD, memory = reference.forward(
        params, np.array([[0, 1]]), reference.empty(1, 1, 2), mem_len=1, pre_lnorm=True
    )
    expected_LD = [[1007, -1000.5], [-997.610247576, 1000.944876212]]
    assert_close(hidden_BLD[0], expected_LD, 1e-9)
    assert_close(memory[0][0], [[-1000, 1000]])


# The matrix form: padded memory, masks, (q + u) k + (q + w) r and the relative shift.


def shift_left(x_HLR: Array) -> Array:
    """The original code's trick: one column of zeros, another view, one row less."""
    H, L, R = x_HLR.shape
    wider = np.concatenate([np.zeros((H, L, 1)), x_HLR], -1)
    return wider.reshape(H, R + 1, L)[:, 1:].reshape(H, L, R)


def normalize(x_LD: Array, norm: Params) -> Array:
    mean, variance = x_LD.mean(-1)[:, None], x_LD.var(-1)[:, None]
    return norm["scale"] * (x_LD - mean) * (variance + 1e-5) ** -0.5 + norm["bias"]


def matrix_attention(
    attention: Params,
    u_HA: Array,
    w_HA: Array,
    x_KD: Array,
    hidden_LK: Array,
    clamp: int,
) -> Array:
    """Attention over all keys at once; hidden_LK is True at keys out of sight."""
    L, K = hidden_LK.shape
    q_LHA = np.einsum("LD,HAD->LHA", x_KD[K - L :], attention["q"])
    k_KHA = np.einsum("KD,HAD->KHA", x_KD, attention["k"])
    v_KHA = np.einsum("KD,HAD->KHA", x_KD, attention["v"])
    position_R = np.arange(K - 1, -1, -1.0)  # the rows of R run from far to near
    position_R = np.minimum(position_R, clamp) if clamp else position_R
    angle_RF = np.outer(position_R, 1 / 10000 ** (np.arange(0, D, 2) / D))
    encoding_RD = np.concatenate([np.sin(angle_RF), np.cos(angle_RF)], -1)
    r_RHA = np.einsum("RD,HAD->RHA", encoding_RD, attention["r"])
    content_HLK = np.einsum("LHA,KHA->HLK", q_LHA + u_HA, k_KHA)
    position_HLR = np.einsum("LHA,RHA->HLR", q_LHA + w_HA, r_RHA)
    score_HLK = (content_HLK + shift_left(position_HLR)) / A**0.5
    weight_HLK = np.exp(np.where(hidden_LK, -np.inf, score_HLK))
    weight_HLK /= weight_HLK.sum(-1, keepdims=True)
    return np.einsum("HLK,KHA,HAD->LD", weight_HLK, v_KHA, attention["o"])


def matrix_forward(
    params: Params,
    tokens_L: Array,
    h_NMD: Array,
    filled: int,
    clamp_len: int = 0,
    same_length: bool = False,
    pre_lnorm: bool = False,
) -> Array:
    L, (_, M, _) = len(tokens_L), h_NMD.shape
    distance_LK = M + np.arange(L)[:, None] - np.arange(M + L)
    hidden_LK = (distance_LK < 0) | (np.arange(M + L) < M - filled)
    if same_length:
        hidden_LK |= distance_LK >= M
    h_LD = params["embedding"]["table"][tokens_L] * D**0.5
    for n in range(len(h_NMD)):
        attention = params["layers"]["attention"]
        norm = {name: leaf[n] for name, leaf in attention["norm"].items()}
        weights = {name: attention[name][n] for name in "qkvro"}
        x_KD = np.concatenate([h_NMD[n], h_LD])
        x_KD = normalize(x_KD, norm) if pre_lnorm else x_KD
        h_LD = h_LD + matrix_attention(
            weights, params["u"], params["w"], x_KD, hidden_LK, clamp_len
        )
        h_LD = h_LD if pre_lnorm else normalize(h_LD, norm)
        ff = params["layers"]["feed_forward"]
        norm = {name: leaf[n] for name, leaf in ff["norm"].items()}
        x_LD = normalize(h_LD, norm) if pre_lnorm else h_LD
        x_LF = np.maximum(x_LD @ ff["in"]["kernel"][n] + ff["in"]["bias"][n], 0)
        h_LD = h_LD + x_LF @ ff["out"]["kernel"][n] + ff["out"]["bias"][n]
        h_LD = h_LD if pre_lnorm else normalize(h_LD, norm)
    return h_LD


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_forward_is_the_matrix_form(settings: dict[str, Any]) -> None:
    params, mem_len, memory = make_params(), 5, reference.empty(N, B, D)
    for segment in range(4):  # memory that is empty, filling (3 of 5), full
        tokens_BL = make_tokens(3, seed=segment)
        h_NBMD, filled_B = reference.padded(memory, mem_len)
        hidden_BLD, memory = reference.forward(
            params, tokens_BL, memory, mem_len=mem_len, **settings
        )
        for b in range(B):
            expected_LD = matrix_forward(
                params, tokens_BL[b], h_NBMD[:, b], filled_B[b], **settings
            )
            assert_close(hidden_BLD[b], expected_LD)


# The oracle against itself.


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_segments_equal_one_long_pass(settings: dict[str, Any]) -> None:
    params, tokens_BL = make_params(), make_tokens(12)
    # With same_length the memory is always enough.
    settings = settings | {"mem_len": 4 if settings.get("same_length") else 12}
    expected_BLD, expected = read_segments(params, tokens_BL, [0, 12], **settings)
    hidden_BLD, memory = read_segments(params, tokens_BL, [0, 4, 5, 10, 12], **settings)
    assert_close(hidden_BLD, expected_BLD)
    assert_same_memory(memory, expected)


@pytest.mark.parametrize("mem_len", [1, 3, 5])
def test_same_length_sees_mem_len_keys(mem_len: int) -> None:
    for position in range(9):
        keys = reference.visible_keys(position, [0] * 9, mem_len)
        assert len(keys) == min(position + 1, mem_len)
        assert keys[-1] == position
    # Through the whole model of one layer: which tokens does the last one depend on?
    params, tokens_BL = make_params(1), make_tokens(9, 1)
    settings: dict[str, Any] = {"mem_len": mem_len, "same_length": True}
    hidden_BLD, _ = read_segments(params, tokens_BL, [0, 4, 9], **settings)
    for key in range(9):
        other_BL = tokens_BL.copy()
        other_BL[0, key] = (other_BL[0, key] + 1) % V
        other_BLD, _ = read_segments(params, other_BL, [0, 4, 9], **settings)
        depends = bool(np.abs(other_BLD - hidden_BLD)[0, -1].max() > 0)
        assert depends == (8 - key < mem_len)


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_a_document_sees_nothing_before_it(settings: dict[str, Any]) -> None:
    params, tokens_BL = make_params(), make_tokens(13, 1)
    settings = settings | {"mem_len": 4}
    first_BL = np.zeros((1, 13), bool)
    first_BL[0, [0, 2, 7, 8, 12]] = True  # twice in a segment, at a segment's start
    hidden_BLD, memory = read_segments(
        params, tokens_BL, [0, 4, 8, 12, 13], first_BL=first_BL, **settings
    )
    expected = []
    for cuts in [(0, 2), (2, 4, 7), (7, 8), (8, 12), (12, 13)]:
        alone_BLD, alone = read_segments(params, tokens_BL, cuts, **settings)
        expected.append(alone_BLD)
    assert_close(hidden_BLD, np.concatenate(expected, 1))
    assert_same_memory(memory, alone)
    assert len(memory[0][0]) == 1


def test_padding_is_never_read() -> None:
    params, tokens_BL = make_params(), make_tokens(5, 3)
    targets_BL = make_tokens(5, 3, 2)
    _, memory = reference.forward(
        params, make_tokens(3, 3, 4), reference.empty(N, 3, D), mem_len=6
    )
    length_B, first_BL = np.array([5, 2, 0]), np.zeros((3, 5), bool)
    first_BL[:, 4] = True  # in the padding of streams 1 and 2: says nothing
    settings: dict[str, Any] = {"first_BL": first_BL, "length_B": length_B}
    nll_BL, after = reference.nll(
        params, tokens_BL, targets_BL, memory, mem_len=6, **settings
    )
    assert [len(layers[0]) for layers in after] == [1, 5, 3]
    for b, length in enumerate(length_B):
        alone_BL, alone = reference.nll(
            params,
            tokens_BL[b : b + 1, :length],
            targets_BL[b : b + 1, :length],
            memory[b : b + 1],
            mem_len=6,
            first_BL=first_BL[b : b + 1, :length],
        )
        assert_close(nll_BL[b, :length], alone_BL[0])
        assert (nll_BL[b, length:] == 0).all()
        assert_same_memory(after[b : b + 1], alone)


def test_what_cannot_be_meant_is_refused() -> None:
    params, tokens_BL, empty = make_params(), make_tokens(4), reference.empty(N, B, D)
    with pytest.raises(ValueError, match="nothing to attend to"):
        reference.forward(params, tokens_BL, empty, mem_len=0, same_length=True)
    _, memory = reference.forward(params, tokens_BL, empty, mem_len=4)
    with pytest.raises(ValueError, match="more than mem_len = 3"):
        reference.forward(params, tokens_BL, memory, mem_len=3)
