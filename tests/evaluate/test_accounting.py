"""What a memory costs and gives, against counting by brute force.

Dims: N layers, L segment, M memory, R distances, T tokens of a text.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import tiny
from txl_jax.evaluate import accounting
from txl_jax.metrics import parameter_count
from txl_jax.model.key_values import KeyValueMemory, unstack
from txl_jax.model.memory import Memory
from txl_jax.model.positions import sinusoid_RD


def test_bytes_are_those_of_the_arrays() -> None:
    config = tiny.config(mem_len=7, mem_dtype="bfloat16")
    found = accounting.account(config, 3, 5)
    memory = Memory.empty(config, 3)
    assert found["cache_bytes"] == memory.h_NBMD.nbytes
    params = unstack(tiny.make_params(config))
    kept = jax.eval_shape(lambda: KeyValueMemory.of(config, params, memory, 5))
    arrays = [(layer.k_HBKA, layer.v_HBKA) for layer in kept.layers]
    assert found["key_value_bytes"] == 2 * parameter_count(arrays)
    assert found["lost_without_memory"] == accounting.lost_share(17, 5)
    line = accounting.describe(config, 3, 5)
    assert "2 layers x 7 tokens x 8 x 3 streams x 2 bytes = 0.0 MB" in line
    assert "it reaches 17 tokens back" in line
    assert "no memory" in accounting.describe(tiny.config(mem_len=0), 3, 5)


def reach(N: int, M: int, L: int, keys: int, segments: int = 40) -> int:
    """Returns how far the first token of a segment depends on the past, by masks.

    keys: how many each query sees at most, itself included; 0 = all.
    """
    T = segments * L
    sees_TT = np.zeros((T, T), bool)
    for i in range(T):
        oldest = max(i // L * L - M, i + 1 - keys if keys else 0, 0)
        sees_TT[i, oldest : i + 1] = True
    depends_TT = np.linalg.matrix_power(sees_TT.astype(float), N) > 0
    last = (segments - 1) * L
    return last - int(np.argmax(depends_TT[last]))


@pytest.mark.parametrize("N, M, L", [(3, 5, 5), (4, 8, 4), (3, 7, 3), (3, 2, 5)])
def test_the_effective_context_is_that_of_the_masks(N: int, M: int, L: int) -> None:
    config = tiny.config(n_layer=N, mem_len=M)
    assert accounting.effective_context(config, L) == reach(N, M, L, 0)
    if M % L == 0:
        assert reach(N, M, L, 0) == N * M  # the paper's O(N x L), exactly
    for itself in (False, True):
        config = tiny.config(
            n_layer=N, mem_len=M, same_length=True, same_length_self=itself
        )
        expected = reach(N, M, L, M + itself)
        assert accounting.effective_context(config, L) == expected


@pytest.mark.parametrize("context", [1, 4, 6, 7, 20])
def test_the_lost_share_is_that_of_counted_pairs(context: int) -> None:
    L, segments = 6, 50
    newer_T = np.arange(20, L * segments)
    newer_T = newer_T[: len(newer_T) // L * L]  # as many of each place in a segment
    older_Tc = newer_T[:, None] - np.arange(1, context + 1)
    lost = (older_Tc // L != newer_T[:, None] // L).mean()
    assert accounting.lost_share(context, L) == pytest.approx(lost)


def test_similarity_depends_on_the_difference_alone() -> None:
    distance_R = np.array([0, 1, 3, 20])
    found_R = accounting.distance_similarity(tiny.CONFIG, distance_R)
    assert found_R[0] == pytest.approx(1)
    for start in (0, 5, 70):
        rows = np.asarray(sinusoid_RD(jnp.array(start + distance_R), tiny.D))
        unit = rows / np.linalg.norm(rows, axis=1, keepdims=True)
        np.testing.assert_allclose(unit @ unit[0], found_R, atol=1e-5)


def test_only_relative_positions_tell_the_order_of_the_memory() -> None:
    tokens = tiny.make_tokens(2, 12)
    confusion = {}
    for position in ("sinusoidal_repeated", "transformer_xl"):
        config = tiny.config(position=position)
        params = tiny.make_params(config)
        confusion[position] = accounting.order_confusion(config, params, tokens)
    assert confusion["sinusoidal_repeated"] < 1e-5
    assert confusion["transformer_xl"] > 1e-2
