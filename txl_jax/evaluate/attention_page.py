"""A self-contained web page of every head's attention over a text.

The file contains the pictures, the numbers and a script that selects among them, so it
works offline. Without scripts it shows the pictures and one target.

Dims: N layers, H heads, I targets, R distances.
"""

import base64
import html
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np

from txl_jax.data.spelling import CONTEXT, spell
from txl_jax.evaluate.attention_map import Maps, arrays
from txl_jax.evaluate.attention_plot import plot_maps
from txl_jax.evaluate.attention_probe import WHOLE

TOP = 0.2  # share of the visible tokens that are marked, as in Appendix D

CAPTIONS = {
    "heads": "Mean attention by distance, one row per head.",
    "terms": "The same for each term, computed as if it were the whole score.",
    "memory": "Attention on the memory, by layer and by position in the segment.",
    "distances": "Similarity of the encodings of two distances.",
}

STYLE = """
:root { color-scheme: light; }
body { background: #fff; color: #111; font: 16px/1.5 system-ui, sans-serif;
  max-width: 60rem; margin: 1.5rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin-top: 2rem; }
form { display: flex; flex-wrap: wrap; gap: .5rem 1.2rem; margin: 1rem 0; }
select { font: inherit; max-width: 22rem; }
#text { white-space: pre-wrap; overflow-wrap: anywhere; border: 1px solid #bbb;
  border-radius: 4px; padding: .8rem; line-height: 1.8; }
mark { color: #111; border-radius: 2px; }
.now { outline: 2px solid #06c; border-radius: 2px; }
.edge { border-left: 2px solid #06c; margin: 0 1px; }
figure { margin: 1rem 0; } img { max-width: 100%; height: auto; }
figcaption, .note { color: #444; font-size: .9rem; }
"""

SCRIPT = """
'use strict';
const data = JSON.parse(document.getElementById('data').textContent);
const bytes = Uint8Array.from(atob(data.codes), c => c.charCodeAt(0));
const [N, H, I, R] = data.shape;
const [layer, head, target] = ['layer', 'head', 'target'].map(
  name => document.getElementById(name));
function fill(select, count, name) {
  const kept = Math.max(select.selectedIndex, 0);
  select.replaceChildren(...Array.from({length: count}, (_, i) => {
    const option = document.createElement('option');
    option.textContent = name(i);
    return option;
  }));
  select.selectedIndex = Math.min(kept, count - 1);
}
function show() {
  const n = layer.selectedIndex;
  fill(head, H, h => (h + 1) + ' (entropy ' + data.entropy[n][h].toFixed(2)
    + ' nats, memory ' + Math.round(100 * data.memory[n][h]) + ' %)');
  const h = head.selectedIndex, i = target.selectedIndex;
  const code = bytes.subarray(((n * H + h) * I + i) * R, ((n * H + h) * I + i + 1) * R);
  const at = data.at[i], parts = [];
  for (let d = R - 1; d >= 0; d--) {
    if (d === data.place[i]) {
      const edge = document.createElement('span');
      edge.className = 'edge';
      edge.title = 'the memory ends here';
      parts.push(edge);
    }
    const text = data.words[at - d], top = code[d] >= 128;
    const part = document.createElement(top ? 'mark' : 'span');
    part.textContent = text;
    if (top) part.style.background =
      'rgba(255, 140, 0, ' + (.15 + .85 * (code[d] - 128) / 127).toFixed(2) + ')';
    if (d === 0) part.className = 'now';
    parts.push(part);
  }
  document.getElementById('text').replaceChildren(...parts);
  document.getElementById('next').textContent = data.words[at + 1].trim();
}
fill(layer, N, n => String(n + 1));
fill(target, I, i => (i + 1) + ': ' + JSON.stringify(data.words[data.at[i]].trim()));
const query = new URLSearchParams(location.hash.slice(1));
layer.selectedIndex = Math.min(Math.max((query.get('layer') || N) - 1, 0), N - 1);
fill(head, H, String);
head.selectedIndex = Math.min(Math.max((query.get('head') || 1) - 1, 0), H - 1);
target.selectedIndex = Math.min(Math.max((query.get('target') || 1) - 1, 0), I - 1);
for (const select of [layer, head, target]) select.addEventListener('change', show);
show();
document.getElementById('choose').hidden = false;
"""


def encode(p_R: np.ndarray) -> np.ndarray:
    """Encodes probabilities as one byte per token.

    Bit 7 is set for the TOP share of the tokens. The other seven bits are the square
    root of the probability relative to the largest.
    """
    count = max(round(TOP * len(p_R)), 1)
    level_R = np.rint(127 * np.sqrt(p_R / max(p_R.max(), 1e-30))).astype(np.uint8)
    level_R[np.argsort(-p_R, kind="stable")[:count]] |= 128
    return level_R


def make_page(
    maps: Maps, words: list[str], pictures: dict[str, Path], title: str
) -> str:
    """Returns the page as HTML.

    words: the text of each token, from the oldest visible token to the one that follows
    the last target.
    """
    N, H, I, R = maps.shown_NHIR.shape  # noqa: E741
    codes = np.apply_along_axis(encode, -1, maps.shown_NHIR)
    at_I = maps.shown_I - (maps.first - R + 1)
    place_I = (maps.shown_I - maps.first) % maps.tgt_len
    data: dict[str, Any] = {
        "shape": [N, H, I, R],
        "words": words,
        "at": at_I.tolist(),
        "place": place_I.tolist(),
        "entropy": np.round(maps.entropy_NH[WHOLE].astype(float), 3).tolist(),
        "memory": np.round(maps.memory_NHL.mean(axis=2).astype(float), 3).tolist(),
        "codes": base64.b64encode(codes.tobytes()).decode(),
    }
    figures = "\n".join(
        f'<figure><img alt="{html.escape(CAPTIONS[name])}" src="data:image/png;base64,'
        f'{base64.b64encode(path.read_bytes()).decode()}">'
        f"<figcaption>{html.escape(CAPTIONS[name])}</figcaption></figure>"
        for name, path in pictures.items()
    )
    choices = "\n".join(
        f'<label>{name} <select id="{name}" autocomplete="off"></select></label>'
        for name in ("layer", "head", "target")
    )
    # A text may contain "</script>", so the data must not contain "<".
    inside = json.dumps(data).replace("<", "\\u003c")
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; \
img-src data:; style-src 'unsafe-inline'; script-src 'unsafe-inline'">
<title>{html.escape(title)}</title>
<style>{STYLE}</style>
</head>
<body>
<h1>{html.escape(title)}</h1>
<p>Each of {maps.targets} targets sees {R} tokens, including itself. The memory holds \
the tokens before its segment of {maps.tgt_len}.</p>
<h2>The attention of one head</h2>
<form id="choose" hidden>
{choices}
</form>
<p class="note">Marked: the {TOP:.0%} of the tokens with the most attention, darker \
for more. Outlined: the target, after which the next token is \
“<span id="next">{html.escape(words[at_I[0] + 1].strip())}</span>”. The blue bar is \
the end of the memory.</p>
<div id="text">{_first_text(codes[-1, 0, 0], words, int(at_I[0]))}</div>
<h2>All heads</h2>
{figures}
<script type="application/json" id="data">{inside}</script>
<script>{SCRIPT}</script>
</body>
</html>
"""


def _first_text(code_R: np.ndarray, words: list[str], at: int) -> str:
    """Returns the text of one target, shown without scripts."""
    R = len(code_R)
    return "".join(
        f'<mark style="background: #fc9">{html.escape(words[at - d])}</mark>'
        if code_R[d] >= 128
        else f"<span>{html.escape(words[at - d])}</span>"
        for d in range(R - 1, -1, -1)
    )


def write_files(
    maps: Maps,
    tokens: np.ndarray,
    decode: Callable[[Iterable[int]], str],
    folder: Path,
    title: str,
) -> dict[str, str]:
    """Writes page, pictures and arrays to the folder, and returns their paths.

    tokens: the whole split.
    """
    pictures = plot_maps(maps, folder)
    first = maps.first - maps.shown_NHIR.shape[-1] + 1
    before = min(first, CONTEXT)
    part = np.asarray(tokens[first - before : maps.first + maps.targets + 1])
    words = [text.replace("\n", "⏎\n") for text in spell(decode, part, before=before)]
    page, table = folder / "attention.html", folder / "attention.npz"
    page.write_text(make_page(maps, words, pictures, title), "utf-8")
    np.savez_compressed(table, **arrays(maps))  # type: ignore[arg-type]
    files = {"page": page, "arrays": table, **pictures}
    return {name: str(path) for name, path in files.items()}
