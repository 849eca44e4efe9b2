"""The model is the paper's, as `tests.reference` writes it out, however it is computed.

Dims: N layers, B streams, L segment, M memory, D model, V vocabulary.
"""

import dataclasses
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import reference
from tests.support import tiny
from txl_jax.model.config import ModelConfig
from txl_jax.model.dropout import Dropout
from txl_jax.model.memory import Memory
from txl_jax.model.txl import TransformerXL
from txl_jax.update.init import abstract_params

B, L = 3, 4
SEGMENTS = 4
PARAMS = tiny.make_params()
DROPOUT = tiny.config(dropout=0.3, dropatt=0.3)


def assert_reads_as_the_reference(
    config: ModelConfig, documents: bool = False, ragged: bool = False
) -> None:
    """Reads segments, each with the memory of those before, and compares."""
    rng = np.random.default_rng(2)
    params = tiny.make_params(config)
    settings = tiny.reference_settings(config)
    memory = Memory.empty(config, B)
    expected_memory = reference.empty(config.n_layer, B, tiny.D)
    if config.initial_memory == "zeros":
        expected_memory = reference.zeros(config.n_layer, B, tiny.D, config.mem_len)
    for s in range(SEGMENTS):
        tokens_BL = tiny.make_tokens(B, L, 10 + s)
        targets_BL = tiny.make_tokens(B, L, 20 + s)
        more: dict[str, Any] = {}
        if documents:
            more["first_BL"] = rng.random((B, L)) < 0.2
        if ragged:
            # All, some or none of the tokens are real.
            more["length_B"] = np.roll(np.array([L, 2, 0], np.int32), s)
        nll_BL, memory = tiny.apply(
            config, params, tokens_BL, targets_BL, memory, method="nll", **more
        )
        expected_BL, expected_memory = reference.nll(
            params, tokens_BL, targets_BL, expected_memory, **settings, **more
        )
        length_B = more.get("length_B", np.full(B, L))
        real_BL = np.arange(L) < length_B[:, None]
        tiny.assert_close(np.where(real_BL, nll_BL, 0), expected_BL)
        tiny.assert_memory(memory, expected_memory)


CASES: list[Any] = [({}, 3), *((settings, 6) for settings in tiny.SETTINGS)]
LONG: list[Any] = [(settings, 3) for settings in tiny.SETTINGS[1:]]


@pytest.mark.promise("The model is the paper's")
@pytest.mark.parametrize(
    ("settings", "mem_len"),
    [*CASES, *(pytest.param(*case, marks=pytest.mark.long) for case in LONG)],
    ids=str,
)
def test_segments_read_as_the_reference(settings: dict[str, Any], mem_len: int) -> None:
    assert_reads_as_the_reference(tiny.config(mem_len=mem_len, **settings))


CLUSTERS: dict[str, Any] = {"cutoffs": (5, 9), "div_val": 2}
VARIANTS: list[dict[str, Any]] = [
    {"untie_r": True, "initial_memory": "zeros", "layer_norm_epsilon": 0.1},
    {"same_length": True, "same_length_self": True},
    {"cutoffs": (5, 9)},
    {**CLUSTERS, "tie_projs": (False, True, True)},
    {**CLUSTERS, "tie_weights": False, "proj_same_dim": False},
    {"d_embed": 6, "cutoffs": (4,)},
    {"position": "shaw", "n_position": 5},
    {"position": "shaw_biased", "n_position": 20, "clamp_len": 3},
    {"position": "none", "pre_lnorm": True},
    {"position": "sinusoidal", "mem_len": 0},
    {"position": "learned", "n_position": 6, "mem_len": 0},
    {"position": "sinusoidal_repeated"},
]


@pytest.mark.parametrize("changes", VARIANTS, ids=str)
def test_variants_read_as_the_reference(changes: dict[str, Any]) -> None:
    config = tiny.config(**changes)
    documents = config.initial_memory == "empty"
    assert_reads_as_the_reference(config, documents, ragged=True)


@pytest.mark.parametrize(
    ("settings", "documents", "ragged"),
    [({"mem_len": 0}, False, False), ({}, True, False), (tiny.ALL, True, True)],
    ids=str,
)
def test_documents_and_padding_read_as_the_reference(
    settings: dict[str, Any], documents: bool, ragged: bool
) -> None:
    assert_reads_as_the_reference(tiny.config(**settings), documents, ragged)


@pytest.mark.promise("The model is the paper's")
def test_hidden_and_logits_are_the_references() -> None:
    config = tiny.config(**tiny.ALL)
    settings = tiny.reference_settings(config)
    earlier_BL, tokens_BL = tiny.make_tokens(B, L, 1), tiny.make_tokens(B, L, 2)
    empty = reference.empty(config.n_layer, B, tiny.D)
    _, expected_memory = reference.forward(PARAMS, earlier_BL, empty, **settings)
    _, memory = tiny.apply(config, PARAMS, earlier_BL, Memory.empty(config, B))
    hidden_BLD, _ = tiny.apply(config, PARAMS, tokens_BL, memory)
    logits_BLV, after = tiny.apply(config, PARAMS, tokens_BL, memory, method="logits")
    expected_BLD, _ = reference.forward(PARAMS, tokens_BL, expected_memory, **settings)
    expected_BLV, expected_after = reference.logits(
        PARAMS, tokens_BL, expected_memory, **settings
    )
    tiny.assert_close(hidden_BLD, expected_BLD)
    tiny.assert_close(logits_BLV, expected_BLV)
    tiny.assert_memory(after, expected_after)


# Dropout.


def read_with_dropout(config: ModelConfig, seed: int | None) -> Any:
    """Returns (nll_BL, memory) of a segment with a memory that is partly filled."""
    _, memory = tiny.read(tiny.CONFIG, PARAMS, tiny.make_tokens(B, 3, 3), 3)
    rngs = {} if seed is None else {"dropout": jax.random.key(seed)}
    tokens_BL, targets_BL = tiny.make_tokens(B, L), tiny.make_tokens(B, L, 2)
    return tiny.apply(
        config, PARAMS, tokens_BL, targets_BL, memory, method="nll", rngs=rngs
    )


def test_dropout_is_off_without_its_rng() -> None:
    off = read_with_dropout(tiny.CONFIG, None)
    tiny.assert_equal(read_with_dropout(DROPOUT, None), off)
    # Another program, so its sums may come in another order.
    tiny.assert_close(read_with_dropout(tiny.CONFIG, 0), off)


@pytest.mark.parametrize("field", ["dropout", "dropatt"])
def test_each_dropout_is_on_with_its_rng(field: str) -> None:
    config = tiny.config(**{field: 0.3})
    off, on, other = (
        np.asarray(read_with_dropout(config, seed)[0]) for seed in (None, 0, 1)
    )
    assert (np.abs(on - off) > 1e-3).any(axis=1).all()
    assert (np.abs(on - other) > 1e-3).any(axis=1).all()


def test_dropout_is_where_the_original_code_has_it() -> None:
    """On embeddings and output, on R, and in each layer three times."""
    found = set()

    def record(call: Any, args: Any, kwargs: Any, context: Any) -> Any:
        if isinstance(context.module, Dropout):
            found.add((context.module.path[:-1], args[0].shape))
        return call(*args, **kwargs)

    tokens_BL, memory = tiny.make_tokens(B, L), Memory.empty(DROPOUT, B)
    with nn.intercept_methods(record):
        jax.eval_shape(
            lambda key: TransformerXL(DROPOUT).apply(
                {"params": PARAMS}, tokens_BL, memory, rngs={"dropout": key}
            ),
            jax.random.key(0),
        )
    shape_BLD, shape_BLF = (B, L, tiny.D), (B, L, tiny.F)
    assert found == {
        ((), shape_BLD),
        ((), (memory.mem_len + L, tiny.D)),
        (("layers", "attention"), shape_BLD),
        (("layers", "feed_forward"), shape_BLF),
        (("layers", "feed_forward"), shape_BLD),
    }


def test_output_and_remembered_embeddings_are_after_dropout() -> None:
    """So a token is remembered as it was read."""
    tokens_BL, memory = tiny.make_tokens(B, L), Memory.empty(DROPOUT, B)
    rngs = {"dropout": jax.random.key(0)}
    hidden_BLD, memory = tiny.apply(DROPOUT, PARAMS, tokens_BL, memory, rngs=rngs)
    h_BLD = PARAMS["embedding"]["table"][tokens_BL] * tiny.D**0.5
    kept_BLD = np.asarray(memory.h_NBMD[0, :, -L:])
    dropped_BLD = kept_BLD == 0
    scale = 1 / (1 - DROPOUT.dropout)
    tiny.assert_close(kept_BLD, np.where(dropped_BLD, 0, h_BLD * scale))
    for dropped in (dropped_BLD, hidden_BLD == 0):
        assert 0.1 < dropped.mean() < 0.5


def test_each_layer_draws_its_own_dropout() -> None:
    """Layers that add a constant, through dropout, show what each of them drops."""
    config = tiny.config(n_layer=3, pre_lnorm=True, mem_len=L, dropout=0.5)
    params = jax.tree.map(np.copy, tiny.make_params(config))
    params["layers"]["attention"]["o"][:] = 0
    params["layers"]["feed_forward"]["out"]["kernel"][:] = 0
    params["layers"]["feed_forward"]["out"]["bias"][:] = 1.0
    rngs = {"dropout": jax.random.key(0)}
    tokens_BL, memory = tiny.make_tokens(B, L), Memory.empty(config, B)
    _, memory = tiny.apply(config, params, tokens_BL, memory, rngs=rngs)
    added_2BLD = np.diff(np.asarray(memory.h_NBMD), axis=0)
    kept_2BLD = added_2BLD > 1
    tiny.assert_close(added_2BLD, 2.0 * kept_2BLD)
    assert 0.25 < kept_2BLD.mean() < 0.75
    assert 0.25 < (kept_2BLD[0] != kept_2BLD[1]).mean() < 0.75


# The same model, computed otherwise.


def value_and_gradient(config: ModelConfig) -> Any:
    """Returns ((summed nll, memory), gradient) of a segment, with dropout."""
    tokens_BL, targets_BL = tiny.make_tokens(B, L), tiny.make_tokens(B, L, 2)
    _, memory = tiny.read(tiny.CONFIG, PARAMS, tiny.make_tokens(B, 3, 3), 3)

    # Of the generators, rbg compiles fastest.
    rngs = {"dropout": jax.random.key(0, impl="rbg")}

    def loss(params: Any, memory: Memory) -> tuple[jax.Array, Any]:
        nll_BL, after = TransformerXL(config).apply(
            {"params": params},
            tokens_BL,
            targets_BL,
            memory,
            method="nll",
            rngs=rngs,
        )
        return jnp.sum(nll_BL), after

    return tiny.jit(jax.value_and_grad(loss, has_aux=True))(PARAMS, memory)


def test_unrolled_and_recomputed_layers_are_the_same_model() -> None:
    config = dataclasses.replace(DROPOUT, unroll=tiny.N, remat=True)
    assert abstract_params(config) == abstract_params(DROPOUT)
    tiny.assert_close(value_and_gradient(config), value_and_gradient(DROPOUT))


# bfloat16.


def test_parameters_are_float32_under_bfloat16() -> None:
    shapes = abstract_params(tiny.config(dtype="bfloat16"))
    assert {leaf.dtype for leaf in jax.tree.leaves(shapes)} == {jnp.dtype("float32")}


@pytest.mark.parametrize(
    "changes",
    [
        {"cutoffs": (5, 9), "div_val": 2, "pre_lnorm": True},
        {"position": "shaw_biased", "n_position": 6},
        {"position": "sinusoidal_repeated"},
    ],
    ids=str,
)
def test_bfloat16_computes_the_same(changes: dict[str, Any]) -> None:
    exact, short = tiny.config(**changes), tiny.config(**changes, dtype="bfloat16")
    params = tiny.make_params(exact)
    tokens_BL, targets_BL = tiny.make_tokens(B, L), tiny.make_tokens(B, L, 2)
    memories = [Memory.empty(config, B) for config in (exact, short)]
    for _ in range(3):
        (expected_BL, memories[0]), (nll_BL, memories[1]) = (
            tiny.apply(config, params, tokens_BL, targets_BL, memory, method="nll")
            for config, memory in zip((exact, short), memories, strict=True)
        )
        assert nll_BL.dtype == jnp.float32
        assert memories[1].h_NBMD.dtype == jnp.bfloat16
        tiny.assert_close(nll_BL, expected_BL, tiny.BFLOAT16)
