"""Samples from the model, one token at a time (Appendix E).

`context` provides the memory or window from which each token is predicted.

Dims: B prompts, T tokens.
"""

import functools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh
from jax.typing import ArrayLike

from txl_jax.errors import UserError
from txl_jax.evaluate.accounting import GENERATE_FIELDS, check_fits
from txl_jax.evaluate.options import EvalConfig
from txl_jax.generate.context import fill_in_pieces, make_context
from txl_jax.generate.options import GenerateConfig, generation_model
from txl_jax.model.config import ModelConfig
from txl_jax.model.initializers import Params
from txl_jax.model.memory.kinds import lay_out
from txl_jax.report.progress import compile_step

# A lower temperature is 0: divided by it, logits overflow, and no noise changes their
# order.
GREEDY = 1e-20
TINY = float(np.finfo(np.float32).tiny)  # smaller numbers are 0 in float32
EVERY = 32  # tokens sampled on the device before they are fetched


class Drawn(NamedTuple):
    """Sampled tokens, and -log p of each by the model's own distribution."""

    tokens_BT: np.ndarray
    nll_BT: np.ndarray  # in nats


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


def stream(
    model_config: ModelConfig,
    params: Params,
    prompts: Sequence[np.ndarray],
    config: GenerateConfig,
    vocab_size: int | None = None,
    window: int = EvalConfig.tgt_len,
    segments: int = EvalConfig.segments_per_step,
    mesh: Mesh | None = None,
) -> Iterator[Drawn]:
    """Yields the next tokens of each prompt, EVERY at a time, and their nll.

    Prompt b is continued with the seed config.seed + b, independently of the other
    prompts. All tokens are below vocab_size, for models larger than their vocabulary.
    Prompts are read in segments of `window` tokens, of which `segments` are computed
    together, as in evaluation. With mem_len = 0, each token is sampled from the newest
    `window` tokens. Long prompts are split over the segments of the mesh.
    """
    if not all(len(prompt) for prompt in prompts):
        raise UserError("generate.prompt has no tokens: give a text to continue")
    model_config = generation_model(model_config, config)
    check_fits(model_config, len(prompts), 1, GENERATE_FIELDS)
    last_B = np.array([prompt[-1] for prompt in prompts], np.int32)
    prefixes = [prompt[:-1] for prompt in prompts]
    memory = None
    if mesh:
        memory = fill_in_pieces(model_config, params, prefixes, window, segments, mesh)
        if memory is not None:
            prefixes = [prefix[:0] for prefix in prefixes]
    start, predict = make_context(model_config, prefixes, window, segments)
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
        lambda params, memory: (jnp.asarray(last_B), start(params, memory)),
        keep_unused=True,
    )
    read_prompt = compile_step("reading the prompt", read, params, memory)
    state = read_prompt(params, memory)
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
