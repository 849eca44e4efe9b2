"""Samples from the model, one token at a time (Appendix E).

With a memory, each token is read once and its keys and values are kept. Without one,
the newest tokens are read again for every new token, as in the paper's vanilla model
(section 3.1).

Dims: B prompts, L segment or window, T tokens.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike

from txl_jax.errors import UserError
from txl_jax.evaluate import reader
from txl_jax.evaluate.accounting import GENERATE_FIELDS, check_fits
from txl_jax.evaluate.grouping import count_segments, window_tokens
from txl_jax.evaluate.options import EvalConfig
from txl_jax.generate.options import GenerateConfig, generation_model
from txl_jax.model.config import ModelConfig
from txl_jax.model.initializers import Params
from txl_jax.model.memory.kinds import (
    empty_fixed_memory,
    lay_out,
    one_token_memory,
)
from txl_jax.model.memory.protocol import MemoryLike
from txl_jax.model.segment import Segment
from txl_jax.model.txl import TransformerXL
from txl_jax.report.progress import compile_step

# A lower temperature is 0: divided by it, logits overflow, and no noise changes their
# order.
GREEDY = 1e-20
TINY = float(np.finfo(np.float32).tiny)  # smaller numbers are 0 in float32
EVERY = 32  # tokens sampled on the device before they are fetched


Window = tuple[Array, Array]  # window_BL and the number of its tokens, length_B


class Drawn(NamedTuple):
    """Sampled tokens, and -log p of each by the model's own distribution."""

    tokens_BT: np.ndarray
    nll_BT: np.ndarray  # in nats


# params -> the context, a memory or a window, of all prompts without their last tokens.
Start = Callable[[Params], Any]
# (params, token_B, context) -> (log_probs_BV after the token, the context with it).
Predict = Callable[[Params, Array, Any], tuple[Array, Any]]


def restrict(logits_BV: Array, config: GenerateConfig) -> Array:
    """Applies the temperature, and masks the tokens outside top_k and top_p.

    Masked logits are minus infinity. top_p keeps the smallest set of likeliest tokens
    whose probability, after temperature and top_k, reaches top_p; the likeliest token
    is always kept.
    """
    logits_BV = logits_BV / config.temperature
    V = logits_BV.shape[-1]
    if 0 < config.top_k < V:
        kth_B1 = jax.lax.top_k(logits_BV, config.top_k)[0][:, -1:]
        logits_BV = jnp.where(logits_BV < kth_B1, -jnp.inf, logits_BV)
    if config.top_p < 1:
        sorted_BV = -jnp.sort(-logits_BV, axis=-1)
        p_BV = jax.nn.softmax(sorted_BV)
        before_BV = jnp.cumsum(p_BV, axis=-1) - p_BV
        kept_BV = jnp.where(before_BV < max(config.top_p, TINY), sorted_BV, jnp.inf)
        least_B1 = jnp.min(kept_BV, axis=-1, keepdims=True)
        logits_BV = jnp.where(logits_BV < least_B1, -jnp.inf, logits_BV)
    return logits_BV


def choose(logits_BV: Array, key: Array, config: GenerateConfig) -> Array:
    """Returns the next token of each stream, tokens_B."""
    if config.temperature < GREEDY:
        return jnp.argmax(logits_BV, axis=-1)
    return jax.random.categorical(key, restrict(logits_BV, config))


def predict_last(
    model: TransformerXL, tokens_BL: Array, memory: MemoryLike, length_B: Array
) -> Array:
    """Returns the log-probabilities after each stream's last real token, [B, V]."""
    hidden_BLD, _ = model(tokens_BL, memory, length_B=length_B)
    last_B1D = reader.last(hidden_BLD, length_B)
    return model.embedding.log_probs(last_B1D)[:, 0]


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


def with_memory(
    config: ModelConfig, prompts: Sequence[np.ndarray], width: int, segments: int
) -> tuple[Start, Predict]:
    """Returns the functions for a memory; prompts are read in segments of `width`.

    segments: to compute together, or 0, as eval.segments_per_step.
    """
    model = TransformerXL(config)
    longest = max(map(len, prompts))
    tgt_len = min(longest + 1, width)
    count = count_segments(config, segments, len(prompts), tgt_len)
    calls = max(-(-longest // (count * tgt_len)), 1)
    count = max(-(-longest // (calls * tgt_len)), 1)  # with the least padding
    L = count * tgt_len  # of a call
    tokens_BT, length_B = pad(prompts, L)
    B, T = tokens_BT.shape
    length_SB = np.clip(length_B - np.arange(0, T, L)[:, None], 0, L).astype(np.int32)
    inputs_SBL = np.moveaxis(tokens_BT.reshape(B, -1, L), 1, 0)
    none: Any = None
    prefix = Segment(inputs_SBL, none, none, none, length_SB)

    def start(params: Params) -> MemoryLike:
        W = window_tokens(config, count, B, tgt_len)
        memory = empty_fixed_memory(config, params, B, L, W)
        fill = reader.make_step(config, reader.from_hidden(lambda *_: None), tgt_len)
        return one_token_memory(config, fill(params, memory, prefix)[1])

    def predict(
        params: Params, token_B: Array, memory: MemoryLike
    ) -> tuple[Array, MemoryLike]:
        result: Any = model.apply(
            {"params": params}, token_B[:, None], memory, method="logits"
        )
        return result[0][:, 0], result[1]

    return start, predict


def with_window(
    config: ModelConfig, prompts: Sequence[np.ndarray], width: int
) -> tuple[Start, Predict]:
    """Returns the functions of a model whose context is the newest `width` tokens.

    The window is read from a cold start for every token.
    """
    model = TransformerXL(config)
    window = pad([prompt[-width:] for prompt in prompts], width)

    def start(params: Params) -> Window:
        return jnp.asarray(window[0]), jnp.asarray(window[1])

    def predict(params: Params, token_B: Array, window: Window) -> tuple[Array, Window]:
        window_BL, length_B = window = push(window, token_B)
        B, L = window_BL.shape
        memory = empty_fixed_memory(config, params, B, L)
        log_probs_BV: Any = model.apply(
            {"params": params}, window_BL, memory, length_B, method=predict_last
        )
        return log_probs_BV, window

    return start, predict


def stream(
    model_config: ModelConfig,
    params: Params,
    prompts: Sequence[np.ndarray],
    config: GenerateConfig,
    vocab_size: int | None = None,
    window: int = EvalConfig.tgt_len,
    segments: int = EvalConfig.segments_per_step,
) -> Iterator[Drawn]:
    """Yields the next tokens of each prompt, EVERY at a time, and their nll.

    Prompt b is continued with the seed config.seed + b, independently of the other
    prompts. All tokens are below vocab_size, for models larger than their vocabulary.
    Prompts are read in segments of `window` tokens, of which `segments` are computed
    together, as in evaluation. With mem_len = 0, each token is sampled from the newest
    `window` tokens.
    """
    if not all(len(prompt) for prompt in prompts):
        raise UserError("generate.prompt has no tokens: give a text to continue")
    model_config = generation_model(model_config, config)
    check_fits(model_config, len(prompts), 1, GENERATE_FIELDS)
    last_B = np.array([prompt[-1] for prompt in prompts], np.int32)
    before = [prompt[:-1] for prompt in prompts]
    if config.mem_len:
        start, predict = with_memory(model_config, before, window, segments)
    else:
        start, predict = with_window(model_config, before, window)
    seed_B = (config.seed + np.arange(len(prompts), dtype=np.int64)).astype(np.uint32)

    def draw_one(logits_V: Array, seed: ArrayLike, index: Array) -> Array:
        key = jax.random.fold_in(jax.random.key(seed), index)
        return choose(logits_V[None, :vocab_size], key, config)[0].astype(jnp.int32)

    def draw(
        params: Params, state: Any, index: Array
    ) -> tuple[Any, tuple[Array, Array]]:
        token_B, context = state
        log_probs_BV, context = predict(params, token_B, context)
        token_B = jax.vmap(draw_one, (0, 0, None))(log_probs_BV, seed_B, index)
        nll_B = -jnp.take_along_axis(log_probs_BV, token_B[:, None], axis=1)[:, 0]
        return (token_B, context), (token_B, nll_B)

    def draw_many(params: Params, state: Any, first: Array) -> tuple[Any, Any]:
        index_T = first + jnp.arange(EVERY)
        state, drawn = jax.lax.scan(functools.partial(draw, params), state, index_T)
        return state, tuple(x_TB.T for x_TB in drawn)

    params = jax.jit(functools.partial(lay_out, model_config))(params)
    # Unused parameters are kept, so that every state is on their devices.
    read = jax.jit(
        lambda params: (jnp.asarray(last_B), start(params)), keep_unused=True
    )
    state = compile_step("reading the prompt", read, params)(params)
    places = jax.tree.map(lambda x: x.sharding, state)
    many = jax.jit(draw_many, donate_argnums=1, out_shardings=(places, None))
    sample_many = compile_step("the sampler", many, params, state, 0)
    for first in range(0, config.num_tokens, EVERY):
        state, drawn = sample_many(params, state, first)
        drawn = jax.device_get(drawn)
        yield Drawn(*(np.asarray(x)[:, : config.num_tokens - first] for x in drawn))


def sample(
    model_config: ModelConfig,
    params: Params,
    prompt: np.ndarray,
    config: GenerateConfig,
    vocab_size: int | None = None,
) -> np.ndarray:
    """Returns the tokens that continue one prompt; see `stream`."""
    parts = stream(model_config, params, [prompt], config, vocab_size)
    return np.concatenate([part.tokens_BT[0] for part in parts])
