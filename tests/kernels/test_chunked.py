"""The chunked kernel is the einsum kernel, without its arrays of queries by keys.

Dims: S layers of a scan, B streams, L queries, M memory, K = M + L keys, H heads, A
head; blocks of X queries, tiles of Y keys.
"""

import functools
import math
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.kernels import cases
from tests.kernels.cases import OLDEST, assert_agree, cast, differentiate, make_inputs
from tests.support import tiny
from tests.support.tiny import BFLOAT16, assert_close
from txl_jax.kernels import chunked, xla
from txl_jax.kernels.hash import Dropout, keep_BHLK
from txl_jax.kernels.tiles import Blocks, choose_blocks
from txl_jax.model.memory import Memory
from txl_jax.model.txl import TransformerXL

SMALL = Blocks(4, 8)
DROPOUT = Dropout(0.3, jnp.uint32(7), 5, 3)
# L, M around multiples of SMALL: one short, exact, one over; and the ends of the scale.
SIZES = [(4, 4), (7, 8), (8, 8), (9, 8), (8, 0), (5, 12), (1, 0), (1, 16), (3, 30)]


def kernel(blocks: Blocks | None = SMALL) -> Callable[..., jax.Array]:
    return functools.partial(chunked.rel_attention, blocks=blocks)


def assert_agrees(
    inputs: dict[str, Any],
    dropout: Dropout | None = None,
    blocks: Blocks | None = SMALL,
) -> None:
    expected = differentiate(xla.rel_attention, inputs, dropout)
    assert_agree(differentiate(kernel(blocks), inputs, dropout), expected)


@pytest.mark.parametrize(("L", "M"), SIZES)
def test_value_and_gradients_for_every_length(L: int, M: int) -> None:
    assert_agrees(make_inputs(L, M, "filling"), DROPOUT)


@pytest.mark.parametrize("blocks", [(1, 1), (3, 3), (2, 16), (9, 9), (9, 21), None])
def test_value_and_gradients_for_every_size_of_blocks(blocks: Any) -> None:
    assert_agrees(make_inputs(9, 12, "documents"), DROPOUT, blocks and Blocks(*blocks))


@pytest.mark.parametrize("oldest", OLDEST)
def test_value_and_gradients_whatever_is_hidden(oldest: str) -> None:
    assert_agrees(make_inputs(9, 13, oldest))


@pytest.mark.parametrize(
    "absent",
    [["bias_HR"], ["u_HA"], ["w_HA"], ["r_RHA"], ["r_RHA", "u_HA", "w_HA", "bias_HR"]],
    ids=str,
)
def test_what_is_absent_is_left_out(absent: list[str]) -> None:
    assert_agrees(make_inputs(9, 13) | dict.fromkeys(absent))


def test_distances_may_be_clamped() -> None:
    inputs = make_inputs(9, 13)
    inputs["r_RHA"][:-5] = inputs["r_RHA"][-5]
    assert_agrees(inputs)


@pytest.mark.parametrize("dropout", [None, DROPOUT])
def test_bfloat16(dropout: Dropout | None) -> None:
    inputs = make_inputs(9, 13, "same_length")
    actual = differentiate(kernel(), cast(inputs, jnp.bfloat16), dropout)
    assert {x.dtype for x in jax.tree.leaves(actual)} == {jnp.dtype(jnp.bfloat16)}
    assert_agree(actual, differentiate(xla.rel_attention, inputs, dropout), BFLOAT16)


def test_gradients_of_biases_are_added_up_in_float32() -> None:
    """Each is a sum over 2048 queries, here: too many for bfloat16's 8 bits."""
    inputs = make_inputs(256, 256, B=8)
    actual = differentiate(kernel(None), cast(inputs, jnp.bfloat16))
    assert_agree(actual, differentiate(xla.rel_attention, inputs), BFLOAT16 / 2)


def test_greater_scores_in_older_tiles_do_not_overflow() -> None:
    inputs = make_inputs(9, 13)
    inputs["k_BKHA"] *= 100 * np.linspace(2, 0, 22, dtype=np.float32)[:, None, None]
    o_BLHA = tiny.jit(functools.partial(kernel(), dropout=None))(**inputs)
    expected = tiny.jit(functools.partial(xla.rel_attention, dropout=None))(**inputs)
    assert_close(o_BLHA, expected)


@pytest.mark.parametrize("blocks", [SMALL, Blocks(12, 12), Blocks(5, 6)])
def test_dropout_has_the_mask_of_the_einsum_kernel(blocks: Blocks) -> None:
    """Values that are unit vectors make the result the dropped probabilities."""
    L, M = 7, 5
    K = M + L
    inputs = make_inputs(L, M)
    for name in ("q_BLHA", "k_BKHA", "r_RHA", "u_HA", "w_HA"):
        inputs[name] = np.resize(inputs[name], (*inputs[name].shape[:-1], K))
    unit_BKHA = np.broadcast_to(np.eye(K)[None, :, None], inputs["k_BKHA"].shape)
    inputs["v_BKHA"] = unit_BKHA.astype(np.float32)
    weight_BLHK = tiny.jit(functools.partial(kernel(blocks), dropout=DROPOUT))(**inputs)
    mask_BHLK = keep_BHLK(DROPOUT, (cases.B, cases.H, L, K))
    past_LK = np.tri(L, K, M, dtype=bool)
    np.testing.assert_array_equal(
        np.asarray(weight_BLHK).swapaxes(1, 2) > 0, np.asarray(mask_BHLK) & past_LK
    )


def test_tiles_out_of_sight_are_not_computed() -> None:
    """Neither the future's nor what is older than the oldest: NaN there is not read."""
    inputs = make_inputs(8, 24, "same_length")
    expected = differentiate(kernel(), inputs)
    inputs["oldest_BL"] = np.maximum(inputs["oldest_BL"], 16)
    hidden = differentiate(kernel(), inputs)
    for name in ("k_BKHA", "v_BKHA"):
        inputs[name][:, :12] = np.nan
    actual = differentiate(kernel(), inputs)
    tiny.assert_equal(actual, hidden)
    with pytest.raises(AssertionError):
        assert_close(actual, expected)


def greatest_array(compiled: Any) -> int:
    """Returns the elements of the greatest array in a compiled program."""
    shapes = re.findall(r"\w\[([\d,]+)\]", compiled.as_text())
    return max(math.prod(map(int, shape.split(","))) for shape in shapes)


def test_no_array_is_as_great_as_queries_by_keys() -> None:
    L, K = 2048, 4096
    inputs = jax.eval_shape(lambda: cast(make_inputs(L, K - L, B=1, H=1), jnp.float32))

    def compiled(kernel: Callable[..., jax.Array]) -> Any:
        def loss(inputs: dict[str, Any]) -> jax.Array:
            return jnp.sum(kernel(**inputs, dropout=DROPOUT) ** 2)

        grad = jax.grad(loss, allow_int=True)
        return tiny.jit(grad).lower(inputs).compile()

    assert greatest_array(compiled(xla.rel_attention)) >= L * K
    program = compiled(chunked.rel_attention)
    assert greatest_array(program) < L * K / 8
    assert program.memory_analysis().temp_size_in_bytes < 4 * L * K


@pytest.mark.parametrize("rows", [1, 8, 64, 1000])
@pytest.mark.parametrize(
    ("L", "K"), [(1, 1), (1, 2000), (80, 2180), (128, 256), (150, 300), (4096, 8192)]
)
def test_blocks_are_few_and_even(rows: int, L: int, K: int) -> None:
    X, Y = choose_blocks(rows, L, K)
    assert X <= Y <= K + 7
    assert rows * X * Y <= max(2**20, rows * 136 * 264)
    for part, whole in ((X, L), (Y, K)):
        assert part == whole or part % 8 == 0
        assert -whole % part < 8 * -(-whole // part)


def test_scan_of_checkpointed_layers() -> None:
    inputs = make_inputs(9, 13, "filling")

    def layers(kernel: Callable[..., jax.Array], q_BLHA: Any, *args: Any) -> jax.Array:
        @jax.checkpoint
        def layer(q_BLHA: Any, seed: Any) -> tuple[Any, None]:
            return q_BLHA + kernel(q_BLHA, *args[:-1], Dropout(0.3, seed)), None

        return jax.lax.scan(layer, q_BLHA, jnp.arange(3, dtype=jnp.uint32))[0]

    actual, expected = (
        differentiate(functools.partial(layers, one), inputs)
        for one in (kernel(), xla.rel_attention)
    )
    assert_close(actual, expected)


def test_vmap_has_its_own_tiles_for_each() -> None:
    both = [make_inputs(9, 13, oldest, seed=n) for n, oldest in enumerate(OLDEST)]
    inputs = jax.tree.map(lambda *xs: np.stack(xs), *both)

    def mapped(one: Callable[..., jax.Array], *args: Any) -> jax.Array:
        return jax.vmap(lambda *arrays: one(*arrays, None))(*args[:-1])

    actual, expected = (
        differentiate(functools.partial(mapped, one), inputs)
        for one in (kernel(), xla.rel_attention)
    )
    assert_close(actual, expected)


MODELS: list[dict[str, Any]] = [
    {"dropatt": 0.3, "remat": True},
    tiny.ALL | {"dropatt": 0.3},
    {"position": "shaw_biased", "n_position": 5},
]


@pytest.mark.parametrize("fields", MODELS, ids=str)
def test_the_model_with_either_kernel(
    fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunked, "choose_blocks", lambda rows, L, K: Blocks(2, 4))
    tokens_BT = tiny.make_tokens(2, 7)
    params = tiny.make_params(tiny.config(**fields))
    memory = Memory.empty(tiny.config(**fields), 2)
    rng = np.random.default_rng(0)
    memory = Memory(
        rng.normal(size=memory.h_NBMD.shape).astype(np.float32),  # type: ignore
        np.minimum(memory.mem_len, [3, 5]).astype(np.int32),  # type: ignore
    )

    def loss(params: Any, kernel: str) -> Any:
        model = TransformerXL(tiny.config(kernel=kernel, **fields))
        rngs = {"dropout": jax.random.key(3)}
        tokens_BL, targets_BL = tokens_BT[:, :-1], tokens_BT[:, 1:]
        result: Any = model.apply(
            {"params": params}, tokens_BL, targets_BL, memory, method="nll", rngs=rngs
        )
        return jnp.sum(result[0])

    run = tiny.jit(jax.value_and_grad(loss), static_argnums=1)
    assert_close(run(params, "chunked"), run(params, "xla"))
