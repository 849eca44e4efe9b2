"""Sampling from the model, one token at a time, with its memory (Appendix E).

Dims: B streams, L segment, V vocabulary.
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

    def __post_init__(self) -> None:
        """Refuses impossible values, naming the field."""
        require(self, "generate", 1, "num_tokens")
        require(self, "generate", 0, "temperature", "top_k", "seed", "mem_len")
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


def sample(
    model_config: ModelConfig,
    params: Any,
    prompt: np.ndarray,
    config: GenerateConfig,
    vocab_size: int | None = None,
) -> np.ndarray:
    """Returns config.num_tokens tokens that follow the prompt [L], in order.

    All are below vocab_size, where the model's own is larger than the vocabulary's.
    All but the prompt's last token is read in one segment, which fills the memory;
    from there every token is a segment of one. Of a prompt longer than that the newest
    mem_len + 1 tokens are read, and what upper layers knew of the rest is lost.
    """
    model_config = dataclasses.replace(model_config, mem_len=config.mem_len)
    model = TransformerXL(model_config)
    prompt = np.asarray(prompt[-(config.mem_len + 1) :], np.int32)

    def run(params: Any, prompt_BL: Array, key: Array) -> Array:
        memory: Any = Memory.empty(model_config, 1)
        if prompt_BL.shape[1] > 1:
            _, memory = model.apply({"params": params}, prompt_BL[:, :-1], memory)

        def step(carry: Any, key: Array) -> Any:
            token_B, memory = carry
            next_BLV, memory = model.apply(
                {"params": params}, token_B[:, None], memory, method="logits"
            )
            next_BV = next_BLV[:, -1, :vocab_size]
            token_B = choose(next_BV, key, config).astype(jnp.int32)
            return (token_B, memory), token_B

        keys = jax.random.split(key, config.num_tokens)
        return jax.lax.scan(step, (prompt_BL[:, -1], memory), keys)[1]

    tokens = jax.jit(run)(params, prompt[None], jax.random.key(config.seed))
    return np.asarray(jax.device_get(tokens))[:, 0]
