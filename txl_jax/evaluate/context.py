"""The nll of tokens that have a context of exactly so many tokens: l_i(c, t).

Every token has a window of its own, read from a fresh memory; of the window only the
last prediction counts. A model with a memory reads it as evaluation reads a text, in
segments of eval.tgt_len with a memory of eval.mem_len, the first segment being shorter
where the window is no multiple. A model without one reads the window at once.

Dims: B windows, L segment, T positions, D model.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh

from txl_jax.evaluate.perplexity import EvalConfig, evaluation_model
from txl_jax.model.config import ModelConfig
from txl_jax.model.key_values import KeyValueMemory, unstack
from txl_jax.model.memory import Memory
from txl_jax.model.txl import TransformerXL
from txl_jax.sharding import check_streams, sharding, shardings

# (tokens, positions_T, context, progress) -> nll_T in nats.
ContextNll = Callable[
    [np.ndarray, np.ndarray, int, Callable[[int, int], None]], np.ndarray
]


def spread(tokens: int, longest: int, count: int) -> np.ndarray:
    """Returns `count` positions with `longest` tokens before them, spread evenly.

    0, or more than there are, means all of them.
    """
    there = max(tokens - longest, 0)
    count = min(count or there, there)
    return longest + np.arange(count, dtype=np.int64) * there // max(count, 1)


def make_context_nll(
    config: ModelConfig, how: EvalConfig, params: Any, batch_size: int, mesh: Mesh
) -> ContextNll:
    """Returns nll(tokens, positions_T, context, progress) -> nll_T, in float64.

    The token at each position is predicted from the `context` tokens before it and
    nothing else. progress(done, total) counts batches of windows.
    """
    check_streams(mesh, batch_size, "recl.batch_size")
    config, B = evaluation_model(config, how), batch_size
    model = TransformerXL(config, stacked=False)
    params = jax.jit(unstack)(params)

    def start(params: Any, L: int) -> KeyValueMemory:
        memory = KeyValueMemory.of(config, params, Memory.empty(config, B), L)
        places = shardings(mesh, memory.letters())
        return jax.lax.with_sharding_constraint(memory, places)

    def read(
        params: Any, memory: Any, tokens_BL: Array, length: Array, targets_B: Array
    ) -> tuple[Any, Array]:
        """Returns (memory, nll_B of what comes after `length` tokens)."""
        variables, length_B = {"params": params}, jnp.full(B, length, jnp.int32)
        result: Any = model.apply(variables, tokens_BL, memory, length_B=length_B)
        hidden_BLD, memory = result
        last_B1D = jax.lax.dynamic_slice_in_dim(hidden_BLD, length - 1, 1, axis=1)
        nll_B1: Any = model.apply(variables, last_B1D, targets_B[:, None], method=_nll)
        return memory, nll_B1[:, 0]

    make_memory, step = jax.jit(start, static_argnums=1), jax.jit(read)

    def windows(inputs_BC: np.ndarray, targets_B: np.ndarray) -> Array:
        """Returns nll_B of the targets, each after its window."""
        context = inputs_BC.shape[1]
        L = how.tgt_len if how.mem_len else context
        first = (context - 1) % L + 1
        pad_BC = np.zeros((B, L - first), np.int32)
        inputs_BC = np.concatenate(
            [inputs_BC[:, :first], pad_BC, inputs_BC[:, first:]], 1
        )
        memory, target_B = make_memory(params, L), put(targets_B)
        for begin in range(0, inputs_BC.shape[1], L):
            length = np.int32(L if begin else first)
            tokens_BL = put(inputs_BC[:, begin : begin + L])
            memory, nll_B = step(params, memory, tokens_BL, length, target_B)
        return nll_B

    def put(x: np.ndarray) -> Array:
        return jax.device_put(x, sharding(mesh, "BL"[: x.ndim]))

    def nll(
        tokens: np.ndarray,
        positions_T: np.ndarray,
        context: int,
        progress: Callable[[int, int], None],
    ) -> np.ndarray:
        found, T = [], len(positions_T)
        for begin in range(0, T, B):
            # The last batch is filled up with its last position.
            index_B = np.minimum(np.arange(begin, begin + B), T - 1)
            position_B1 = positions_T[index_B][:, None]
            inputs_BC = tokens[position_B1 - np.arange(context, 0, -1)].astype(np.int32)
            nll_B = windows(inputs_BC, tokens[position_B1[:, 0]].astype(np.int32))
            found.append(np.asarray(nll_B, np.float64)[: T - begin])
            progress(min(begin + B, T), T)
        return np.concatenate(found)

    return nll


def _nll(model: TransformerXL, hidden_BLD: Array, targets_BL: Array) -> Array:
    return model.embedding.nll(hidden_BLD, targets_BL)
