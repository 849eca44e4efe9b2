"""The model agrees with `tests.reference` in every variant and way of computing it."""

import dataclasses
import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, AxisType

from tests import reference
from tests.reference import Array
from tests.support import tiny
from txl_jax.model.config import ModelConfig
from txl_jax.model.memory import Memory
from txl_jax.model.modules import Dropout
from txl_jax.model.txl import TransformerXL, count_unrolled
from txl_jax.sharding.mesh import AXES
from txl_jax.update.state import abstract_params

B, L = 3, 4
SEGMENTS = 4
PARAMS = tiny.make_params()
DROPOUT = tiny.config(dropout=0.3, dropatt=0.3)
CLUSTERS: dict[str, Any] = {"cutoffs": (5, 9), "div_val": 2}
VARIANTS: list[dict[str, Any]] = [
    tiny.ALL,
    {"untie_r": True, "initial_memory": "zeros", "layer_norm_epsilon": 0.1},
    {"same_length": True, "same_length_self": True, "mem_len": 3},
    {**CLUSTERS, "tie_weights": False, "proj_same_dim": False},
    {"position": "shaw", "n_position": 5},
    # Fewer distances than keys, which this kernel does not support.
    {"position": "shaw_biased", "n_position": 20, "clamp_len": 3, "kernel": "chunked"},
    {"position": "none", "pre_lnorm": True},
    {**tiny.GATED, "kernel": "chunked"},
    {"position": "alibi", "clamp_len": 3, "kernel": "chunked", **tiny.MODERN},
    {"position": "rotary", "d_head": 4, "pre_lnorm": True, "feed_forward": "geglu"},
    {"position": "learned", "n_position": 6, "mem_len": 0},
    {"position": "sinusoidal", "mem_len": 0},
    {**CLUSTERS, "pre_lnorm": True, "dtype": "bfloat16"},
]
# `tests.promises.test_published_models` has more vocabularies.
OTHERS: list[dict[str, Any]] = [
    *tiny.SETTINGS[1:-1],
    {"mem_len": 0},
    {"dtype": "bfloat16", "clamp_len": 2, **tiny.GATED},
    {"dtype": "bfloat16", "initial_memory": "zeros"},
    {**tiny.ALL, "mem_len": 3},
    {**CLUSTERS, "tie_projs": (False, True, True)},
    {"d_embed": 6, "cutoffs": (4,)},
]


@pytest.mark.promise("The model is the paper's")
@pytest.mark.parametrize(
    "changes",
    [*VARIANTS, *(pytest.param(changes, marks=pytest.mark.long) for changes in OTHERS)],
    ids=str,
)
def test_segments_agree_with_the_reference(changes: dict[str, Any]) -> None:
    """There are documents and padding, and a memory of earlier segments."""
    config, rng = tiny.config(**changes), np.random.default_rng(2)
    params = tiny.make_params(config)
    settings = tiny.reference_settings(config)
    memory = Memory.empty(config, B)
    tolerance = tiny.BFLOAT16 if config.dtype == "bfloat16" else tiny.FLOAT32
    visible = config.mem_len if config.initial_memory == "zeros" else 0
    expected_memory = reference.zeros(config.n_layer, B, tiny.D, visible)
    for s in range(SEGMENTS):
        tokens_BL = tiny.make_tokens(B, L, 10 + s)
        targets_BL = tiny.make_tokens(B, L, 20 + s)
        # All, some or none of the tokens are real.
        length_B = np.roll(np.array([L, 2, 0], np.int32), s)
        first_BL = rng.random((B, L)) < 0.2
        if visible:
            first_BL[:] = False
        segment = {"first_BL": first_BL, "length_B": length_B}
        nll_BL, memory = tiny.apply(
            config, params, tokens_BL, targets_BL, memory, method="nll", **segment
        )
        expected_BL, expected_memory = reference.nll(
            params, tokens_BL, targets_BL, expected_memory, **settings, **segment
        )
        real_BL = np.arange(L) < length_B[:, None]
        assert nll_BL.dtype == jnp.float32
        assert memory.h_NBMD.dtype == config.compute_dtype
        tiny.assert_close(np.where(real_BL, nll_BL, 0), expected_BL, tolerance)
        tiny.assert_memory(memory, expected_memory, tolerance)


# Dropout.


def partly_filled() -> Memory:
    """Returns a memory with fewer tokens than slots."""
    return tiny.read(tiny.CONFIG, PARAMS, tiny.make_tokens(B, 3, 3), 3)[1]


def read_with_dropout(config: ModelConfig, seed: int | None) -> Any:
    memory = partly_filled()
    # The generator rbg compiles fastest.
    rngs = {} if seed is None else {"dropout": jax.random.key(seed, impl="rbg")}
    tokens_BL, targets_BL = tiny.make_tokens(B, L), tiny.make_tokens(B, L, 2)
    return tiny.apply(
        config, PARAMS, tokens_BL, targets_BL, memory, method="nll", rngs=rngs
    )


def test_dropout_is_on_if_and_only_if_its_rng_is_passed() -> None:
    off_BL, memory = read_with_dropout(tiny.CONFIG, None)
    tiny.assert_equal(read_with_dropout(DROPOUT, None), (off_BL, memory))
    # `test_modules` tests the other dropout, which is not of attention weights.
    config = tiny.config(dropatt=0.3)
    on_BL, other_BL = (np.asarray(read_with_dropout(config, n)[0]) for n in (0, 1))
    assert (np.abs(on_BL - off_BL) > 1e-3).any(axis=1).all()
    assert (np.abs(on_BL - other_BL) > 1e-3).any(axis=1).all()


def test_dropout_is_placed_as_in_the_original_code() -> None:
    """It is on embeddings and output, on R, and three times in each layer."""
    calls = []

    def record(call: Any, args: Any, kwargs: Any, context: Any) -> Any:
        if isinstance(context.module, Dropout):
            calls.append((context.module.path[:-1], args[0].shape))
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
    outside = [shape for path, shape in calls if not path]
    assert outside == [shape_BLD, (memory.mem_len + L, tiny.D), shape_BLD]
    assert {(path, shape) for path, shape in calls if path} == {
        (("layers", "attention"), shape_BLD),
        (("layers", "feed_forward"), shape_BLF),
        (("layers", "feed_forward"), shape_BLD),
    }


def test_layers_draw_independent_dropout() -> None:
    """Each layer adds a constant with dropout, which shows its mask."""
    config = tiny.config(n_layer=3, pre_lnorm=True, mem_len=L, dropout=0.5)
    params = jax.tree.map(np.copy, tiny.make_params(config))
    params["layers"]["attention"]["o"][:] = 0
    params["layers"]["feed_forward"]["out"]["kernel"][:] = 0
    params["layers"]["feed_forward"]["out"]["bias"][:] = 1.0
    rngs = {"dropout": jax.random.key(0, impl="rbg")}
    tokens_BL, memory = tiny.make_tokens(B, L), Memory.empty(config, B)
    _, memory = tiny.apply(config, params, tokens_BL, memory, rngs=rngs)
    added_2BLD = np.diff(np.asarray(memory.h_NBMD), axis=0)
    kept_2BLD = added_2BLD > 1
    tiny.assert_close(added_2BLD, 2.0 * kept_2BLD)
    assert 0.25 < kept_2BLD.mean() < 0.75
    assert 0.25 < (kept_2BLD[0] != kept_2BLD[1]).mean() < 0.75


# Equivalent ways of computing the model.


@functools.cache
def value_and_gradient(config: ModelConfig) -> Any:
    """Returns ((summed nll, memory), gradient) of a segment, with dropout."""
    tokens_BL, targets_BL = tiny.make_tokens(B, L), tiny.make_tokens(B, L, 2)
    rngs = {"dropout": jax.random.key(0, impl="rbg")}

    def loss(params: Any, memory: Memory) -> tuple[jax.Array, Any]:
        nll_BL, after = TransformerXL(config).apply(
            {"params": params}, tokens_BL, targets_BL, memory, method="nll", rngs=rngs
        )
        return jnp.sum(nll_BL), after

    return jax.jit(jax.value_and_grad(loss, has_aux=True))(PARAMS, partly_filled())


@pytest.mark.parametrize(
    "fields",
    [
        {"kernel": "chunked", "remat_policy": "offload:q,hidden"},
        pytest.param(
            {"unroll": tiny.N, "remat_policy": "full"}, marks=pytest.mark.long
        ),
    ],
    ids=str,
)
def test_unrolling_and_remat_change_nothing(fields: dict[str, Any]) -> None:
    config = dataclasses.replace(DROPOUT, **fields)
    half = dataclasses.replace(config, dtype="bfloat16")
    shapes = abstract_params(DROPOUT)
    assert abstract_params(config) == abstract_params(half) == shapes
    assert {leaf.dtype for leaf in jax.tree.leaves(shapes)} == {jnp.dtype("float32")}
    tiny.assert_close(value_and_gradient(config), value_and_gradient(DROPOUT))


def test_all_layers_are_one_step_of_the_scan_except_on_a_tpu() -> None:
    axes = (AxisType.Auto,) * len(AXES)
    for platform, layers in (("gpu", tiny.N), ("tpu", 1), ("cpu", tiny.N)):
        device = AbstractDevice("absent", None, platform)
        mesh = AbstractMesh((1, 1, 1), AXES, axes, abstract_device=device)
        with jax.sharding.use_abstract_mesh(mesh):
            assert count_unrolled(tiny.config()) == layers
            assert count_unrolled(tiny.config(unroll=1)) == 1
    assert count_unrolled(tiny.config(unroll=9)) == tiny.N


def test_kept_products_are_not_computed_again() -> None:
    def products(policy: str) -> int:
        model = TransformerXL(tiny.config(remat_policy=policy))
        args = jnp.zeros((B, L), jnp.int32), Memory.empty(model.config, B)

        def loss(params: Any) -> Any:
            return model.apply({"params": params}, *args)[0].sum()

        return str(jax.make_jaxpr(jax.grad(loss))(PARAMS)).count("dot_general")

    full = products("full")
    # Each sum follows a product with weights.
    kept = {"save:q,k,v": 3, "offload:r,hidden": 2, "save:sum": 2, "dots": 5}
    for policy, count in kept.items():
        assert products(policy) == full - count, policy


def test_embeddings_replace_tokens() -> None:
    """No bit changes in one program, with documents, padding and dropout."""
    apply = functools.partial(TransformerXL(DROPOUT).apply, {"params": PARAMS})
    segment: Any = {"first_BL": np.eye(B, L, dtype=bool), "length_B": np.full(B, 2)}
    segment["rngs"] = {"dropout": jax.random.key(3, impl="rbg")}

    def embed(tokens_BL: Array) -> Any:
        return apply(tokens_BL, method=lambda m, x: m.embedding.embed(x))

    @jax.jit
    def read(tokens_BL: Array, memory: Memory) -> Any:
        inputs_BLD = embed(tokens_BL)
        from_inputs = apply(inputs_BLD, memory, **segment, method="read_inputs")
        return apply(tokens_BL, memory, **segment), from_inputs

    memory = Memory.empty(DROPOUT, B)
    for seed in (1, 2):
        tokens_BL = tiny.make_tokens(B, L, seed)
        expected, actual = read(tokens_BL, memory)
        tiny.assert_equal(actual, expected)
        memory = expected[1]


def test_a_model_of_embeddings_has_no_parameters_for_tokens() -> None:
    model = TransformerXL(tiny.config(vocab_size=0))
    init = functools.partial(model.init, method="read_inputs")
    args = jax.random.key(0), jnp.zeros((B, L, tiny.D)), Memory.empty(model.config, B)
    params = jax.eval_shape(init, *args)["params"]
    expected = nn.unbox(abstract_params(tiny.CONFIG))
    del expected["embedding"]
    assert nn.unbox(params) == expected
