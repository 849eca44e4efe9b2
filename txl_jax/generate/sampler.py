"""Samples from the model, one token at a time (Appendix E).

With a memory, each token is read once and enters it. Without one, a window of the
newest tokens is read again for every token, as in the paper's vanilla model (section
3.1).

Dims: B prompts, L segment or window, T tokens.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike

from txl_jax.evaluate import reader
from txl_jax.evaluate.grouping import count_segments
from txl_jax.evaluate.options import EvalConfig
from txl_jax.evaluate.reader import Reader
from txl_jax.generate.options import GenerateConfig, generation_model
from txl_jax.model.config import ModelConfig
from txl_jax.model.fixed import FixedTransformerXL, lay_out
from txl_jax.model.modules import Params
from txl_jax.model.ring import RingMemory
from txl_jax.model.segment import Segment
from txl_jax.runtime.programs import Program

# A lower temperature counts as 0: divided by it, logits overflow, and no noise changes
# their order.
GREEDY = 1e-20
TINY = float(np.finfo(np.float32).tiny)  # smaller numbers are 0 in float32
EVERY = 32  # tokens sampled on the device before they are fetched
SHOWN = 8  # the same for a reader at a terminal: up to 3 ms more for each fetch

read_nothing = reader.from_hidden(lambda *_: ())


class Drawn(NamedTuple):
    """Sampled tokens, and the -log p of each in the model's own distribution."""

    tokens_BT: np.ndarray
    nll_BT: np.ndarray  # in nats


class Context(NamedTuple):
    """The inputs for predicting the next token."""

    token_B: Array  # the newest tokens
    memory: Any  # of keys and values; while sampling with a memory, rings
    window_BL: Array
    length_B: Array  # tokens in the window


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


class Reading(NamedTuple):
    """How prompts are read: in segments of `window` tokens, `n_segments` at a time.

    With mem_len = 0, each token is sampled from the newest `window` tokens.
    """

    window: int = EvalConfig.tgt_len
    n_segments: int = EvalConfig.segments_per_step


READING = Reading()


class Sampler:
    """Continues prompts, batch_size at a time, with programs that are compiled once.

    longest: tokens in the longest prompt. All sampled tokens are below vocab_size, for
    models larger than their vocabulary. `every`: tokens sampled before they are
    fetched; 0 means EVERY, the fastest.
    """

    def __init__(
        self,
        model_config: ModelConfig,
        params: Params,
        config: GenerateConfig,
        batch_size: int,
        longest: int,
        vocab_size: int | None = None,
        reading: Reading = READING,
        every: int = 0,
    ) -> None:
        self.every = every or EVERY
        self.config = model = generation_model(model_config, config)
        self.options, self.vocab_size, self.batch_size = config, vocab_size, batch_size
        self.window = 0 if model.mem_len else reading.window
        self.reader = self._make_reader(longest - 1, *reading)
        self.params = jax.jit(lay_out)(params)
        self.begin = Program("the memory", self._begin)
        self.draw = Program("the sampler", self._draw, carries=True, donates=True)

    def _make_reader(self, longest: int, width: int, n_segments: int) -> Reader:
        config, B = self.config, self.batch_size
        if self.window:
            return Reader(config, read_nothing, B, width)
        L = max(min(longest, width), 1)
        count = count_segments(config, n_segments, B, L)
        calls = max(-(-longest // (count * L)), 1)
        count = max(-(-longest // (calls * L)), 1)  # with the least padding
        return Reader(config, read_nothing, B, L, n_segments=count)

    def stream(self, prompts: Sequence[np.ndarray], seed: int) -> Iterator[Drawn]:
        """Yields the next tokens of up to batch_size prompts, `every` at a time.

        Prompt b is continued with the seed `seed` + b, independently of the others.
        """
        count, num_tokens = len(prompts), self.options.num_tokens
        seed_B = (seed + np.arange(self.batch_size, dtype=np.int64)).astype(np.uint32)
        context = self.prefill([*prompts, *[prompts[0]] * (self.batch_size - count)])
        for first in range(0, num_tokens, self.every):
            context, drawn = self.draw(context, self.params, seed_B, first)
            drawn = jax.device_get(drawn)
            yield Drawn(*(np.asarray(x)[:count, : num_tokens - first] for x in drawn))

    def prefill(self, prompts: list[np.ndarray]) -> Context:
        """Returns the context after reading batch_size prompts."""
        if self.window:
            prompts = [x[-self.window :] for x in prompts]
        # The newest token is read with the first sampled one.
        ends = [0 if self.window else len(x) - 1 for x in prompts]
        pairs = [*zip(prompts, ends, strict=True)]
        segments = cut_prompts([x[:end] for x, end in pairs], self.reader.tgt_len)
        memory = self.reader.empty(self.params)
        for after, _ in self.reader.run(memory, self.params, segments):
            memory = after
        token_B = np.array([x[-1] for x in prompts], np.int32)
        window_BL, length_B = pad_prompts([x[end:-1] for x, end in pairs], self.window)
        arrays: Any = token_B, memory, window_BL, length_B
        context: Context = self.begin(self.params, Context(*arrays))
        return context

    def _begin(self, params: Params, context: Context) -> Context:
        if self.window:
            return context
        memory = RingMemory.of(self.config, params, context.memory)
        return context._replace(memory=memory)

    def _draw(
        self, context: Context, params: Params, seed_B: Array, first: Array
    ) -> tuple[Context, tuple[Array, Array]]:
        """Returns (context, (tokens_BT, nll_BT)) of `every` tokens from `first`."""

        def choose_one(logits_V: Array, seed: ArrayLike, index: Array) -> Array:
            key = jax.random.fold_in(jax.random.key(seed), index)
            logits_1V = logits_V[None, : self.vocab_size]
            return choose(logits_1V, key, self.options)[0].astype(jnp.int32)

        def draw_one(
            context: Context, index: Array
        ) -> tuple[Context, tuple[Array, Array]]:
            log_probs_BV, context = self.predict(params, context)
            token_B = jax.vmap(choose_one, (0, 0, None))(log_probs_BV, seed_B, index)
            nll_B = -jnp.take_along_axis(log_probs_BV, token_B[:, None], axis=1)[:, 0]
            return context._replace(token_B=token_B), (token_B, nll_B)

        index_T = first + jnp.arange(self.every)
        context, (token_TB, nll_TB) = jax.lax.scan(draw_one, context, index_T)
        return context, (token_TB.T, nll_TB.T)

    def predict(self, params: Params, context: Context) -> tuple[Array, Context]:
        """Reads the newest token; returns (log_probs_BV after it, the context)."""
        model = FixedTransformerXL(self.config, params)
        token_B, memory, window_BL, length_B = context
        if not self.window:
            log_probs_B1V, memory = model.logits(token_B[:, None], memory)
            return log_probs_B1V[:, 0], context._replace(memory=memory)
        B, L = window_BL.shape
        full_B1 = (length_B == L)[:, None]
        window_BL = jnp.where(full_B1, jnp.roll(window_BL, -1, axis=1), window_BL)
        place_B = jnp.minimum(length_B, L - 1)
        window_BL = window_BL.at[jnp.arange(B), place_B].set(token_B)
        length_B = place_B + 1
        hidden_BLD, _ = model(window_BL, memory, length_B=length_B)
        last_B1D = reader.last(hidden_BLD, length_B)
        log_probs_BV = model.embedding.log_probs(last_B1D)[:, 0]
        return log_probs_BV, Context(token_B, memory, window_BL, length_B)


def pad_prompts(
    texts: Sequence[np.ndarray], width: int
) -> tuple[np.ndarray, np.ndarray]:
    """Returns tokens_BT, padded with 0 to `width` tokens, and length_B."""
    rows = [np.pad(text_T, (0, width - len(text_T))) for text_T in texts]
    length_B = np.array([*map(len, texts)], np.int32)
    return np.stack(rows).astype(np.int32), length_B


def cut_prompts(texts: Sequence[np.ndarray], L: int) -> Iterator[Segment]:
    """Yields unscored segments of L tokens, up to the end of the longest text."""
    for at in range(0, max(map(len, texts)), L):
        inputs_BL, length_B = pad_prompts([text_T[at : at + L] for text_T in texts], L)
        none_BL = np.zeros(inputs_BL.shape, np.float32)
        arrays = inputs_BL, inputs_BL, none_BL, none_BL > 0, length_B
        yield Segment(*(x[None] for x in arrays))


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
    prompts. For the other arguments see `Sampler` and `Reading`.
    """
    sizes = len(prompts), max(map(len, prompts)), vocab_size
    reading = Reading(window, segments)
    sampler = Sampler(model_config, params, config, *sizes, reading)
    return sampler.stream(prompts, config.seed)


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
