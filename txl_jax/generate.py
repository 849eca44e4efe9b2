"""Sampling from the model, one token at a time (Appendix E).

With memory each token is read once. Without, the newest ones are read again for every
new one, as the paper's vanilla model does (section 3.1).

Dims: S segments, B streams, L segment or window, V vocabulary, D model.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from txl_jax.errors import UserError, require
from txl_jax.model.config import ModelConfig
from txl_jax.model.memory import Memory
from txl_jax.model.txl import TransformerXL

# Tokens of a segment while a prompt is read into the memory.
LONGEST = 512


@dataclasses.dataclass(frozen=True)
class GenerateConfig:
    """What to sample, and how: temperature first, then top_k, then top_p."""

    prompt: str = "\n"
    num_tokens: int = 300
    temperature: float = 1.0  # 0 = always the likeliest token
    top_k: int = 40  # sample among so many likeliest; 0 = all
    top_p: float = 1.0  # sample among the likeliest that make up this much
    seed: int = 1
    mem_len: int = 512  # tokens remembered
    ext_len: int = 0  # tokens read again before each, where mem_len is 0

    def __post_init__(self) -> None:
        """Refuses impossible values, naming the field."""
        require(self, "generate", 1, "num_tokens")
        require(self, "generate", 0, "temperature", "top_k", "seed")
        require(self, "generate", 0, "mem_len", "ext_len")
        if self.ext_len and self.mem_len:
            raise UserError(
                f"generate.ext_len = {self.ext_len} with generate.mem_len = "
                f"{self.mem_len} would show the same tokens twice: set one of them to 0"
            )
        if not 0 < self.top_p <= 1:
            raise UserError(f"generate.top_p = {self.top_p} must be in (0, 1]")
        if not self.prompt:
            raise UserError(
                "generate.prompt is empty: the model predicts what follows something; "
                r"a line end, --prompt=$'\n', is the least"
            )


def restrict(logits_BV: Array, config: GenerateConfig) -> Array:
    """Returns logits with what top_k and top_p leave out at minus infinity.

    top_p keeps the smallest set of likeliest tokens whose probability, after
    temperature and top_k, reaches top_p; the likeliest always stays.
    """
    logits_BV = logits_BV / config.temperature
    V = logits_BV.shape[-1]
    if 0 < config.top_k < V:
        kth_B1 = jax.lax.top_k(logits_BV, config.top_k)[0][:, -1:]
        logits_BV = jnp.where(logits_BV < kth_B1, -jnp.inf, logits_BV)
    if config.top_p < 1:
        sorted_BV = -jnp.sort(-logits_BV, axis=-1)
        before_BV = jnp.cumsum(jax.nn.softmax(sorted_BV), axis=-1)
        before_BV -= jax.nn.softmax(sorted_BV)
        kept_BV = jnp.where(before_BV < config.top_p, sorted_BV, jnp.inf)
        logits_BV = jnp.where(
            logits_BV < jnp.min(kept_BV, axis=-1, keepdims=True), -jnp.inf, logits_BV
        )
    return logits_BV


def choose(logits_BV: Array, key: Array, config: GenerateConfig) -> Array:
    """Returns the next token of each stream, tokens_B."""
    if config.temperature == 0:
        return jnp.argmax(logits_BV, axis=-1)
    return jax.random.categorical(key, restrict(logits_BV, config))


def generation_model(config: ModelConfig, how: GenerateConfig) -> ModelConfig:
    """Returns the same model with generation's memory; parameters fit both."""
    return dataclasses.replace(config, mem_len=how.mem_len)


def predict(
    model: TransformerXL, tokens_BL: Array, memory: Memory, length_B: Array
) -> tuple[Array, Memory]:
    """Returns (log p of what follows each stream's last real token, _BV; memory)."""
    hidden_BLD, memory = model(tokens_BL, memory, length_B=length_B)
    last_B11 = (length_B - 1)[:, None, None]
    last_B1D = jnp.take_along_axis(hidden_BLD, last_B11, axis=1)
    return model.embedding.log_probs(last_B1D)[:, 0], memory


def push(window_BL: Array, length_B: Array, token_B: Array) -> tuple[Array, Array]:
    """Returns the window with one more token, its oldest gone if it was full."""
    B, L = window_BL.shape
    full_B1 = (length_B == L)[:, None]
    window_BL = jnp.where(full_B1, jnp.roll(window_BL, -1, axis=1), window_BL)
    place_B = jnp.minimum(length_B, L - 1)
    window_BL = window_BL.at[jnp.arange(B), place_B].set(token_B)
    return window_BL, jnp.minimum(length_B + 1, L)


def cut(tokens_T: np.ndarray, longest: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the tokens as segments_SBL of one stream, the last padded, length_SB."""
    T = len(tokens_T)
    L = max(min(T, longest), 1)
    begin_S = np.arange(0, T, L)
    segments_SBL = np.zeros((len(begin_S), 1, L), np.int32)
    segments_SBL.reshape(-1)[:T] = tokens_T
    return segments_SBL, np.minimum(T - begin_S, L).astype(np.int32)[:, None]


def sample(
    model_config: ModelConfig,
    params: Any,
    prompt: np.ndarray,
    config: GenerateConfig,
    vocab_size: int | None = None,
) -> np.ndarray:
    """Returns config.num_tokens tokens that follow the prompt [T], in order.

    All are below vocab_size, where the model's own is larger than the vocabulary's.
    With memory all but the prompt's last token is read in segments that fill it; from
    there every token is a segment of one. Without, the newest ext_len + 1 tokens are a
    window, read from a cold start for every token.

    Raises UserError for a prompt without tokens.
    """
    if not len(prompt):
        raise UserError("generate.prompt has no tokens: give it something to follow")
    model_config = generation_model(model_config, config)
    model = TransformerXL(model_config)
    recent_L = prompt[-(config.ext_len + 1) :]
    length_B = np.array([len(recent_L)], np.int32)
    window_BL = np.zeros((1, config.ext_len + 1), np.int32)
    window_BL[0, : len(recent_L)] = recent_L
    before = cut(prompt[:-1] if config.mem_len else prompt[:0], LONGEST)

    def run(params: Any, before: Any, window: Any, key: Array) -> Array:
        def read(memory: Memory, segment: Any) -> tuple[Memory, None]:
            tokens_BL, length_B = segment
            result: Any = model.apply(
                {"params": params}, tokens_BL, memory, length_B=length_B
            )
            return result[1], None

        def step(carry: Any, key: Array) -> Any:
            window_BL, length_B, memory = carry
            log_probs_BV, memory = model.apply(
                {"params": params}, window_BL, memory, length_B, method=predict
            )
            token_B = choose(log_probs_BV[:, :vocab_size], key, config)
            token_B = token_B.astype(jnp.int32)
            return (*push(window_BL, length_B, token_B), memory), token_B

        memory, _ = jax.lax.scan(read, Memory.empty(model_config, 1), before)
        keys = jax.random.split(key, config.num_tokens)
        return jax.lax.scan(step, (*window, memory), keys)[1]

    key = jax.random.key(config.seed)
    tokens = jax.jit(run)(params, before, (window_BL, length_B), key)
    return np.asarray(jax.device_get(tokens))[:, 0]
