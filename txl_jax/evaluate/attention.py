"""Where the heads look: the attention's probabilities, averaged and one by one.

The paper's Appendix D, over the distances before a target: of the whole score and of
each of its terms, see `attended`.

Dims: B = 1 stream, L targets of a segment, R distances that a target sees, N layers,
H heads, A head, T targets in all, I those shown.
"""

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import numpy as np

from txl_jax.data.corpora import SPLITS
from txl_jax.errors import UserError, require, require_one_of
from txl_jax.evaluate.attended import WHOLE, Attended, observe, tally
from txl_jax.model.config import ABSOLUTE, ModelConfig
from txl_jax.model.key_values import KeyValueMemory, unstack
from txl_jax.model.memory import Memory, oldest_BL, reach
from txl_jax.model.positions import SCHEMES
from txl_jax.model.txl import TransformerXL


@dataclasses.dataclass(frozen=True)
class AttentionConfig:
    """Which tokens the maps of attention are of; segments have eval.tgt_len."""

    split: str = "valid"  # train, valid or test
    at: int = 0  # index of the first target; 0 = the first that sees a whole span
    segments: int = 4  # segments whose tokens are the targets
    span: int = 640  # tokens that each target sees, itself among them
    shown: int = 12  # targets, evenly spread, whose own attention the page shows

    def __post_init__(self) -> None:
        """Refuses impossible values, naming the field."""
        require_one_of(self.split, list(SPLITS), "attention.split")
        require(self, "attention", 1, "segments", "shown")
        require(self, "attention", 2, "span")
        require(self, "attention", 0, "at")
        if self.at and self.at < self.span:
            raise UserError(
                f"attention.at = {self.at} has fewer than attention.span = {self.span} "
                "tokens before it: raise it, or leave it at 0 for the first that has"
            )


class Maps(NamedTuple):
    """The attention of every head over the distances 0, ..., R - 1 before a target."""

    mean_NHR: dict[str, np.ndarray]  # of WHOLE and each term: averages over targets
    entropy_NH: dict[str, np.ndarray]  # in nats, of single targets, then averaged
    distance_NH: dict[str, np.ndarray]  # in tokens, likewise
    memory_NHL: np.ndarray  # what of the whole is on the memory, by place in a segment
    shown_NHIR: np.ndarray  # the whole attention of the targets that are shown
    shown_I: np.ndarray  # their indices in the split
    similarity_NR: np.ndarray  # of r, projected for each layer, see `similarity`
    similarity_R: np.ndarray  # of the encoding itself; empty without one
    targets: int
    first: int  # index of the first target in the split
    tgt_len: int


def map_model(config: ModelConfig, span: int, clamp_len: int) -> ModelConfig:
    """Returns the same model, every token of which sees the newest `span` alone."""
    if config.position in ABSOLUTE:
        raise UserError(
            f'model.position = "{config.position}" knows places of a segment alone: '
            "maps of attention are by distance, over a memory, which needs a relative "
            "position"
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

    r_XRA is [R, A], or [H, R, A], of whose heads it is the mean.
    """
    r_XRA = np.asarray(r_XRA, np.float32)
    r_XRA = r_XRA.reshape(-1, *r_XRA.shape[-2:])
    norm_XR1 = np.linalg.norm(r_XRA, axis=-1, keepdims=True)
    r_XRA = r_XRA / np.maximum(norm_XR1, 1e-30)
    cosine_RR = np.einsum("XRA,XSA->RS", r_XRA, r_XRA) / len(r_XRA)
    return np.array([np.diagonal(cosine_RR, k).mean() for k in range(len(cosine_RR))])


def make_maps(
    config: ModelConfig,
    params: Any,
    tokens: np.ndarray,
    how: AttentionConfig,
    tgt_len: int,
    clamp_len: int,
) -> Maps:
    """Returns the maps of a model's heads on a split.

    The memory is full before the first target. Raises UserError where the split is too
    short, or where the model has no distances.
    """
    config = map_model(config, how.span, clamp_len)
    first, L = how.at or how.span, tgt_len
    if (needed := first + how.segments * L + 1) > len(tokens):
        raise UserError(
            f"the {how.segments} segments of {L} targets from token {first} of the "
            f"{how.split} split need {needed} tokens, and it has {len(tokens)}: lower "
            "attention.segments, attention.at or attention.span"
        )
    model = TransformerXL(config, stacked=False)
    apart = jax.jit(unstack)(params)
    look = jax.jit(functools.partial(observe, model))
    count = jax.jit(tally)

    def start(params: Any) -> KeyValueMemory:
        return KeyValueMemory.of(config, params, Memory.empty(config, 1), L)

    memory = jax.jit(start)(apart)
    begin = first - math.ceil(how.span / L) * L
    sums: list[Any] = []
    for at in range(begin, first + how.segments * L, L):
        # The very first segment of all may be shorter.
        real_L = np.asarray(tokens[max(at, 0) : at + L], np.int32)
        tokens_BL = np.pad(real_L, (0, L - len(real_L)))[None]
        before = memory
        memory, layers = look(apart, memory, tokens_BL, np.array([len(real_L)]))
        if at >= first:
            oldest = oldest_BL(
                before.filled_B, None, how.span, L, reach(config, how.span)
            )
            sums.append([jax.device_get(count(seen, oldest)) for seen in layers])
    return _join(config, sums, how, first, L, layers)


def _join(
    config: ModelConfig,
    segments: list[Any],
    how: AttentionConfig,
    first: int,
    L: int,
    layers: list[Attended],
) -> Maps:
    """Returns the maps of what `tally` found, by segment and layer."""

    def gather(name: str, part: int) -> np.ndarray:
        return np.mean(
            [[layer[0][name][part] for layer in layers] for layers in segments], axis=0
        )

    names = sorted(segments[0][0][0], key=lambda name: (name != WHOLE, name))
    T = len(segments) * L
    shown_I = np.unique(np.linspace(0, T - 1, min(how.shown, T)).round().astype(int))
    shown_NHIR = np.stack(
        [
            np.stack([layer[2][:, i % L] for layer in segments[i // L]])
            for i in shown_I.tolist()
        ],
        axis=2,
    )
    rows = [seen.distances.r_RHA for seen in layers]
    encode = SCHEMES[config.position].encoding
    return Maps(
        {name: gather(name, 0) for name in names},
        {name: gather(name, 1) for name in names},
        {name: gather(name, 2) for name in names},
        np.mean([[layer[1] for layer in layers] for layers in segments], axis=0),
        shown_NHIR,
        first + shown_I,
        np.stack(
            [
                similarity(np.swapaxes(np.asarray(r_RHA)[-how.span :], 0, 1))
                for r_RHA in rows
                if r_RHA is not None
            ]
            or [np.zeros(0)]
        ),
        similarity(np.asarray(encode(config, how.span))) if encode else np.zeros(0),
        T,
        first,
        L,
    )


def summarise(maps: Maps) -> dict[str, Any]:
    """Returns the maps in numbers, by layer [N], and for the whole by head [N][H]."""

    def short(x: np.ndarray) -> Any:
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
                "entropy_nats": short(entropy_NH.mean(axis=1)),
                "mean_distance_tokens": short(maps.distance_NH[name].mean(axis=1)),
            }
            for name, entropy_NH in maps.entropy_NH.items()
        },
        "head_entropy_nats": short(maps.entropy_NH[WHOLE]),
        "head_mean_distance_tokens": short(maps.distance_NH[WHOLE]),
        "memory_mass": short(maps.memory_NHL.mean(axis=(1, 2))),
        "memory_mass_by_position": short(maps.memory_NHL.mean(axis=1)),
    }


def arrays(maps: Maps) -> dict[str, np.ndarray]:
    """Returns every array of the maps by name, for a .npz file."""
    found: dict[str, np.ndarray] = {}
    for name, value in maps._asdict().items():
        if isinstance(value, dict):
            found |= {f"{name}_{term}": array for term, array in value.items()}
        else:
            found[name] = np.asarray(value)
    return found
