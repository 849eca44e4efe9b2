"""A layer that retrieves follows its equations, between documents too.

Dims: S segments, B streams, L segment, T = S L tokens of a text, X candidates.
"""

import copy
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.reference import Array, Params
from tests.support import tiny
from tests.support.reference_retrieval import Stream
from txl_jax.kernels.operands import Operands, PositionTerms
from txl_jax.kernels.xla import rel_attention
from txl_jax.model import calls
from txl_jax.model.config import ModelConfig
from txl_jax.model.memory import Memory
from txl_jax.model.memory.key_values import unstack
from txl_jax.model.memory.kinds import choose_kind
from txl_jax.model.memory.retrieval import Candidates, attend_to_best
from txl_jax.model.txl import TransformerXL

B, L, S = 2, 4, 6
STORE: dict[str, Any] = {"mem_len": 3, "retrieval_len": 9, "retrieval_top_k": 2}
CONFIG = tiny.config(**STORE)
# A query sees the same keys for any segments.
EVEN = tiny.config(**STORE, same_length=True, same_length_self=True)
TOKENS_BT = tiny.make_tokens(B, S * L + 1)
FIRST_BT = np.zeros((B, S * L), bool)
FIRST_BT[0, 13] = FIRST_BT[1, [4, 22]] = True
LENGTH_SB = np.full((S, B), L, np.int32)
LENGTH_SB[2, 1] = 2


def read(
    config: ModelConfig,
    params: Params,
    memory: Any,
    tgt_len: int = L,
    tokens_BT: Array = TOKENS_BT,
    length_SB: Array | None = None,
) -> tuple[Array, Any]:
    """Returns the nll of a text, read in segments of tgt_len, and the memory."""
    pieces = []
    for s, begin in enumerate(range(0, S * L, tgt_len)):
        part = np.s_[:, begin : begin + tgt_len]
        more = {} if length_SB is None else {"length_B": length_SB[s]}
        nll_BL, memory = tiny.apply(
            config, params, tokens_BT[part], tokens_BT[:, 1:][part], memory,
            method="nll", first_BL=FIRST_BT[part], **more,
        )  # fmt: skip
        pieces.append(nll_BL)
    return np.concatenate(pieces, axis=1), memory


def streams(config: ModelConfig, params: Params) -> list[Stream]:
    """Returns the oracle's streams."""
    sizes = config.retrieval_index, config.retrieval_len, config.retrieval_top_k
    settings = tiny.reference_settings(config)
    return [Stream(params, *sizes, **settings) for _ in range(B)]


@pytest.mark.parametrize(
    "config",
    [
        CONFIG,
        dataclasses.replace(EVEN, pre_lnorm=True, **tiny.MODERN),
    ],
    ids=["paper", "modern"],
)
def test_the_model_agrees_with_its_transcription(config: ModelConfig) -> None:
    """There is padding, and documents start anywhere."""
    params = tiny.make_params(config)
    nll_BT, _ = read(config, params, choose_kind(config).empty(B), length_SB=LENGTH_SB)
    for b, stream in enumerate(streams(config, params)):
        for s in range(S):
            real = np.s_[s * L : s * L + LENGTH_SB[s, b]]
            targets_L = TOKENS_BT[b, 1:][real]
            expected_L = stream.nll(TOKENS_BT[b][real], targets_L, FIRST_BT[b][real])
            tiny.assert_close(nll_BT[b][real], expected_L)


def test_any_segments_and_any_memory_give_the_same() -> None:
    """Memories are states, keys and values, or rings; segments have any length."""
    params = tiny.make_params(EVEN)
    expected_BT, _ = read(EVEN, params, choose_kind(EVEN).empty(B))
    for tgt_len in (3, S * L):
        nll_BT, _ = read(EVEN, params, choose_kind(EVEN).empty(B), tgt_len)
        tiny.assert_close(nll_BT, expected_BT)
    joined = tiny.apply(
        CONFIG, params, TOKENS_BT[:, :-1], TOKENS_BT[:, 1:],
        choose_kind(CONFIG).empty(B), method=calls.nll_of_segments,
        first_BL=FIRST_BT, segment_len=L,
    )  # fmt: skip
    tiny.assert_close(joined, read(CONFIG, params, choose_kind(CONFIG).empty(B)))
    apart = unstack(params)
    kind = choose_kind(EVEN)
    memory = kind.empty_fixed(apart, B, L)
    nll_BT, memory = read(EVEN, apart, memory)
    tiny.assert_close(nll_BT, expected_BT)
    again_BT, _ = read(EVEN, apart, memory)
    nll_BT, _ = read(EVEN, apart, kind.one_token(apart, memory), 1)
    tiny.assert_close(nll_BT, again_BT)
    assert np.any(again_BT != expected_BT), "the memory has an effect"


def test_documents_and_padding_leak_nothing() -> None:
    """No bit after a document's start depends on earlier tokens or on padding."""
    params = tiny.make_params(CONFIG)
    other_BT = TOKENS_BT.copy()
    other_BT[0, :13] = other_BT[1, :22] = 7
    other_BT[1, 2 * L + 2 : 3 * L] = 1  # padding
    results = [
        read(CONFIG, params, choose_kind(CONFIG).empty(B), L, tokens_BT, LENGTH_SB)[0]
        for tokens_BT in (TOKENS_BT, other_BT)
    ]
    assert np.any(results[0][0, :13] != results[1][0, :13])
    for b, start in ((0, 13), (1, 22)):
        np.testing.assert_array_equal(results[0][b, start:], results[1][b, start:])


@pytest.mark.exact_bits
def test_closed_gates_change_no_bit() -> None:
    params = tiny.make_params(CONFIG)
    base = dataclasses.replace(
        CONFIG, retrieval_len=0, retrieval_top_k=ModelConfig.retrieval_top_k
    )
    shut = {**params, "retrieval_gate": np.full(tiny.H, -1e3, np.float32)}
    nll_BT, memory = read(CONFIG, shut, choose_kind(CONFIG).empty(B))
    plain = {name: x for name, x in params.items() if name != "retrieval_gate"}
    assert tiny.make_params(base).keys() == plain.keys()
    expected_BT, expected = read(base, plain, Memory.empty(base, B))
    np.testing.assert_array_equal(nll_BT, expected_BT)
    tiny.assert_equal(memory.local, expected)
    mixed_BT, _ = read(CONFIG, params, choose_kind(CONFIG).empty(B))
    assert np.any(mixed_BT != expected_BT), "open gates have an effect"


def candidates(X: int = 11, dtype: Any = np.float32) -> Candidates:
    """Returns random queries; query i may take the keys of times 0 to i + X - L."""
    rng = np.random.default_rng(3)
    q_BLHA, k_BHXA, v_BHXA = (
        jnp.asarray(rng.normal(size=shape), dtype)
        for shape in ((B, L, 2, 3), (B, 2, X, 3), (B, 2, X, 3))
    )
    time_BX = jnp.broadcast_to(jnp.arange(X), (B, X))
    stop_BL = jnp.broadcast_to(jnp.arange(L) + X - L + 1, (B, L))
    return Candidates(q_BLHA, k_BHXA, v_BHXA, time_BX, 0 * stop_BL + 2, stop_BL)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_best_of_all_keys_is_dense_attention(dtype: str) -> None:
    given = candidates(dtype=dtype)
    dense = Operands(
        given.q_BLHA,
        jnp.swapaxes(given.k_BHXA, 1, 2),
        jnp.swapaxes(given.v_BHXA, 1, 2),
        PositionTerms(),
        given.oldest_BL,
    )
    attend = jax.jit(attend_to_best, static_argnums=1)
    o_BLHA = attend(given, 11)
    tolerance = tiny.FLOAT32 if dtype == "float32" else tiny.BFLOAT16
    tiny.assert_close(o_BLHA, rel_attention(dense), tolerance)
    assert o_BLHA.dtype == dtype
    few_BLHA = attend(given, 3)
    assert np.abs(np.asarray(few_BLHA - o_BLHA, np.float32)).max() > 0.1


def test_queries_in_parts_and_without_candidates(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given = candidates()
    given = given._replace(stop_BL=given.stop_BL.at[1, 2].set(2))
    expected_BLHA = jax.jit(lambda x: attend_to_best(x, 3))(given)
    np.testing.assert_array_equal(expected_BLHA[1, 2], 0)
    monkeypatch.setattr("txl_jax.model.memory.retrieval.SCORES", 2 * 2 * 11 * 3)
    tiny.assert_close(jax.jit(lambda x: attend_to_best(x, 3))(given), expected_BLHA)


def test_gradients_of_gates_and_queries() -> None:
    """Finite differences agree; the oracle's memory and store are constants."""
    params = jax.tree.map(lambda x: x.astype(np.float64), tiny.make_params(CONFIG))
    memory: Any = choose_kind(CONFIG).empty(B)
    begin, n = 3 * L, CONFIG.retrieval_index
    for s in range(3):
        part = np.s_[:, s * L : (s + 1) * L]
        _, memory = tiny.apply(CONFIG, params, TOKENS_BT[part], memory)
    part = np.s_[:, begin : begin + L]

    def loss(params: Params) -> Any:
        result: Any = TransformerXL(CONFIG).apply(
            {"params": params}, TOKENS_BT[part], TOKENS_BT[:, 1:][part], memory,
            method="nll",
        )  # fmt: skip
        return jnp.sum(result[0])

    grads = jax.jit(jax.grad(loss))(params)
    none_L = np.zeros(L, bool)
    ready = streams(CONFIG, params)
    for b, stream in enumerate(ready):
        for s in range(3):
            stream.read(TOKENS_BT[b, s * L : (s + 1) * L], none_L)

    def oracle(changed: Params) -> float:
        total = 0.0
        for b, stream in enumerate(ready):
            again = copy.copy(stream)
            again.params = changed
            row = TOKENS_BT[b, begin : begin + L + 1]
            total += again.nll(row[:-1], row[1:], none_L).sum()
        return total

    q = params["layers"]["attention"]["q"]
    steepest = np.unravel_index(
        np.argmax(np.abs(grads["layers"]["attention"]["q"][n])), q[n].shape
    )
    places: list[tuple[Any, Any, tuple[int, ...]]] = [
        (params["retrieval_gate"], grads["retrieval_gate"], (h,)) for h in (0, 1)
    ]
    places += [(q, grads["layers"]["attention"]["q"], (n, *map(int, steepest)))]
    for leaf, grad, at in places:
        sides = []
        for step in (1e-6, -1e-6):
            leaf[at] += step
            sides.append(oracle(params))
            leaf[at] -= step
        difference = (sides[0] - sides[1]) / 2e-6
        assert abs(difference) > 1e-3
        assert float(grad[at]) == pytest.approx(difference, rel=1e-3)
