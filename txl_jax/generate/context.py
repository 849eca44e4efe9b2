"""The context of a sampled token, which grows token by token.

    with_memory    each token is read once, and its keys and values are kept
    with_segments  whole segments enter the memory, as in training and evaluation: for
                   kinds of memory whose results depend on where segments begin
    with_window    without a memory, the newest tokens are read again for every new
                   token, as in the paper's vanilla model (section 3.1)

Dims: B prompts, L segment or window, T tokens.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh, PartitionSpec

from txl_jax.evaluate import reader
from txl_jax.evaluate.grouping import count_segments, window_tokens
from txl_jax.model.config import ModelConfig
from txl_jax.model.initializers import Params
from txl_jax.model.memory.cache import Memory
from txl_jax.model.memory.kinds import empty_fixed_memory, one_token_memory
from txl_jax.model.memory.protocol import AnyMemory, MemoryLike
from txl_jax.model.segment import Segment
from txl_jax.model.txl import TransformerXL
from txl_jax.sharding.rules import letters, shards

Window = tuple[Array, Array]  # window_BL and the number of its tokens, length_B
# (params, the memory after the prompts, if known) -> the context, a memory or a window,
# of all prompts without their last tokens.
Start = Callable[[Params, Memory | None], Any]
# (params, token_B, context) -> (log_probs_BV after the token, the context with it).
Predict = Callable[[Params, Array, Any], tuple[Array, Any]]


def make_context(
    config: ModelConfig, prompts: Sequence[np.ndarray], width: int, segments: int
) -> tuple[Start, Predict]:
    """Returns the functions of the context that the config needs.

    width: of a segment or window. segments: see `with_memory`.
    """
    if not config.has_memory:
        return with_window(config, prompts, width)
    if config.memory_tokens or config.recurrence == "same":
        return with_segments(config, prompts, width)
    return with_memory(config, prompts, width, segments)


def predict_last(
    model: TransformerXL, tokens_BL: Array, memory: AnyMemory, length_B: Array
) -> tuple[Array, AnyMemory]:
    """Returns (the log-probabilities after each stream's last real token, memory)."""
    hidden_BLD, memory = model(tokens_BL, memory, length_B=length_B)
    last_B1D = reader.last(hidden_BLD, length_B)
    return model.embedding.log_probs(last_B1D)[:, 0], memory


def push(window: Window, token_B: Array) -> Window:
    """Appends a token to (window_BL, length_B); a full window drops its oldest."""
    window_BL, length_B = window
    B, L = window_BL.shape
    full_B1 = (length_B == L)[:, None]
    window_BL = jnp.where(full_B1, jnp.roll(window_BL, -1, axis=1), window_BL)
    place_B = jnp.minimum(length_B, L - 1)
    window_BL = window_BL.at[jnp.arange(B), place_B].set(token_B)
    return window_BL, jnp.minimum(length_B + 1, L)


def pad(prompts: Sequence[np.ndarray], width: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns tokens_BT, padded with 0 to a multiple of `width`, and length_B."""
    length_B = np.array([len(prompt) for prompt in prompts], np.int32)
    T = -(-max(length_B.max(), 1) // width) * width
    rows = [np.pad(prompt, (0, T - len(prompt))) for prompt in prompts]
    return np.stack(rows).astype(np.int32), length_B


def read_prompts(
    config: ModelConfig,
    params: Params,
    prompts: Sequence[np.ndarray],
    L: int,
    tgt_len: int,
) -> MemoryLike:
    """Returns the memory after the prompts, in calls of L tokens, whole segments."""
    tokens_BT, length_B = pad(prompts, L)
    B, T = tokens_BT.shape
    length_SB = np.clip(length_B - np.arange(0, T, L)[:, None], 0, L).astype(np.int32)
    inputs_SBL = np.moveaxis(tokens_BT.reshape(B, -1, L), 1, 0)
    none: Any = None
    prefix = Segment(inputs_SBL, none, none, none, length_SB)
    W = window_tokens(config, L // tgt_len, B, tgt_len)
    memory = empty_fixed_memory(config, params, B, L, W)
    fill = reader.make_step(config, reader.from_hidden(lambda *_: None), tgt_len)
    return fill(params, memory, prefix)[1]


def fill_in_pieces(
    config: ModelConfig,
    params: Params,
    prompts: Sequence[np.ndarray],
    width: int,
    segments: int,
    mesh: Mesh,
) -> Memory | None:
    """Returns the memory after prompts that are split over the mesh's segments.

    params: stacked. None if the mesh has one segment or splits the prompts' streams, or
    if most of a call would be padding.
    """
    is_split = mesh.shape["segments"] > 1 and shards(mesh, "B") == 1
    if not config.mem_len or not is_split:
        return None
    read, B = reader.from_hidden(lambda *_: ()), len(prompts)
    split = reader.Reader(config, read, B, width, mesh, segments=segments)
    tokens_BT, length_B = pad(prompts, width)
    if not split.in_pieces or tokens_BT.shape[1] <= split.segments * width // 2:
        return None
    parts = []
    for start in range(0, tokens_BT.shape[1], width):
        inputs_1BL = tokens_BT[None, :, start : start + width]
        zeros_1BL = np.zeros(inputs_1BL.shape, np.float32)
        length_1B = np.clip(length_B - start, 0, width)[None]
        parts.append(
            Segment(inputs_1BL, inputs_1BL, zeros_1BL, zeros_1BL > 0, length_1B)
        )
    left: list[Any] = []
    for _ in split.outputs(params, parts, leave=left.append):
        pass
    return left[0]


def make_fill(
    config: ModelConfig, prompts: Sequence[np.ndarray], width: int, segments: int
) -> Callable[[Params], MemoryLike]:
    """Returns the function that reads prompts in segments of `width` into a memory.

    segments: to compute together, or 0, as eval.segments_per_step.
    """
    longest = max(map(len, prompts))
    tgt_len = min(longest + 1, width)
    count = count_segments(config, segments, len(prompts), tgt_len)
    calls = max(-(-longest // (count * tgt_len)), 1)
    count = max(-(-longest // (calls * tgt_len)), 1)  # with the least padding
    L = count * tgt_len  # of a call

    return lambda params: read_prompts(config, params, prompts, L, tgt_len)


def with_memory(
    config: ModelConfig, prompts: Sequence[np.ndarray], width: int, segments: int
) -> tuple[Start, Predict]:
    """Returns the functions for a memory; see `make_fill`."""
    model, fill = TransformerXL(config), make_fill(config, prompts, width, segments)

    def start(params: Params, before: Memory | None) -> MemoryLike:
        memory = fill(params) if before is None else before
        return one_token_memory(config, params, memory)

    def predict(
        params: Params, token_B: Array, memory: MemoryLike
    ) -> tuple[Array, MemoryLike]:
        result: Any = model.apply(
            {"params": params}, token_B[:, None], memory, method="logits"
        )
        return result[0][:, 0], result[1]

    return start, predict


def with_segments(
    config: ModelConfig, prompts: Sequence[np.ndarray], width: int
) -> tuple[Start, Predict]:
    """Returns the functions of a memory that whole segments of `width` tokens enter.

    The tokens of each prompt's last, unfinished segment are read again for every token.
    """
    model = TransformerXL(config)
    whole = [len(prompt) // width * width for prompt in prompts]
    pairs = [*zip(prompts, whole, strict=True)]
    window = pad([prompt[end:] for prompt, end in pairs], width)

    def start(params: Params, before: Memory | None) -> tuple[MemoryLike, Window]:
        read = [prompt[:end] for prompt, end in pairs]
        memory = read_prompts(config, params, read, width, width)
        return memory, (jnp.asarray(window[0]), jnp.asarray(window[1]))

    def predict(
        params: Params, token_B: Array, state: tuple[MemoryLike, Window]
    ) -> tuple[Array, tuple[MemoryLike, Window]]:
        memory, window = state
        window_BL, length_B = push(window, token_B)
        result: Any = model.apply(
            {"params": params}, window_BL, memory, length_B, method=predict_last
        )
        log_probs_BV, after = result
        full_B = length_B == width
        memory = choose_streams(full_B, after, memory)
        return log_probs_BV, (memory, (window_BL, jnp.where(full_B, 0, length_B)))

    return start, predict


def with_window(
    config: ModelConfig, prompts: Sequence[np.ndarray], width: int
) -> tuple[Start, Predict]:
    """Returns the functions of a model whose context is the newest `width` tokens.

    The window is read from a cold start for every token.
    """
    model = TransformerXL(config)
    window = pad([prompt[-width:] for prompt in prompts], width)

    def start(params: Params, before: Memory | None) -> Window:
        return jnp.asarray(window[0]), jnp.asarray(window[1])

    def predict(params: Params, token_B: Array, window: Window) -> tuple[Array, Window]:
        window_BL, length_B = window = push(window, token_B)
        B, L = window_BL.shape
        memory = empty_fixed_memory(config, params, B, L)
        result: Any = model.apply(
            {"params": params}, window_BL, memory, length_B, method=predict_last
        )
        return result[0], window

    return start, predict


def choose_streams(where_B: Array, one: AnyMemory, other: AnyMemory) -> AnyMemory:
    """Returns a memory that is `one` in the streams where_B, and else `other`."""

    def choose(spec: PartitionSpec, x: Array, y: Array) -> Array:
        shape = [-1 if letter == "B" else 1 for letter in spec]
        return jnp.where(where_B.reshape(shape), x, y) if "B" in spec else y

    return jax.tree.map(
        choose,
        letters(other),
        one,
        other,
        is_leaf=lambda x: isinstance(x, PartitionSpec),
    )
