"""The page of attention is a single file, safe for any text, and works in a browser.

Dims: N layers, H heads, I targets shown, R distances, L places in a segment.
"""

import base64
import json
import os
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from txl_jax.evaluate import attention_page
from txl_jax.evaluate.attention_map import WHOLE, Maps

N, H, I, R, L = 2, 3, 4, 10, 8  # noqa: E741
FIRST = 30  # the first target's index in the split
SYMBOLS = ("a ", "b ", "</script><b>", "é&amp;", "\n", "c ")


def make_maps(terms: str = "abcd") -> Maps:
    """Returns random maps."""
    rng = np.random.default_rng(0)

    def rows(*shape: int) -> np.ndarray:
        return rng.dirichlet(np.full(R, 0.3), shape).astype(np.float32)

    names = (WHOLE, *terms)
    return Maps(
        {name: rows(N, H) for name in names},
        {name: rng.uniform(0, 2, (N, H)) for name in names},
        {name: rng.uniform(0, R, (N, H)) for name in names},
        rng.uniform(0, 1, (N, H, L)),
        rows(N, H, I),
        FIRST + np.array([0, 5, 10, 15]),
        rng.uniform(-1, 1, (N, R)) if "b" in terms else np.zeros((1, 0)),
        rng.uniform(-1, 1, R) if "b" in terms else np.zeros(0),
        2 * L,
        FIRST,
        L,
    )


def decode(tokens: Any) -> str:
    return "".join(SYMBOLS[token] for token in np.asarray(tokens).tolist())


TOKENS = np.random.default_rng(1).integers(0, len(SYMBOLS), 60)
MAPS = make_maps()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("page")
    files = attention_page.write_files(MAPS, TOKENS, decode, path, "Attention of <x>")
    assert {Path(name).name for name in files.values()} == {
        *("attention.html", "attention.npz", "attention_heads.png"),
        *("attention_terms.png", "attention_memory.png", "attention_distances.png"),
    }
    return path


class Reader(HTMLParser):
    """Collects the references and the text, and checks that elements nest."""

    EMPTY = ("meta", "img", "br")

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.references: list[str] = []
        self.text: dict[str, str] = {}
        self.inside = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Opens an element and collects its references."""
        attributes = dict(attrs)
        self.references += [
            attributes[name] or ""
            for name in ("src", "href", "action")
            if name in attributes
        ]
        if tag not in self.EMPTY:
            self.open.append(tag)
        if attributes.get("id"):
            self.inside = attributes["id"] or ""

    def handle_endtag(self, tag: str) -> None:
        """Closes the innermost element."""
        assert self.open.pop() == tag
        if tag in ("div", "script"):
            self.inside = ""

    def handle_data(self, data: str) -> None:
        """Collects text by the id of the element around it."""
        self.text[self.inside] = self.text.get(self.inside, "") + data


def read(folder: Path) -> Reader:
    reader = Reader()
    reader.feed((folder / "attention.html").read_text("utf-8"))
    reader.close()
    assert not reader.open
    return reader


def shown_text(i: int) -> str:
    """Returns the text visible to target i."""
    at = int(MAPS.shown_I[i])
    return decode(TOKENS[at - R + 1 : at + 1]).replace("\n", "⏎\n")


def test_the_page_refers_to_nothing_outside_it(folder: Path) -> None:
    reader = read(folder)
    assert len(reader.references) == 4
    for reference in reader.references:
        kind, _, data = reference.partition(",")
        assert kind == "data:image/png;base64"
        assert base64.b64decode(data).startswith(b"\x89PNG")
    text = (folder / "attention.html").read_text("utf-8")
    assert "default-src 'none'" in text
    assert not re.search(r"https?://|@import|url\(", text)


def test_any_text_is_shown_unchanged(folder: Path) -> None:
    reader = read(folder)
    assert reader.text["text"] == shown_text(0)
    assert "</script><b>" in shown_text(0)
    data = json.loads(reader.text["data"])
    first = FIRST - R + 1
    assert "".join(data["words"]) == decode(TOKENS[first : FIRST + 2 * L + 1]).replace(
        "\n", "⏎\n"
    )


def test_the_page_has_the_numbers_of_every_head_and_target(folder: Path) -> None:
    data = json.loads(read(folder).text["data"])
    codes = np.frombuffer(base64.b64decode(data["codes"]), np.uint8)
    codes = codes.reshape(data["shape"])
    assert codes.shape == MAPS.shown_NHIR.shape
    top = codes >= 128
    assert (top.sum(axis=-1) == 2).all(), "a fifth of ten"
    least = np.where(top, MAPS.shown_NHIR, 1).min(axis=-1)
    assert (least >= np.where(top, 0, MAPS.shown_NHIR).max(axis=-1)).all()
    level = (codes & 127) / 127
    greatest = MAPS.shown_NHIR.max(axis=-1, keepdims=True)
    np.testing.assert_allclose(level**2, MAPS.shown_NHIR / greatest, atol=0.01)
    assert data["at"] == [R - 1, R + 4, R + 9, R + 14]
    assert data["place"] == [0, 5, 2, 7]
    with np.load(folder / "attention.npz") as arrays:
        np.testing.assert_array_equal(arrays["mean_NHR_d"], MAPS.mean_NHR["d"])
        np.testing.assert_array_equal(arrays["shown_NHIR"], MAPS.shown_NHIR)


def test_pictures_are_drawn_for_any_scheme(folder: Path, tmp_path: Path) -> None:
    content_only = attention_page.plot_maps(make_maps("a"), tmp_path)
    for path in (*folder.glob("*.png"), *content_only.values()):
        assert path.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
        assert path.stat().st_size < 80_000


NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
BROWSER = os.environ.get("TXL_JAX_CHROMIUM") or next(
    filter(None, map(shutil.which, NAMES)), None
)


@pytest.mark.skipif(
    not BROWSER, reason=f"no browser: none of {', '.join(NAMES)}, no TXL_JAX_CHROMIUM"
)
def test_a_browser_shows_the_selected_head_and_target(folder: Path) -> None:
    address = f"{(folder / 'attention.html').as_uri()}#layer=1&head=2&target=3"
    done = subprocess.run(
        [
            *(str(BROWSER), "--headless", "--no-sandbox", "--disable-gpu"),
            *("--disable-dev-shm-usage", "--host-resolver-rules=MAP * ~NOTFOUND"),
            *(f"--user-data-dir={folder / 'profile'}", "--dump-dom", address),
        ],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    (shown,) = re.findall(r'<div id="text">(.*?)</div>', done.stdout, re.S)
    reader = Reader()
    reader.feed(shown)
    assert reader.text[""] == shown_text(2)
    assert shown.count("<mark") == 2
    assert shown.count('class="edge"') == 1
    options = re.findall(r"<option>(.*?)</option>", done.stdout)
    assert len(options) == N + H + I
    assert f"2 (entropy {MAPS.entropy_NH[WHOLE][0, 1]:.2f} nats" in done.stdout
