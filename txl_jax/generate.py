"""Sampling from the model, one token at a time (Appendix E).

With memory each token is read once, and its keys and values kept. Without, the newest
ones are read again for every new one, as the paper's vanilla model does (section 3.1).

Dims: S segments, B streams (prompts), L segment or window, T tokens, V vocabulary, D
model.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from txl_jax.errors import UserError, require
from txl_jax.model.config import ModelConfig
from txl_jax.model.key_values import KeyValueMemory, RingMemory, unstack
from txl_jax.model.memory import Memory
from txl_jax.model.txl import TransformerXL
from txl_jax.report.wait import telling_compilation

# Tokens of a segment while a prompt is read into the memory.
LONGEST = 512


@dataclasses.dataclass(frozen=True)
class GenerateConfig:
    """What to sample, and how: temperature first, then top_k, then top_p."""

    prompt: str = "\n"  # the text to go on with
    prompt_file: str = ""  # instead of prompt: a file with one a line; - = stdin
    context_tokens: int = 0  # instead of prompt: so many tokens of eval.split; 0 = off
    context_at: int = -1  # which, from this one on; -1 = each sample draws by its seed
    warmup: str = ""  # a text, or @FILE, read before the prompt and not shown
    samples: int = 1  # of each prompt, number n with the seed n later
    num_tokens: int = 300  # tokens to sample
    temperature: float = 1.0  # 0 = always the likeliest token
    top_k: int = 40  # sample among so many likeliest; 0 = all
    top_p: float = 1.0  # sample among the likeliest that make up this much
    seed: int = 1  # another one gives another sample
    mem_len: int = 512  # tokens remembered
    ext_len: int = 0  # tokens read again before each, where mem_len is 0
    stop: str = ""  # the sample ends before this text; "" = at num_tokens
    stop_token: int = -1  # the sample ends with this token; -1 = none
    stream_every: int = 32  # tokens sampled on the device before any is shown
    detokenize: bool = False  # undo how the corpus was cut into words
    scores: bool = False  # say each token's nll, before temperature, top_k and top_p
    output: str = ""  # a file of JSON lines, one a sample, with scores; "" = none

    def __post_init__(self) -> None:
        """Refuses impossible values, naming the field."""
        require(self, "generate", 1, "num_tokens", "stream_every", "samples")
        require(self, "generate", -1, "stop_token", "context_at")
        require(self, "generate", 0, "context_tokens")
        require(self, "generate", 0, "temperature", "top_k", "seed")
        require(self, "generate", 0, "mem_len", "ext_len")
        if self.ext_len and self.mem_len:
            raise UserError(
                f"generate.ext_len = {self.ext_len} with generate.mem_len = "
                f"{self.mem_len} would show the same tokens twice: set one of them to 0"
            )
        if not 0 < self.top_p <= 1:
            raise UserError(f"generate.top_p = {self.top_p} must be in (0, 1]")
        if self.prompt_file and self.context_tokens:
            raise UserError(
                f"generate.prompt_file = {self.prompt_file!r} and "
                f"generate.context_tokens = {self.context_tokens} each say what the "
                "samples follow: leave one of them out"
            )
        if self.context_at >= 0 and not self.context_tokens:
            raise UserError(
                f"generate.context_at = {self.context_at} says where a context begins: "
                "say how long it is with generate.context_tokens"
            )
        if not self.prompt:
            raise UserError(
                "generate.prompt is empty: the model predicts what follows something; "
                r"a line end, --prompt=$'\n', is the least"
            )


class Drawn(NamedTuple):
    """Tokens that were sampled, and -log p of each as the model itself has it."""

    tokens_BT: np.ndarray
    nll_BT: np.ndarray  # in nats


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
    model: TransformerXL, tokens_BL: Array, memory: KeyValueMemory, length_B: Array
) -> Array:
    """Returns log p of what follows each stream's last real token, [B, V]."""
    hidden_BLD, _ = model(tokens_BL, memory, length_B=length_B)
    last_B11 = (length_B - 1)[:, None, None]
    last_B1D = jnp.take_along_axis(hidden_BLD, last_B11, axis=1)
    return model.embedding.log_probs(last_B1D)[:, 0]


def push(window_BL: Array, length_B: Array, token_B: Array) -> tuple[Array, Array]:
    """Returns the window with one more token, its oldest gone if it was full."""
    B, L = window_BL.shape
    full_B1 = (length_B == L)[:, None]
    window_BL = jnp.where(full_B1, jnp.roll(window_BL, -1, axis=1), window_BL)
    place_B = jnp.minimum(length_B, L - 1)
    window_BL = window_BL.at[jnp.arange(B), place_B].set(token_B)
    return window_BL, jnp.minimum(length_B + 1, L)


def cut(prompts: Sequence[np.ndarray], longest: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the prompts as segments_SBL, padded at their ends, and length_SB."""
    length_B = np.array([len(prompt) for prompt in prompts])
    T = max(length_B.max(), 1)
    L = min(T, longest)
    S = -(-T // L)
    tokens_BT = np.zeros((len(prompts), S * L), np.int32)
    for tokens_T, prompt in zip(tokens_BT, prompts, strict=True):
        tokens_T[: len(prompt)] = prompt
    begin_S1 = np.arange(0, S * L, L)[:, None]
    length_SB = np.clip(length_B - begin_S1, 0, L).astype(np.int32)
    return np.moveaxis(tokens_BT.reshape(-1, S, L), 1, 0), length_SB


# What one token's step carries: tokens, and what has been read.
Carry = Any
Step = Callable[[Any, Carry], tuple[Array, Carry]]


def remember(config: ModelConfig, prompts: Sequence[np.ndarray]) -> tuple[Any, Step]:
    """Returns (start, step) of a model that reads with memory.

    start(params) reads all but the prompts' last tokens, in segments that fill the
    memory. step(params, carry) -> (log_probs_BV, carry without the next token).
    """
    model = TransformerXL(config, stacked=False)
    segments = cut([prompt[:-1] for prompt in prompts], LONGEST)
    last_B = np.array([prompt[-1] for prompt in prompts], np.int32)

    def start(params: Any) -> Carry:
        memory = Memory.empty(config, len(prompts))
        kept = KeyValueMemory.of(config, params, memory, segments[0].shape[2])

        def read(memory: KeyValueMemory, segment: Any) -> tuple[KeyValueMemory, None]:
            tokens_BL, length_B = segment
            result: Any = model.apply(
                {"params": params}, tokens_BL, memory, length_B=length_B
            )
            return result[1], None

        kept, _ = jax.lax.scan(read, kept, segments)
        return jnp.asarray(last_B), RingMemory.of(kept)

    def step(params: Any, carry: Carry) -> tuple[Array, Carry]:
        token_B, memory = carry
        result: Any = model.apply(
            {"params": params}, token_B[:, None], memory, method="logits"
        )
        return result[0][:, 0], lambda token_B: (token_B, result[1])

    return start, step


def reread(
    config: ModelConfig, prompts: Sequence[np.ndarray], ext_len: int
) -> tuple[Any, Step]:
    """Returns (start, step) of a model without memory: see `remember`.

    The newest ext_len + 1 tokens are a window, read from a cold start for every token.
    """
    model = TransformerXL(config, stacked=False)
    recent = [prompt[-(ext_len + 1) :] for prompt in prompts]
    window_BL = np.zeros((len(prompts), ext_len + 1), np.int32)
    for window_L, tokens in zip(window_BL, recent, strict=True):
        window_L[: len(tokens)] = tokens
    length_B = np.array([len(tokens) for tokens in recent], np.int32)

    def start(params: Any) -> Carry:
        return jnp.asarray(window_BL), jnp.asarray(length_B)

    def step(params: Any, carry: Carry) -> tuple[Array, Carry]:
        memory = Memory.empty(config, len(prompts))
        kept = KeyValueMemory.of(config, params, memory, ext_len + 1)
        log_probs_BV: Any = model.apply(
            {"params": params}, carry[0], kept, carry[1], method=predict
        )
        return log_probs_BV, functools.partial(push, *carry)

    return start, step


def stream(
    model_config: ModelConfig,
    params: Any,
    prompts: Sequence[np.ndarray],
    config: GenerateConfig,
    vocab_size: int | None = None,
) -> Iterator[Drawn]:
    """Yields tokens_BT that follow the prompts, stream_every at a time, and their nll.

    Prompt number b is followed with the seed config.seed + b, whatever is beside it.
    All tokens are below vocab_size, where the model's own is larger than the
    vocabulary's. After a stream's stop_token it goes on with that token; when all
    streams have met theirs, or num_tokens are there, it ends. What is drawn depends
    neither on stream_every nor on when a stop is met.

    Raises UserError for a prompt without tokens.
    """
    if not all(len(prompt) for prompt in prompts):
        raise UserError("generate.prompt has no tokens: give it something to follow")
    model_config = generation_model(model_config, config)
    if config.mem_len:
        start, step = remember(model_config, prompts)
    else:
        start, step = reread(model_config, prompts, config.ext_len)

    # The seed of one sample draws the same whatever else is sampled beside it.
    seed_B = (config.seed + np.arange(len(prompts), dtype=np.int64)).astype(np.uint32)

    def draw_one(logits_V: Array, seed: Any, index: Array) -> Array:
        key = jax.random.fold_in(jax.random.key(seed), index)
        return choose(logits_V[None, :vocab_size], key, config)[0].astype(jnp.int32)

    def draw(params: Any, carry: Any, index: Array) -> tuple[Any, tuple[Array, Array]]:
        carry, done_B = carry
        log_probs_BV, go_on = step(params, carry)
        token_B = jax.vmap(draw_one, (0, 0, None))(log_probs_BV, seed_B, index)
        if config.stop_token >= 0:
            token_B = jnp.where(done_B, config.stop_token, token_B)
            done_B |= token_B == config.stop_token
        nll_B = -jnp.take_along_axis(log_probs_BV, token_B[:, None], axis=1)[:, 0]
        return (go_on(token_B), done_B), (token_B, nll_B)

    def run(params: Any, carry: Any, first: Array) -> tuple[Any, tuple[Array, ...]]:
        index_T = first + jnp.arange(config.stream_every)
        carry, drawn = jax.lax.scan(functools.partial(draw, params), carry, index_T)
        return carry, tuple(x_TB.T for x_TB in drawn)

    apart = jax.jit(unstack)(params)
    begin = telling_compilation("the reading of the prompt", jax.jit(start))
    carry = begin(apart), np.zeros(len(prompts), bool)
    chunk = telling_compilation("the sampler", jax.jit(run, donate_argnums=1))
    for first in range(0, config.num_tokens, config.stream_every):
        carry, drawn = chunk(apart, carry, first)
        drawn = jax.device_get(drawn)
        yield Drawn(*(np.asarray(x)[:, : config.num_tokens - first] for x in drawn))
        if np.asarray(jax.device_get(carry[1])).all():
            return


def sample(
    model_config: ModelConfig,
    params: Any,
    prompt: np.ndarray,
    config: GenerateConfig,
    vocab_size: int | None = None,
) -> np.ndarray:
    """Returns the tokens that follow one prompt [T], all at once: see `stream`."""
    parts = stream(model_config, params, [prompt], config, vocab_size)
    tokens_T = np.concatenate([part.tokens_BT[0] for part in parts])
    stops = np.flatnonzero(tokens_T == config.stop_token)
    return tokens_T[: stops[0] + 1] if len(stops) else tokens_T
