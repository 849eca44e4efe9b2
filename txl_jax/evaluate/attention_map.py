"""Maps of attention by distance, for every head (the paper's Appendix D).

The maps hold averages over targets and the attention of single targets, for the whole
score and for each of its terms (see `attention_probe`).

Dims: B = 1 stream, L targets of a segment, R distances that a target sees, N layers,
H heads, A head, S segments, T targets in total, I targets shown.
"""

import collections
import dataclasses
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import numpy as np

from txl_jax.data.streams import Segment
from txl_jax.errors import UserError
from txl_jax.evaluate.attention_probe import WHOLE, tally_layers
from txl_jax.evaluate.options import AttentionConfig
from txl_jax.evaluate.reader import Reader, make_segment
from txl_jax.model.config import ABSOLUTE_POSITIONS, ModelConfig
from txl_jax.model.positions import SCHEMES


class Maps(NamedTuple):
    """The attention of every head over the distances 0, ..., R - 1 before a target."""

    mean_NHR: dict[str, np.ndarray]  # averages over targets, for WHOLE and each term
    entropy_NH: dict[str, np.ndarray]  # in nats, averaged over targets
    distance_NH: dict[str, np.ndarray]  # in tokens, averaged over targets
    memory_NHL: np.ndarray  # share of attention on the memory, by place in a segment
    shown_NHIR: np.ndarray  # attention of the targets that are shown
    shown_I: np.ndarray  # their indices in the split
    similarity_NR: np.ndarray  # of the projected r of each layer, see `similarity`
    similarity_R: np.ndarray  # of the encoding; empty without one
    targets: int
    first: int  # index of the first target in the split
    tgt_len: int


def map_model(config: ModelConfig, span: int, clamp_len: int) -> ModelConfig:
    """Returns the model with a memory that shows every token exactly `span` tokens."""
    if config.position in ABSOLUTE_POSITIONS:
        raise UserError(
            f'model.position = "{config.position}" has no distances: attention maps '
            "need a relative position scheme"
        )
    return dataclasses.replace(
        config,
        mem_len=span,
        clamp_len=clamp_len,
        same_length=True,
        same_length_self=False,
        kernel="xla",
    )


def similarity(r_XRA: np.ndarray) -> np.ndarray:
    """Returns the mean cosine between rows k apart, for k = 0, ..., R - 1.

    r_XRA is [R, A], or [H, R, A] for the mean over heads.
    """
    r_XRA = np.asarray(r_XRA, np.float32)
    r_XRA = r_XRA.reshape(-1, *r_XRA.shape[-2:])
    norm_XR1 = np.linalg.norm(r_XRA, axis=-1, keepdims=True)
    r_XRA = r_XRA / np.maximum(norm_XR1, 1e-30)
    cosine_RR = np.einsum("XRA,XSA->RS", r_XRA, r_XRA) / len(r_XRA)
    return np.array([np.diagonal(cosine_RR, k).mean() for k in range(len(cosine_RR))])


def make_maps(
    model_config: ModelConfig,
    params: Any,
    tokens: np.ndarray,
    config: AttentionConfig,
    tgt_len: int,
    clamp_len: int,
) -> Maps:
    """Returns the maps of a model's heads on a split.

    The memory is full before the first target. Raises UserError if the split is too
    short or the position scheme has no distances.
    """
    model_config = map_model(model_config, config.span, clamp_len)
    first, L = config.at or config.span, tgt_len
    end = first + config.segments * L
    if end + 1 > len(tokens):
        raise UserError(
            f"{config.segments} segments of {L} targets from token {first} of the "
            f"{config.split} split need {end + 1} tokens, but it has {len(tokens)}: "
            "lower attention.segments, attention.at or attention.span"
        )
    read = Reader(model_config, tally_layers, 1, L)
    params = read.unstack(params)
    outputs = read.outputs(params, cut(tokens, first, end, config.span, L))
    # Segments before the first target only fill the memory.
    tallies = jax.device_get([*collections.deque(outputs, maxlen=config.segments)])
    tally_SN: Any = jax.tree.map(lambda *x: np.concatenate(x), *tallies)
    distances = [layer.distances(config.span) for layer in read.empty(params).layers]
    rows = [np.asarray(each.r_RHA) for each in distances if each.r_RHA is not None]
    encode = SCHEMES[model_config.position].encoding
    T = config.segments * L
    shown_I = np.linspace(0, T - 1, min(config.shown, T)).round().astype(int)
    shown_I = np.unique(shown_I)
    shown_INHR = tally_SN.whole_HLR[shown_I // L, :, :, shown_I % L]

    def average(by_name: dict[str, Any]) -> dict[str, np.ndarray]:
        names = sorted(by_name, key=lambda name: (name != WHOLE, name))
        return {name: by_name[name].mean(axis=0) for name in names}

    return Maps(
        average(tally_SN.mean_HR),
        average(tally_SN.entropy_H),
        average(tally_SN.distance_H),
        tally_SN.memory_HL.mean(axis=0),
        np.moveaxis(shown_INHR, 0, 2),
        first + shown_I,
        np.stack([similarity(np.swapaxes(r_RHA, 0, 1)) for r_RHA in rows])
        if rows
        else np.zeros((1, 0)),
        similarity(encode(model_config, config.span)) if encode else np.zeros(0),  # type: ignore[arg-type]
        T,
        first,
        L,
    )


def cut(
    tokens: np.ndarray, first: int, end: int, span: int, L: int
) -> Iterator[Segment]:
    """Yields segments up to `end`, from `span` tokens before `first` or earlier.

    The first segment is shorter if the text starts inside it.
    """
    for at in range(first - math.ceil(span / L) * L, end, L):
        real_L = np.asarray(tokens[max(at, 0) : at + L], np.int32)
        tokens_BL = np.pad(real_L, (0, L - len(real_L)))[None]
        yield make_segment(tokens_BL, tokens_BL, len(real_L))


def summarize(maps: Maps) -> dict[str, Any]:
    """Returns statistics of the maps as JSON, by layer [N] or by head [N][H]."""

    def shorten(x: np.ndarray) -> Any:
        return np.round(x.astype(float), 4).tolist()

    R = maps.shown_NHIR.shape[-1]
    return {
        "targets": maps.targets,
        "first_target": maps.first,
        "segment_tokens": maps.tgt_len,
        "span_tokens": R,
        "uniform_entropy_nats": round(math.log(R), 4),
        "uniform_mean_distance_tokens": (R - 1) / 2,
        "terms": {
            name: {
                "entropy_nats": shorten(entropy_NH.mean(axis=1)),
                "mean_distance_tokens": shorten(maps.distance_NH[name].mean(axis=1)),
            }
            for name, entropy_NH in maps.entropy_NH.items()
        },
        "head_entropy_nats": shorten(maps.entropy_NH[WHOLE]),
        "head_mean_distance_tokens": shorten(maps.distance_NH[WHOLE]),
        "memory_mass": shorten(maps.memory_NHL.mean(axis=(1, 2))),
        "memory_mass_by_position": shorten(maps.memory_NHL.mean(axis=1)),
    }


def arrays(maps: Maps) -> dict[str, np.ndarray]:
    """Returns every array of the maps by name, for a .npz file."""
    named: dict[str, np.ndarray] = {}
    for name, value in maps._asdict().items():
        if isinstance(value, dict):
            named |= {f"{name}_{term}": array for term, array in value.items()}
        else:
            named[name] = np.asarray(value)
    return named
