"""Maps of attention by distance, for every head (the paper's Appendix D).

The reference kernel computes the probabilities again from the model's queries, keys and
distances: for the whole score, and for each of its four terms (section 3.3) as if it
were the whole score.

    a  q_i . k_j      content           c  u . k_j      bias towards some contents
    b  q_i . r_(i-j)  content and       d  w . r_(i-j)  bias towards some distances
                      distance

Dims: B = 1 stream, S segments, L targets of a segment, T targets in total, I targets
shown, K = M + L keys, R distances that a target sees, N layers, H heads, A head.
"""

import collections
import dataclasses
import math
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.scipy.special import entr

from txl_jax.data.streams import Streams
from txl_jax.errors import UserError
from txl_jax.evaluate import reader
from txl_jax.evaluate.reader import Reader
from txl_jax.kernels import xla
from txl_jax.kernels.operands import Operands, PositionTerms
from txl_jax.model.config import ModelConfig
from txl_jax.model.memory.key_values import KeyValueMemory
from txl_jax.model.segment import OneSegment
from txl_jax.model.txl import TransformerXL
from txl_jax.paper.options import refuse_memories
from txl_jax.runtime.storage import Json
from txl_jax.workdir.load import Loaded

WHOLE = "all"  # the sum of the terms a, b, c and d: the model's score
SEGMENTS = 4  # to map, of eval.tgt_len targets each, without eval.max_tokens
SHOWN = 12  # targets, evenly spaced, whose attention the page shows one by one


class Tally(NamedTuple):
    """The attention to one segment of one stream in a layer."""

    mean_HR: dict[str, Array]  # by term, over targets
    entropy_H: Array  # in nats, over targets
    memory_HL: Array  # share of attention on the memory, by place in the segment
    whole_HLR: Array


def read_attended(
    model: TransformerXL, memory: KeyValueMemory, segment: OneSegment
) -> tuple[Operands, KeyValueMemory]:
    """Returns (operands of all layers' attention [N, ..], memory) of one segment."""
    layers: list[Operands] = []

    def record(call: Any, args: Any, kwargs: Any, context: Any) -> Any:
        if context.method_name == "attend":  # of Attention
            layers.extend(args)
        return call(*args, **kwargs)

    with nn.intercept_methods(record):
        _, memory = reader.from_hidden(lambda *_: None)(model, memory, segment, 0)
    return jax.tree.map(lambda *x: jnp.stack(x), *layers), memory


def terms(operands: Operands) -> dict[str, Array]:
    """Returns the probabilities [H, B, L, K] of the whole score and of each term.

    Terms that the position scheme lacks are omitted. Rotations are part of term a.
    """
    position = operands.position
    r, u, w, bias = position
    no_q = operands._replace(q_BLHA=jnp.zeros_like(operands.q_BLHA))
    no_k = operands._replace(k_BKHA=jnp.zeros_like(operands.k_BKHA))
    parts = {WHOLE: operands, "a": operands._replace(position=PositionTerms())}
    if r is not None:
        parts["b"] = no_k._replace(position=PositionTerms(r_RHA=r))
    if u is not None:
        parts["c"] = no_q._replace(position=PositionTerms(u_HA=u))
    if bias is not None or (r is not None and w is not None):
        parts["d"] = no_q._replace(
            k_BKHA=no_k.k_BKHA, position=position._replace(u_HA=None)
        )
    return {name: xla.probabilities(part) for name, part in parts.items()}


def by_distance(p_HLK: Array, R: int) -> Array:
    """Returns p_HLR: column d is a target's attention to the key d tokens before it."""
    L, K = p_HLK.shape[1:]
    key_LR = jnp.arange(L)[:, None] + (K - L) - jnp.arange(R)
    return jnp.take_along_axis(p_HLK, key_LR[None], axis=2)


def tally(operands: Operands) -> Tally:
    """Returns the tally of one layer, for one segment of one stream."""
    L, R = operands.q_BLHA.shape[1], operands.k_BKHA.shape[1] - operands.q_BLHA.shape[1]
    p_HLR = {name: by_distance(p[:, 0], R) for name, p in terms(operands).items()}
    whole_HLR = p_HLR[WHOLE]
    in_memory_LR = jnp.arange(R) > jnp.arange(L)[:, None]
    return Tally(
        {name: p.mean(axis=1) for name, p in p_HLR.items()},
        entr(whole_HLR).sum(-1).mean(1),
        jnp.sum(whole_HLR * in_memory_LR, axis=-1),
        whole_HLR,
    )


class Maps(NamedTuple):
    """The attention of every head over the distances 0, ..., R - 1 before a target."""

    mean_NHR: dict[str, np.ndarray]  # averages over targets, for WHOLE and each term
    entropy_NH: np.ndarray  # in nats, averaged over targets
    memory_NHL: np.ndarray  # share of attention on the memory, by place in a segment
    shown_NHIR: np.ndarray  # attention of the targets that are shown
    shown_I: np.ndarray  # their indices in the split; the first target comes first
    targets: int


def map_model(config: ModelConfig, span: int, clamp_len: int) -> ModelConfig:
    """Returns the model with a memory that shows every token exactly `span` tokens."""
    if span < 2:
        raise UserError(f"eval.mem_len = {span}: attention maps need at least 2 tokens")
    refuse_memories(config, "attention", "compressed_len", "memory_tokens")
    return dataclasses.replace(
        config,
        mem_len=span,
        clamp_len=clamp_len,
        same_length=True,
        same_length_self=False,
        kernel="xla",
    )


def make_maps(loaded: Loaded, tokens: np.ndarray) -> Maps:
    """Returns the maps of a model's heads on a split; raises UserError."""
    options = loaded.config.eval
    span, L = options.mem_len, options.tgt_len
    model = map_model(loaded.config.model, span, options.clamp_len)
    segments = max(options.max_tokens // L, 1) if options.max_tokens else SEGMENTS
    T = segments * L
    first = before = -(-span // L) * L  # tokens that only fill the memory
    if first + T + 1 > len(tokens):
        raise UserError(
            f"{segments} segments of {L} targets from token {first} of the "
            f"split need {first + T + 1} tokens, but it has {len(tokens)}: lower "
            "eval.max_tokens or eval.mem_len"
        )

    def tally_layers(
        model: TransformerXL,
        memory: KeyValueMemory,
        segment: OneSegment,
        segment_len: int,
    ) -> tuple[Tally, KeyValueMemory]:
        operands, memory = read_attended(model, memory, segment)
        return jax.lax.map(tally, operands), memory

    read = Reader(model, tally_layers, 1, L)
    params = read.unstack(loaded.params)
    text = tokens[first - before : first + T + 1]
    outputs = read.outputs(params, Streams(text, 1, L).epoch())
    tallies = jax.device_get([*collections.deque(outputs, maxlen=segments)])
    tally_SN: Any = jax.tree.map(lambda *x: np.concatenate(x), *tallies)
    shown_I = np.unique(np.linspace(0, T - 1, SHOWN).round().astype(int))
    shown_INHR = tally_SN.whole_HLR[shown_I // L, :, :, shown_I % L]
    names = sorted(tally_SN.mean_HR, key=lambda name: (name != WHOLE, name))
    return Maps(
        {name: tally_SN.mean_HR[name].mean(axis=0) for name in names},
        tally_SN.entropy_H.mean(axis=0),
        tally_SN.memory_HL.mean(axis=0),
        np.moveaxis(shown_INHR, 0, 2),
        first + shown_I,
        T,
    )


def summarize(maps: Maps) -> Json:
    """Returns statistics of the maps as JSON, by layer [N] or by head [N][H]."""

    def shorten(x: np.ndarray) -> list[object]:
        return np.round(x.astype(float), 4).tolist()

    R = maps.shown_NHIR.shape[-1]
    return {
        "targets": maps.targets,
        "span_tokens": R,
        "uniform_entropy_nats": round(math.log(R), 4),
        "uniform_mean_distance_tokens": (R - 1) / 2,
        "head_entropy_nats": shorten(maps.entropy_NH),
        "head_mean_distance_tokens": shorten(maps.mean_NHR[WHOLE] @ np.arange(R)),
        "memory_mass": shorten(maps.memory_NHL.mean(axis=(1, 2))),
    }
