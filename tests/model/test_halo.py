"""Pieces of the text on different devices give the numbers of one device."""

import functools
from typing import Any

import flax.linen as nn
import jax
import numpy as np
import pytest
from jax.sharding import Mesh

from experiments.benchmarks.hlo import HloProgram, collectives
from tests.support import tiny
from txl_jax.errors import UserError
from txl_jax.model.config import ModelConfig
from txl_jax.model.memory import Memory
from txl_jax.model.segment import OneSegment
from txl_jax.model.txl import TransformerXL
from txl_jax.sharding.mesh import make_mesh
from txl_jax.sharding.options import MeshConfig
from txl_jax.sharding.rules import letters, shardings
from txl_jax.update.state import abstract_params
from txl_jax.update.step import nll_sum

B, G, L = 4, 4, 5
T = G * L
DROPOUT: dict[str, Any] = {"dropout": 0.2, "dropatt": 0.3}
CUBE = MeshConfig(data=1, fsdp=2, model=2, segments=2)


OTHERS: list[tuple[MeshConfig, dict[str, Any]]] = [
    (CUBE, {"variational": True, "cutoffs": (4, 8), **DROPOUT}),
    (MeshConfig(segments=2), {"position": "rotary", "d_head": 4} | tiny.MODERN),
    (MeshConfig(data=1, segments=4, model=-1), {"mem_len": 0}),
    (CUBE, {"mem_len": 10, "position": "shaw_biased", "n_position": 4}),
    (MeshConfig(segments=4), {"initial_memory": "zeros", "position": "t5"}),
]


def make_grad(config: ModelConfig, segment_len: int = L) -> Any:
    """Returns the jitted nll_sum of a call, with its gradient."""
    loss = functools.partial(nll_sum, TransformerXL(config), segment_len=segment_len)
    return jax.jit(jax.value_and_grad(loss, has_aux=True))


def make_segment(seed: int, length_B: list[int]) -> OneSegment:
    """Returns T tokens of each stream, with documents that start anywhere."""
    rng, shape = np.random.default_rng(seed), (B, T)
    arrays: list[Any] = [
        tiny.make_tokens(*shape, seed),
        tiny.make_tokens(*shape, seed + 1),
        (np.arange(T) < np.array(length_B)[:, None]).astype(np.float32),
        rng.random(shape) < 0.1,
        np.array(length_B, np.int32),
    ]
    return OneSegment(*arrays)


def place(mesh: Mesh, config: ModelConfig, *args: Any) -> Any:
    """Returns (params, memory, segment) where the rules put them."""
    specs = nn.get_partition_spec(abstract_params(config)), *map(letters, args[1:])
    return jax.device_put(args, shardings(mesh, specs))


@pytest.mark.parametrize(
    ("sizes", "changes"),
    [
        (MeshConfig(segments=4), {"kernel": "chunked", **DROPOUT}),
        (CUBE, {"kernel": "chunked", "remat_policy": "full"} | tiny.ALL | DROPOUT),
        *(pytest.param(*case, marks=pytest.mark.long) for case in OTHERS),
    ],
    ids=str,
)
def test_losses_gradients_and_memories_are_those_of_one_device(
    sizes: MeshConfig, changes: dict[str, Any]
) -> None:
    """There are two calls; the second ends in padding."""
    config = tiny.config(**changes)
    grad, mesh = make_grad(config), make_mesh(sizes)
    params, memory = tiny.make_params(config), Memory.empty(config, B)
    split = memory
    # Seed 0 differs by 5e-5 on this mesh even without pieces.
    for seed, length_B in enumerate(([T] * B, [T, T // 2 + 1, 2, 0]), 1):
        segment, key = make_segment(seed, length_B), jax.random.key(seed)
        if config.initial_memory == "zeros":
            first_BL: Any = segment.first_BL
            first_BL[:, 1:] = False
        (nll, (_, memory)), grads = grad(params, memory, segment, key)
        placed = place(mesh, config, params, split, segment)
        (actual, (_, split)), split_grads = grad(*placed, key)
        tiny.assert_close((actual, split_grads), (nll, grads))
        tiny.assert_close(split, memory)


def test_only_the_newest_states_pass_from_piece_to_piece() -> None:
    """Other exchanges along the text are sums: of gradients, and for the memory."""
    M, config = 3, tiny.config(mem_len=3, kernel="chunked", **DROPOUT)
    mesh = make_mesh(MeshConfig(data=1, segments=4), jax.devices()[:4])
    args = tiny.make_params(config), Memory.empty(config, B), make_segment(0, [T] * B)
    step = make_grad(config).lower(*place(mesh, config, *args), jax.random.key(0))
    found = collectives(HloProgram(step.compile().as_text()))
    passed = [each for each in found if each.kind != "all-reduce"]
    # One in each layer, and its transpose.
    one = ("collective-permute", 4 * B * M * tiny.D, tiny.N)
    assert passed == [one, one]


@pytest.mark.parametrize(
    ("changes", "segment_len", "message"),
    [
        ({"mem_len": 6}, L, "T / P = 5: .* at least the M = 6 .* a multiple of 8,"),
        ({}, 2 * L, "T / P = 5: .* whole segments of 10 tokens.* a multiple of 4,"),
        ({"mem_len": 0, "position": "sinusoidal"}, L, '= "sinusoidal" numbers'),
    ],
)
def test_pieces_that_need_more_than_their_neighbour_are_refused(
    changes: dict[str, Any], segment_len: int, message: str
) -> None:
    config = tiny.config(**changes)
    args = tiny.make_params(config), Memory.empty(config, B), make_segment(0, [T] * B)
    placed = place(make_mesh(MeshConfig(segments=4)), config, *args)
    with pytest.raises(UserError, match=message):
        make_grad(config, segment_len).trace(*placed, jax.random.key(0))
