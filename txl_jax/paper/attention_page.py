"""The mode `attention`: maps of attention by distance, for every head (Appendix D).

The reference kernel computes the probabilities again from the model's queries, keys and
distances, for the whole score and for each of its four terms (section 3.3) alone.

    a  q_i . k_j      content           c  u . k_j      bias towards some contents
    b  q_i . r_(i-j)  content and       d  w . r_(i-j)  bias towards some distances
                      distance

The result is a self-contained page, with pictures, numbers and a script that selects
among them; it works offline.

Dims: B = 1 stream, S segments, L targets of a segment, T targets in total, I targets
shown, K = M + L keys, R distances that a target sees, N layers, H heads, A head.
"""

import base64
import collections
import dataclasses
import html
import json
import math
import string
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
from jax import Array
from jax.scipy.special import entr
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from txl_jax.data.streams import Streams
from txl_jax.data.tokens import prepare
from txl_jax.data.vocab import CONTEXT, Decode, spell
from txl_jax.errors import UserError
from txl_jax.evaluate import reader
from txl_jax.evaluate.reader import Reader
from txl_jax.kernels import xla
from txl_jax.kernels.dispatch import choose_kernel
from txl_jax.kernels.operands import Operands, PositionTerms
from txl_jax.model.config import ModelConfig
from txl_jax.model.fixed import FixedTransformerXL
from txl_jax.model.key_values import KeyValueMemory
from txl_jax.model.segment import OneSegment
from txl_jax.report.log import say
from txl_jax.report.plots import empty, finish
from txl_jax.runtime.storage import Json, replacing, write_atomically
from txl_jax.workdir.load import Loaded
from txl_jax.workdir.resolve import warn_of_rotations
from txl_jax.workdir.staging import writing

WHOLE = "all"  # the sum of the terms a, b, c and d: the model's score
SEGMENTS = 4  # segments of eval.tgt_len targets to map, without eval.max_tokens
SHOWN = 12  # evenly spaced targets whose attention the page shows one by one
TOP = 0.2  # share of the visible tokens that are marked, as in Appendix D
TEMPLATE = Path(__file__).with_name("attention.html")
# The terms, with section 3.3's letters.
TITLES = {
    WHOLE: "all terms: the model's attention",
    "a": "(a) content",
    "b": "(b) content and distance",
    "c": "(c) bias of content",
    "d": "(d) bias of distance",
}


def draw_attention(loaded: Loaded, workdir: Path) -> Json:
    """Maps the attention over part of a split; writes pictures and a page."""
    config, split = loaded.config, loaded.config.eval.split
    corpus = prepare(config.data, loaded.vocab, loaded.trained_on)
    tokens = corpus.split(split)
    warn_of_rotations(config, max_keys=config.eval.mem_len)  # keys of every target
    maps = make_maps(loaded, tokens)
    result = {"step": loaded.step, "split": split, **summarize(maps)}
    title = f"Attention of {workdir.name}, step {loaded.step}"
    with writing(workdir, result) as folder:
        names = write_page(maps, tokens, loaded.vocab.decode, folder, title)
        result["files"] = {kind: str(workdir / name) for kind, name in names.items()}
        say(f"open {result['files']['page']} in a browser")
    return result


class Tally(NamedTuple):
    """The attention to one segment of one stream in a layer."""

    mean_HR: dict[str, Array]  # mean over targets, by term
    entropy_H: Array  # in nats, mean over targets
    memory_HL: Array  # share of attention on the memory, by place in the segment
    whole_HLR: Array


def read_attended(
    model: FixedTransformerXL, memory: KeyValueMemory, segment: OneSegment
) -> tuple[Operands, KeyValueMemory]:
    """Returns (operands of all layers' attention [N, ..], memory) of one segment."""
    layers: list[Operands] = []

    def record(operands: Operands) -> Array:
        layers.append(operands)
        return choose_kernel(model.config.kernel)(operands)

    read = reader.from_hidden(lambda *_: None)
    _, memory = read(model._replace(kernel=record), memory, segment, 0)
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
    n_segments = max(options.max_tokens // L, 1) if options.max_tokens else SEGMENTS
    T = n_segments * L
    first = -(-span // L) * L  # earlier tokens only fill the memory
    if first + T + 1 > len(tokens):
        raise UserError(
            f"{n_segments} segments of {L} targets from token {first} of the "
            f"split need {first + T + 1} tokens, but it has {len(tokens)}: lower "
            "eval.max_tokens or eval.mem_len"
        )

    def tally_layers(
        model: FixedTransformerXL,
        memory: KeyValueMemory,
        segment: OneSegment,
        segment_len: int,
    ) -> tuple[Tally, KeyValueMemory]:
        operands, memory = read_attended(model, memory, segment)
        return jax.lax.map(tally, operands), memory

    read = Reader(model, tally_layers, 1, L)
    text = tokens[: first + T + 1]
    outputs = read.read(loaded.params, Streams(text, 1, L).epoch())
    tallies = collections.deque(outputs, maxlen=n_segments)
    tally_SN: Any = jax.tree.map(lambda *x: np.stack(x), *tallies)
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


def _plot_rows(maps: Maps, names: Iterable[str]) -> Figure:
    """Draws a panel per term, a row per head; logarithmic around the uniform 1 / R."""
    N, H, R = maps.mean_NHR[WHOLE].shape
    names = list(names)
    columns = min(len(names), 3)
    rows = -(-len(names) // columns)
    tall = min(2.2 + 0.11 * N * H, 9)
    figure = empty(max(3.1 * columns + 0.6, 8), max(2.7 * rows, tall))
    for place, name in enumerate(names, 1):
        axes = figure.add_subplot(rows, columns, place)
        image = axes.imshow(
            np.maximum(maps.mean_NHR[name].reshape(N * H, R), 0.1 / R),
            norm=LogNorm(vmin=0.1 / R, vmax=0.5),
            cmap="magma_r",
            aspect="auto",
            interpolation="nearest",
            extent=(-0.5, R - 0.5, N * H + 0.5, 0.5),
        )
        for n in range(1, N):
            axes.axhline(n * H + 0.5, color="gray", linewidth=0.6)
        axes.set_title(TITLES[name], fontsize=9)
        axes.yaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
        axes.label_outer()
    figure.supxlabel("distance back from the target, in tokens", fontsize=9)
    figure.supylabel(f"head ({H} per layer)", fontsize=9)
    label = f"mean probability (uniform: {1 / R:.1g})"
    figure.colorbar(image, ax=figure.axes, extend="both", label=label)
    return figure


def _plot_memory(maps: Maps) -> Figure:
    N, H, L = maps.memory_NHL.shape
    figure = empty(8, 3.2)
    left, right = figure.subplots(1, 2, sharey=True)
    head_NH = maps.memory_NHL.mean(axis=2)
    colors = matplotlib.colormaps["viridis"](np.linspace(0, 0.8, N))
    layers = np.arange(1, N + 1)
    left.bar(layers, head_NH.mean(axis=1), color=colors)
    left.plot(layers, head_NH, "k.", markersize=4)
    left.set(xlabel="layer (points: its heads)", ylabel="attention on the memory")
    left.set_xticks(np.unique(np.linspace(1, N, min(N, 8)).round()))
    left.set_ylim(0, 1)
    R = maps.shown_NHIR.shape[-1]
    right.plot(1 - np.arange(1, L + 1) / R, ":", color="gray", label="uniform")
    for n, y_L in enumerate(maps.memory_NHL.mean(axis=1)):
        label = f"layer {n + 1}" if n in (0, N - 1) else None
        right.plot(y_L, color=colors[n], label=label)
    right.set(xlabel="position of the target in its segment")
    return finish(figure)


# Each picture's drawing function and caption.
PLOTS: dict[str, tuple[Callable[[Maps], Figure], str]] = {
    "heads": (
        lambda maps: _plot_rows(maps, [WHOLE]),
        "Mean attention by distance, one row per head, the first layer on top.",
    ),
    "terms": (
        lambda maps: _plot_rows(maps, maps.mean_NHR),
        "The same for each term alone.",
    ),
    "memory": (_plot_memory, "Attention on the memory, by layer and by place."),
}


def encode(p_R: np.ndarray) -> np.ndarray:
    """Encodes a probability as a byte: its root, and bit 7 for the TOP share."""
    count = max(round(TOP * len(p_R)), 1)
    level_R = np.rint(127 * np.sqrt(p_R / max(p_R.max(), 1e-30))).astype(np.uint8)
    level_R[np.argsort(-p_R, kind="stable")[:count]] |= 128
    return level_R


def make_page(
    maps: Maps, words: list[str], pictures: dict[str, Path], title: str
) -> str:
    """Returns the page as HTML; words: from the oldest visible one to the next word."""
    N, H, I, R = maps.shown_NHIR.shape  # noqa: E741
    L = maps.memory_NHL.shape[-1]
    codes = np.apply_along_axis(encode, -1, maps.shown_NHIR)
    index_I = maps.shown_I - maps.shown_I[0]
    data: Json = {
        "shape": [N, H, I, R],
        "words": words,
        "at": (index_I + R - 1).tolist(),
        "place": (index_I % L).tolist(),
        "entropy": np.round(maps.entropy_NH.astype(float), 3).tolist(),
        "memory": np.round(maps.memory_NHL.mean(axis=2).astype(float), 3).tolist(),
        "codes": base64.b64encode(codes.tobytes()).decode(),
    }
    figures = "\n".join(
        f'<figure><img alt="{PLOTS[name][1]}" src="data:image/png;base64,'
        f'{base64.b64encode(path.read_bytes()).decode()}">'
        f"<figcaption>{PLOTS[name][1]}</figcaption></figure>"
        for name, path in pictures.items()
    )
    return string.Template(TEMPLATE.read_text("utf-8")).substitute(
        title=html.escape(title),
        targets=maps.targets,
        span=R,
        tgt_len=L,
        top=f"{TOP:.0%}",
        figures=figures,
        # A text may contain "</script>", so the data must not contain "<".
        data=json.dumps(data).replace("<", "\\u003c"),
    )


def write_page(
    maps: Maps,
    tokens: np.ndarray,
    decode: Decode,
    folder: Path,
    title: str,
) -> dict[str, str]:
    """Writes page, pictures and arrays; returns their names. tokens: the split's."""
    pictures = {name: folder / f"attention_{name}.png" for name in PLOTS}
    for name, (draw, _) in PLOTS.items():
        with replacing(pictures[name]) as file:
            draw(maps).savefig(file, dpi=100)
    target = int(maps.shown_I[0])
    first = target - maps.shown_NHIR.shape[-1] + 1
    before = min(first, CONTEXT)
    part = np.asarray(tokens[first - before : target + maps.targets + 1])
    words = [text.replace("\n", "⏎\n") for text in spell(decode, part, before=before)]
    page, table = folder / "attention.html", folder / "attention.npz"
    write_atomically(page, make_page(maps, words, pictures, title))
    arrays = maps._asdict()
    means = {f"mean_NHR_{name}": x for name, x in arrays.pop("mean_NHR").items()}
    with replacing(table) as file:
        np.savez_compressed(file, **arrays, **means)
    files = {"page": page, "arrays": table, **pictures}
    return {kind: path.name for kind, path in files.items()}
