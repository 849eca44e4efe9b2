"""Functions that wrap a call of a `TransformerXL`, which reads one segment.

    read_segments    several segments in one call, computed together
    nll_of_segments  the same, with the losses of targets
    read_inputs      one segment of embeddings instead of tokens

Pass these functions to `apply` as `method`.

Dims: S segments of L tokens, T = S L tokens of a call.
"""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import Array

from txl_jax.model.config import ModelConfig
from txl_jax.model.initializers import Params
from txl_jax.model.memory.key_values import unstack
from txl_jax.model.memory.protocol import AnyMemory
from txl_jax.model.txl import TransformerXL


def fixed_model(
    config: ModelConfig,
) -> tuple[TransformerXL, Callable[[Params], Params]]:
    """Returns the model for fixed parameters, and the function that lays them out.

    Call that function once, outside the loop of an evaluation or a generation.
    """
    return TransformerXL(config, "separate"), unstack


def read_segments(
    model: TransformerXL,
    tokens_BT: Array,
    memory: AnyMemory,
    *,
    first_BL: Array | None = None,
    length_B: Array | None = None,
    segment_len: int = 0,
) -> tuple[Array, AnyMemory]:
    """Returns (hidden_BTD, memory) after segments of segment_len tokens (0 = one).

    The results equal those of one call per segment, because layer n of a segment reads
    only layer n - 1 of earlier ones. Not for absolute positions, nor for documents with
    initial_memory = "zeros".
    """
    h_BTD = model.enter(model.embedding.embed(jnp.asarray(tokens_BT)))
    h_BTD, memory = model.advance(h_BTD, memory, first_BL, length_B, segment_len)
    return model.drop_rows(h_BTD), memory


def nll_of_segments(
    model: TransformerXL,
    tokens_BT: Array,
    targets_BT: Array,
    memory: AnyMemory,
    **segments: Any,
) -> tuple[Array, AnyMemory]:
    """Returns (nll_BT, memory), as `TransformerXL.nll`, after several segments."""
    hidden_BTD, memory = read_segments(model, tokens_BT, memory, **segments)
    return model.embedding.nll(hidden_BTD, targets_BT), memory


def read_inputs(
    model: TransformerXL,
    inputs_BLD: Array,
    memory: AnyMemory,
    *,
    first_BL: Array | None = None,
    length_B: Array | None = None,
) -> tuple[Array, AnyMemory]:
    """Returns (hidden_BLD, memory) of a segment of embeddings.

    A model that is initialized with these has no parameters for tokens; its vocab_size
    may be 0.
    """
    h_BLD = model.enter(inputs_BLD.astype(model.config.compute_dtype))
    h_BLD, memory = model.advance(h_BLD, memory, first_BL, length_B)
    return model.drop_rows(h_BLD), memory
