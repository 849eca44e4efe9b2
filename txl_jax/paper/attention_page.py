"""The mode `attention`: a self-contained page of every head's attention, with plots.

The file contains the pictures, the numbers and a script that selects among them, so it
works offline.

Dims: N layers, H heads, I targets, R distances, L places in a segment.
"""

import base64
import html
import json
import string
from collections.abc import Callable, Iterable
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from txl_jax.data.tokens import prepare
from txl_jax.data.vocab import CONTEXT, spell
from txl_jax.paper.attention_map import WHOLE, Maps, make_maps, summarize
from txl_jax.report.log import say
from txl_jax.report.plots import empty, finish
from txl_jax.runtime.storage import Json
from txl_jax.workdir.fit import warn_of_rotations
from txl_jax.workdir.load import Loaded
from txl_jax.workdir.staging import writing

# The terms as lettered in section 3.3.
TITLES = {
    WHOLE: "all terms: the model's attention",
    "a": "(a) content",
    "b": "(b) content and distance",
    "c": "(c) bias of content",
    "d": "(d) bias of distance",
}


def run(loaded: Loaded, workdir: Path) -> Json:
    """Maps the attention over part of a split; writes pictures and a page."""
    config, split = loaded.config, loaded.config.eval.split
    corpus = prepare(config.data, loaded.vocab, loaded.trained_on)
    tokens = corpus.split(split)
    warn_of_rotations(config, most=config.eval.mem_len)  # keys of every target
    maps = make_maps(loaded, tokens)
    result = {"step": loaded.step, "split": split, **summarize(maps)}
    title = f"Attention of {workdir.name}, step {loaded.step}"
    with writing(workdir, result) as folder:
        names = write_page(maps, tokens, loaded.vocab.decode, folder, title)
        result["files"] = {kind: str(workdir / name) for kind, name in names.items()}
        say(f"open {result['files']['page']} in a browser")
    return result


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


# Of each picture, what draws it and its caption.
PLOTS: dict[str, tuple[Callable[[Maps], Figure], str]] = {
    "heads": (
        lambda maps: _plot_rows(maps, [WHOLE]),
        "Mean attention by distance, one row per head, the first layer on top.",
    ),
    "terms": (
        lambda maps: _plot_rows(maps, maps.mean_NHR),
        "The same for each term, as if it were the whole score.",
    ),
    "memory": (_plot_memory, "Attention on the memory, by layer and by place."),
}

TOP = 0.2  # share of the visible tokens that are marked, as in Appendix D
TEMPLATE = Path(__file__).with_name("attention.html")


def encode(p_R: np.ndarray) -> np.ndarray:
    """Encodes a probability as a byte: its root, and bit 7 for the TOP share."""
    count = max(round(TOP * len(p_R)), 1)
    level_R = np.rint(127 * np.sqrt(p_R / max(p_R.max(), 1e-30))).astype(np.uint8)
    level_R[np.argsort(-p_R, kind="stable")[:count]] |= 128
    return level_R


def make_page(
    maps: Maps, words: list[str], pictures: dict[str, Path], title: str
) -> str:
    """Returns the page as HTML; words: from the oldest visible one, and one after."""
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
    decode: Callable[[Iterable[int]], str],
    folder: Path,
    title: str,
) -> dict[str, str]:
    """Writes page, pictures and arrays; returns their names. tokens: of the split."""
    pictures = {name: folder / f"attention_{name}.png" for name in PLOTS}
    for name, (draw, _) in PLOTS.items():
        draw(maps).savefig(pictures[name], dpi=100)
    target = int(maps.shown_I[0])
    first = target - maps.shown_NHIR.shape[-1] + 1
    before = min(first, CONTEXT)
    part = np.asarray(tokens[first - before : target + maps.targets + 1])
    words = [text.replace("\n", "⏎\n") for text in spell(decode, part, before=before)]
    page, table = folder / "attention.html", folder / "attention.npz"
    page.write_text(make_page(maps, words, pictures, title), "utf-8")
    arrays = maps._asdict()
    means = {f"mean_NHR_{name}": x for name, x in arrays.pop("mean_NHR").items()}
    np.savez_compressed(table, **arrays, **means)
    files = {"page": page, "arrays": table, **pictures}
    return {kind: path.name for kind, path in files.items()}
