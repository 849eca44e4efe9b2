"""Learning a text while reading it: scores a segment, then learns from it.

A text is read once, as one stream. Each segment is scored first, and then makes an
update together with segments that other streams read again, from random places of the
text scored so far. The probability of a byte is a mixture of the predictions of the
newest parameters, of their moving average, and of continuous caches. The weights of the
mixture follow from the bytes before (fixed share, Herbster and Warmuth 1998).

Dims: T bytes of the text, S segments of a call, L segment, B streams (one is scored,
R = B - 1 read again), X mixed predictions, C entries of a cache.
"""

import functools
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from jax import Array

from txl_jax.evaluate.continuous_cache import NONE, Cache
from txl_jax.evaluate.options import EvalConfig
from txl_jax.model.config import ModelConfig
from txl_jax.model.initializers import Params
from txl_jax.model.memory.kinds import choose_kind
from txl_jax.model.memory.protocol import MemoryLike
from txl_jax.model.segment import OneSegment
from txl_jax.model.txl import TransformerXL
from txl_jax.update.optim import clip, make_schedule
from txl_jax.update.options import OptimConfig
from txl_jax.update.state import init_params


class Options(NamedTuple):
    """How the model reads and learns."""

    model: ModelConfig = ModelConfig(
        vocab_size=256, n_layer=3, d_model=128, n_head=4, d_head=32, d_inner=512,
        mem_len=128, dropout=0.0, feed_forward="swiglu", qk_norm=True, unroll=3,
    )  # fmt: skip
    optim: OptimConfig = OptimConfig(
        lr=3e-3, schedule="constant", warmup_steps=50, clip=0.5
    )
    tgt_len: int = 32
    streams: int = 8
    average_decay: float = 0.98  # for the moving average of the parameters
    jump: float = 0.05  # the probability that a stream reads again from another place
    cache_len: int = 2000
    cache_thetas: tuple[float, ...] = (0.15, 0.3, 0.6)
    share: float = 0.05  # of the weights that returns to the prior after each byte
    segments_per_call: int = 50


class State(NamedTuple):
    """What the model has learned, and where its streams are."""

    params: Params
    average: Params
    opt_state: Any
    memory: MemoryLike  # B streams
    average_memory: MemoryLike  # the scored stream, read with the average
    start_R: Array  # int32, where the segments begin that are read again
    cache: Cache
    log_weight_X: Array


def make_optimizer(options: Options) -> optax.GradientTransformationExtraArgs:
    """Returns Adam, which forgets squares of gradients sooner than in training."""
    return optax.chain(clip(options.optim.clip), optax.scale_by_adam(0.9, 0.98))


def start(options: Options, seed: int) -> State:
    """Returns the state before the first byte."""
    model, R, C = options.model, options.streams - 1, options.cache_len
    params = nn.unbox(init_params(model, jax.random.key(seed)))
    return State(
        params=params,
        average=jax.tree.map(jnp.copy, params),
        opt_state=make_optimizer(options).init(params),
        memory=choose_kind(model).empty(R + 1),
        average_memory=choose_kind(model).empty(1),
        start_R=jnp.zeros(R, jnp.int32),
        cache=Cache(jnp.zeros((1, C, model.d_model)), jnp.full((1, C), NONE)),
        log_weight_X=log_prior(options),
    )


def log_prior(options: Options) -> Array:
    """Returns the initial weights: two for the model, and one for each cache."""
    caches = len(options.cache_thetas)
    return jnp.log(jnp.array([0.4, 0.4] + [0.2 / caches] * caches))


def learn_segment(
    options: Options, text_T: Array, key: Array, state: State, k: Array
) -> tuple[State, Array]:
    """Returns (state, nll_L in nats) after segment k, which is scored first."""
    model, L = TransformerXL(options.model), options.tgt_len
    front, key = k * L, jax.random.fold_in(key, k)
    # All bytes up to text_T[front] have been scored.
    start_R, jumps_R = place_readers(options, key, state.start_R, front)
    start_B = jnp.concatenate([front[None], start_R])
    place_BL = start_B[:, None] + jnp.arange(L)
    segment = OneSegment(
        inputs_BL=text_T[place_BL],
        targets_BL=text_T[place_BL + 1],
        weights_BL=jnp.ones(place_BL.shape).at[1:].set(front >= L),
        first_BL=jnp.zeros(place_BL.shape, bool).at[1:, 0].set(jumps_R),
        length_B=jnp.full(len(start_B), L),
    )

    def loss(params: Params) -> Any:
        nll_BL, memory = model.apply(
            {"params": params},
            segment.inputs_BL,
            segment.targets_BL,
            state.memory,
            first_BL=segment.first_BL,
            method="nll",
        )
        weights_BL = segment.weights_BL
        mean = jnp.sum(nll_BL * weights_BL) / jnp.sum(weights_BL)
        return mean, (nll_BL[:1], memory)

    grads, (nll_1L, memory) = jax.grad(loss, has_aux=True)(state.params)
    scored = jax.tree.map(lambda x: x[:1], segment)
    average = {"params": state.average}
    outputs: Any = model.apply(average, scored.inputs_BL, state.average_memory)
    h_1LD, average_memory = outputs
    average_1L: Any = model.apply(
        average, h_1LD, scored.targets_BL, method=lambda m, *x: m.embedding.nll(*x)
    )
    nlls_X1L, cache = [nll_1L, average_1L], state.cache
    for theta in options.cache_thetas:
        config = EvalConfig(
            cache_len=options.cache_len, cache_theta=theta, cache_weight=0.99
        )
        mixed_1L, cache = state.cache.mix(average_1L, h_1LD, scored, config)
        nlls_X1L.append(mixed_1L)
    log_weight_X, nll_L = mix(options, state.log_weight_X, jnp.concatenate(nlls_X1L))

    grad_norm = optax.tree.norm(grads)
    optimizer = make_optimizer(options)
    updates, opt_state = optimizer.update(
        grads, state.opt_state, state.params, grad_norm=grad_norm
    )
    lr = make_schedule(options.optim, 1)(k)  # a constant rate has no end
    params = jax.tree.map(lambda p, u: p - lr * u, state.params, updates)
    # At first, the average covers fewer updates.
    new = 1 - jnp.minimum(options.average_decay, (k + 1) / (k + 10))
    after = State(
        params=params,
        average=jax.tree.map(lambda a, p: a + new * (p - a), state.average, params),
        opt_state=opt_state,
        memory=memory,
        average_memory=average_memory,
        start_R=start_R,
        cache=cache,
        log_weight_X=log_weight_X,
    )
    return after, nll_L


def place_readers(
    options: Options, key: Array, start_R: Array, front: Array
) -> tuple[Array, Array]:
    """Returns (start_R, jumps_R) of the segments that are read again.

    A stream continues, or jumps to a random place. No target is after text_T[front].
    """
    L = options.tgt_len
    key_jump, key_place = jax.random.split(key)
    last = jnp.maximum(front - L, 0)
    random_R = jax.random.randint(key_place, start_R.shape, 0, last + 1)
    jumps_R = jax.random.uniform(key_jump, start_R.shape) < options.jump
    jumps_R |= start_R + L > last
    return jnp.where(jumps_R, random_R, start_R + L), jumps_R


def mix(options: Options, log_weight_X: Array, nll_XL: Array) -> tuple[Array, Array]:
    """Returns (weights after the segment, nll_L of the mixture), byte after byte."""
    prior_X, share = log_prior(options), options.share

    def add_byte(log_weight_X: Array, nll_X: Array) -> tuple[Array, Array]:
        joint_X = log_weight_X - nll_X
        total = jax.nn.logsumexp(joint_X)
        kept_X = jnp.log1p(-share) + joint_X - total
        return jnp.logaddexp(kept_X, jnp.log(share) + prior_X), -total

    return jax.lax.scan(add_byte, log_weight_X, nll_XL.T)


@functools.partial(jax.jit, static_argnums=0, donate_argnums=3)
def learn_segments(
    options: Options, text_T: Array, key: Array, state: State, first: Array
) -> tuple[State, Array]:
    """Returns (state, nll_SL) after the segments of a call, the first one given."""
    step = functools.partial(learn_segment, options, text_T, key)
    return jax.lax.scan(step, state, first + jnp.arange(options.segments_per_call))
