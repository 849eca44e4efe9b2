"""Fast weights follow their equations, between segments and documents too.

Dims: S segments, B streams, L segment, T = S L tokens of a text, U values of a head.
"""

import dataclasses
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.reference import Array, Params
from tests.support import tiny
from tests.support.reference_fast import Stream
from txl_jax.model.config import ModelConfig
from txl_jax.model.fast_weights import FastWeights, feature, scan_chunks
from txl_jax.model.fixed import lay_out
from txl_jax.model.key_values import KeyValueMemory
from txl_jax.model.memory import Memory
from txl_jax.model.ring import RingMemory
from txl_jax.model.txl import TransformerXL

B, L, S = 2, 4, 6
CONFIG = tiny.config(mem_len=3, fast_weights=True)
# A query sees the same keys for any segments.
EVEN = dataclasses.replace(CONFIG, same_length=True, same_length_self=True)
ROTARY = dataclasses.replace(
    EVEN, position="rotary", d_head=4, pre_lnorm=True, **tiny.MODERN
)
TOKENS_BT = tiny.make_tokens(B, S * L + 1)
FIRST_BT = np.zeros((B, S * L), bool)
FIRST_BT[0, 13] = FIRST_BT[1, [4, 5, 11, 22]] = True
LENGTH_SB = np.full((S, B), L, np.int32)
LENGTH_SB[2:4, 1] = 2, 0


def read(
    config: ModelConfig,
    params: Params,
    memory: Any,
    tgt_len: int = L,
    tokens_BT: Array = TOKENS_BT,
    length_SB: Array | None = None,
    first_BT: Array = FIRST_BT,
) -> tuple[Array, Any]:
    """Returns the nll of a text, read in segments of tgt_len, and the memory."""
    pieces = []
    for s, begin in enumerate(range(0, S * L, tgt_len)):
        part = np.s_[:, begin : begin + tgt_len]
        more = {} if length_SB is None else {"length_B": length_SB[s]}
        nll_BL, memory = tiny.apply(
            config, params, tokens_BT[:, :-1][part], tokens_BT[:, 1:][part], memory,
            method="nll", first_BL=first_BT[part], **more,
        )  # fmt: skip
        pieces.append(nll_BL)
    return np.concatenate(pieces, axis=1), memory


def one_by_one(S_BHUA: Any, *steps: Any) -> tuple[Any, Any]:
    """Returns the results of `scan_chunks`, by a scan over tokens."""

    def step(S_BHUA: Any, now: Any) -> tuple[Any, Any]:
        q_BHA, k_BHA, v_BHU, rate_BHJ, start_B = now
        S_BHUA = jnp.where(start_B[:, None, None, None], 0, S_BHUA)
        o_BHU = jnp.einsum("BHUA,BHA->BHU", S_BHUA, q_BHA)
        S_BHUA *= jnp.exp(rate_BHJ[..., 1, None, None])
        error_BHU = v_BHU - jnp.einsum("BHUA,BHA->BHU", S_BHUA, k_BHA)
        u_BHU = rate_BHJ[..., 0, None] * error_BHU
        return S_BHUA + jnp.einsum("BHU,BHA->BHUA", u_BHU, k_BHA), o_BHU

    by_token = tuple(jnp.swapaxes(x_BL, 0, 1) for x_BL in steps)
    S_BHUA, o_LBHU = jax.lax.scan(step, S_BHUA, by_token)
    return jnp.swapaxes(o_LBHU, 0, 1), S_BHUA


def make_steps(L: int, common: float) -> tuple[Any, ...]:
    """Returns random arguments of `scan_chunks`; `common` makes all keys alike."""
    rng = np.random.default_rng(L)
    H, A = 2, 8

    def draw(*shape: int) -> Any:
        return jnp.asarray(rng.normal(size=shape), jnp.float32)

    q, k, v = (draw(B, L, H, A) for _ in range(3))
    write, decay = jax.nn.sigmoid(draw(B, L, H) + common), draw(B, L, H) + common
    rate_BLHJ = jnp.stack([write, jax.nn.log_sigmoid(decay)], axis=-1)
    rate_BLHJ = jnp.where(rng.random((B, L, 1, 1)) < 0.1, 0, rate_BLHJ)
    start_BL = jnp.asarray(rng.random((B, L)) < 0.05)
    S_BHUA = draw(B, H, A, A)
    return S_BHUA, feature(q + common), feature(k + common), v, rate_BLHJ, start_BL


@pytest.mark.parametrize(
    "L, common",
    [(1, 0.0), (5, 0.0), (37, 4.0), pytest.param(128, 0.0, marks=pytest.mark.long)],
)
def test_chunks_are_a_scan_over_tokens(L: int, common: float) -> None:
    """So are gradients; documents start anywhere, and some steps write nothing."""
    *arrays, start_BL = make_steps(L, common)
    weights = jnp.asarray(np.random.default_rng(1).normal(size=(B, L, 2, 8)))

    def results(function: Any) -> Any:
        def loss(arrays: Any) -> Any:
            o_BLHU, after_BHUA = function(*arrays, start_BL)
            return jnp.sum(weights * o_BLHU) + jnp.sum(after_BHUA[..., 0])

        values = jax.jit(function)(*arrays, start_BL)
        return values, jax.jit(jax.grad(loss))(arrays)

    tiny.assert_close(results(scan_chunks), results(one_by_one))


@pytest.mark.parametrize(
    "config",
    [CONFIG, dataclasses.replace(ROTARY, mem_len=6, same_length=False)],
    ids=["short memory", "long memory"],
)
def test_the_model_agrees_with_its_transcription(config: ModelConfig) -> None:
    """There is padding, documents start anywhere, and a token has zero keys."""
    params = tiny.make_params(config)
    params["embedding"]["table"][3] = 0
    nll_BT, _ = read(config, params, Memory.empty(config, B), length_SB=LENGTH_SB)
    for b in range(B):
        stream = Stream(params, **tiny.reference_settings(config))
        for s in range(S):
            if length := LENGTH_SB[s, b]:
                real = np.s_[s * L : s * L + length]
                targets_L = TOKENS_BT[b, 1:][real]
                first_L = FIRST_BT[b][real]
                expected_L = stream.nll(TOKENS_BT[b][real], targets_L, first_L)
                tiny.assert_close(nll_BT[b][real], expected_L)


@pytest.mark.parametrize(
    "config",
    [ROTARY, pytest.param(EVEN, marks=pytest.mark.long)],
    ids=lambda x: x.position,
)
def test_any_segments_and_any_memory_give_the_same(config: ModelConfig) -> None:
    """Memories are states, keys and values, or rings; segments have any length."""
    params = tiny.make_params(config)
    expected_BT, after = read(config, params, Memory.empty(config, B))
    for tgt_len in (3, S * L):
        nll_BT, memory = read(config, params, Memory.empty(config, B), tgt_len)
        tiny.assert_close(nll_BT, expected_BT)
        tiny.assert_close(memory.fast.S_NBHUA, after.fast.S_NBHUA)
    apart = lay_out(params)
    memory = KeyValueMemory.empty(config, apart, B, L)
    nll_BT, memory = read(config, apart, memory)
    tiny.assert_close(nll_BT, expected_BT)
    again_BT, _ = read(config, apart, memory)
    for held in (memory, after):  # keys and values, or states
        ring = RingMemory.of(config, apart, held)
        nll_BT, last = read(config, apart, ring, 1)
        tiny.assert_close(nll_BT, again_BT)
    assert np.any(again_BT != expected_BT), "the memory has an effect"


def test_several_segments_in_a_call_are_segments_one_after_the_other() -> None:
    params = tiny.make_params(CONFIG)
    joined = tiny.apply(
        CONFIG, params, TOKENS_BT[:, :-1], TOKENS_BT[:, 1:],
        Memory.empty(CONFIG, B), method="nll",
        first_BL=FIRST_BT, segment_len=L,
    )  # fmt: skip
    tiny.assert_close(joined, read(CONFIG, params, Memory.empty(CONFIG, B)))


def test_reset_empties_the_matrices_of_some_streams() -> None:
    params, fresh = tiny.make_params(CONFIG), cast(Any, Memory.empty(CONFIG, B))
    _, after = read(CONFIG, params, fresh)
    again = after.reset(np.arange(B) == 1)
    tiny.assert_equal(
        jax.tree.map(lambda x_NB: x_NB[:, 1], again.fast.layers),
        jax.tree.map(lambda x_NB: x_NB[:, 1], fresh.fast.layers),
    )
    nll_BT, _ = read(CONFIG, params, again)
    expected_BT, _ = read(CONFIG, params, fresh)
    tiny.assert_close(nll_BT[1], expected_BT[1])
    assert np.any(nll_BT[0] != expected_BT[0])


def test_documents_and_padding_leak_nothing() -> None:
    """No bit after a document's start depends on earlier tokens or on padding."""
    params = tiny.make_params(CONFIG)
    other_BT = TOKENS_BT.copy()
    other_BT[0, :13] = other_BT[1, :22] = 7
    other_BT[1, 2 * L + 2 : 4 * L] = 1  # padding
    results = [
        read(CONFIG, params, Memory.empty(CONFIG, B), L, tokens_BT, LENGTH_SB)
        for tokens_BT in (TOKENS_BT, other_BT)
    ]
    (one_BT, one), (two_BT, two) = results
    assert np.any(one_BT[0, :13] != two_BT[0, :13])
    for b, start in ((0, 13), (1, 22)):
        np.testing.assert_array_equal(one_BT[b, start:], two_BT[b, start:])
    tiny.assert_equal(
        (one.fast.S_NBHUA, one.fast.k_NBHA), (two.fast.S_NBHUA, two.fast.k_NBHA)
    )
    assert np.any(one.fast.S_NBHUA[:, 0] != 0) and not np.any(one.fast.S_NBHUA[:, 1])


@pytest.mark.exact_bits
def test_closed_gates_change_no_bit() -> None:
    params = tiny.make_params(CONFIG)
    base = dataclasses.replace(CONFIG, fast_weights=False)
    layers = params["layers"]
    fast = layers["attention"]["fast"]
    gate = {"kernel": 0 * fast["gate"]["kernel"], "bias": fast["gate"]["bias"] - 1e3}

    def with_attention(attention: Params) -> Params:
        return {**params, "layers": {**layers, "attention": attention}}

    shut = with_attention({**layers["attention"], "fast": {**fast, "gate": gate}})
    plain = with_attention(
        {name: x for name, x in layers["attention"].items() if name != "fast"}
    )
    nll_BT, memory = read(CONFIG, shut, Memory.empty(CONFIG, B))
    expected_BT, expected = read(base, plain, Memory.empty(base, B))
    np.testing.assert_array_equal(nll_BT, expected_BT)
    tiny.assert_equal(dataclasses.replace(memory, fast=None), expected)
    open_BT, _ = read(CONFIG, params, Memory.empty(CONFIG, B))
    assert np.any(open_BT != expected_BT), "open gates have an effect"


def test_the_matrices_are_float32_in_bfloat16_models() -> None:
    config = dataclasses.replace(EVEN, dtype="bfloat16")
    params = tiny.make_params(config)
    expected_BT, _ = read(EVEN, params, Memory.empty(EVEN, B))
    nll_BT, memory = read(config, params, Memory.empty(config, B))
    assert memory.fast.S_NBHUA.dtype == memory.fast.k_NBHA.dtype == np.float32
    tiny.assert_close(nll_BT, expected_BT, 2 * tiny.BFLOAT16)
    apart = lay_out(params)
    fixed = KeyValueMemory.empty(config, apart, B, L)
    nll_BT, fixed = read(config, apart, fixed)
    assert fixed.fast.S_NBHUA.dtype == np.float32
    tiny.assert_close(nll_BT, expected_BT, 2 * tiny.BFLOAT16)
    fast, h_BLD = FastWeights(config), jnp.zeros((B, L, config.d_model), jnp.bfloat16)
    own = {"params": apart["layers_0"]["attention"]["fast"]}
    rates = jax.eval_shape(lambda: fast.apply(own, h_BLD, method="find_rates"))
    keys = jax.eval_shape(lambda: feature(h_BLD))
    assert rates.dtype == keys.dtype == np.float32


def test_gradients_pass_the_segments_of_a_call() -> None:
    """Finite differences agree; none passes into the memory before the call."""
    params = jax.tree.map(lambda x: x.astype(np.float64), tiny.make_params(CONFIG))
    memory = Memory.empty(CONFIG, B)

    def loss(params: Params, memory: Any) -> Any:
        result: Any = TransformerXL(CONFIG).apply(
            {"params": params}, TOKENS_BT[:, :-1], TOKENS_BT[:, 1:], memory,
            method="nll",
        first_BL=FIRST_BT, segment_len=L,
        )  # fmt: skip
        return jnp.sum(result[0][:, -L:])

    grads = jax.jit(jax.grad(loss))(params, memory)
    _, after = read(CONFIG, params, memory)
    into: Any = jax.jit(jax.grad(loss, argnums=1, allow_int=True))(params, after)
    assert not np.any(into.fast.S_NBHUA) and not np.any(into.fast.k_NBHA)

    def oracle() -> float:
        total = 0.0
        for b in range(B):
            stream = Stream(params, **tiny.reference_settings(CONFIG))
            for s in range(S):
                part = np.s_[s * L : (s + 1) * L]
                targets_L = TOKENS_BT[b, 1:][part]
                nll_L = stream.nll(TOKENS_BT[b][part], targets_L, FIRST_BT[b][part])
            total += nll_L.sum()
        return total

    own, found = params["layers"]["attention"], grads["layers"]["attention"]
    for path in ("k", "fast/write/kernel", "fast/decay/bias"):
        leaf, grad = own, found
        for name in path.split("/"):
            leaf, grad = leaf[name], grad[name]
        at = np.unravel_index(np.argmax(np.abs(grad)), grad.shape)
        sides = []
        for step in (1e-5, -1e-5):
            leaf[at] += step
            sides.append(oracle())
            leaf[at] -= step
        difference = (sides[0] - sides[1]) / 2e-5
        assert abs(difference) > 1e-3
        assert float(grad[at]) == pytest.approx(difference, rel=1e-4), path
