"""The attention page is a single file, escapes any text, and works in a browser.

Dims: N layers, H heads, I targets shown, R distances, L places in a segment.
"""

import base64
import html
import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.processes import LIMIT_SECONDS
from txl_jax.paper import attention_page
from txl_jax.paper.attention_page import WHOLE, Maps

N, H, I, R, L = 2, 3, 4, 10, 8  # noqa: E741
FIRST = 30  # the first target's index in the split
SYMBOLS = ("a ", "b ", "</script><b>", "é&amp;", "\n", "c ")


def make_maps(terms: str = "abcd", N: int = N, H: int = H) -> Maps:
    rng = np.random.default_rng(0)

    def rows(*shape: int) -> np.ndarray:
        return rng.dirichlet(np.full(R, 0.3), shape).astype(np.float32)

    return Maps(
        {name: rows(N, H) for name in (WHOLE, *terms)},
        rng.uniform(0, 2, (N, H)),
        rng.uniform(0, 1, (N, H, L)),
        rows(N, H, I),
        FIRST + np.array([0, 5, 10, 15]),
        2 * L,
    )


def decode(tokens: Any, final: bool = True) -> str:
    return "".join(SYMBOLS[token] for token in np.asarray(tokens).tolist())


TOKENS = np.random.default_rng(1).integers(0, len(SYMBOLS), 60)
MAPS = make_maps()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("page")
    files = attention_page.write_page(MAPS, TOKENS, decode, path, "Attention of <x>")
    assert {path / name for name in files.values()} == {*path.iterdir()}
    assert len(files) == 5
    return path


@pytest.fixture(scope="module")
def page(folder: Path) -> str:
    return (folder / "attention.html").read_text("utf-8")


def element(page: str, name: str) -> str:
    """Returns the content of the element with an id."""
    pattern = rf'<(div|script)[^>]* id="{name}">(.*?)</\1>'
    ((_, content),) = re.findall(pattern, page, re.S)
    return content


def plain(markup: str) -> str:
    return html.unescape(re.sub(r"<[^>]*>", "", markup))


def shown_text(i: int) -> str:
    """Returns the text visible to target i."""
    at = int(MAPS.shown_I[i])
    return decode(TOKENS[at - R + 1 : at + 1]).replace("\n", "⏎\n")


def test_the_page_is_self_contained_and_escapes_its_text(page: str) -> None:
    references = re.findall(r'(?:src|href|action)="([^"]*)"', page)
    assert len(references) == 3
    for reference in references:
        kind, _, data = reference.partition(",")
        assert kind == "data:image/png;base64"
        assert base64.b64decode(data).startswith(b"\x89PNG")
    assert "default-src 'none'" in page
    assert not re.search(r"https?://|@import|url\(", page)
    assert "</script><b>" in shown_text(0)
    words = json.loads(element(page, "data"))["words"]
    text = decode(TOKENS[FIRST - R + 1 : FIRST + 2 * L + 1])
    assert "".join(words) == text.replace("\n", "⏎\n")
    assert "<title>Attention of &lt;x&gt;</title>" in page


def test_the_page_encodes_every_head_and_target(folder: Path, page: str) -> None:
    data = json.loads(element(page, "data"))
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
    assert data["at"] == [R - 1, R + 4, R + 9, R + 14] and data["place"] == [0, 5, 2, 7]
    with np.load(folder / "attention.npz") as arrays:
        np.testing.assert_array_equal(arrays["mean_NHR_d"], MAPS.mean_NHR["d"])
        np.testing.assert_array_equal(arrays["shown_NHIR"], MAPS.shown_NHIR)


NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
BROWSER = os.environ.get("TXL_JAX_CHROMIUM") or next(
    filter(None, map(shutil.which, NAMES)), None
)


@pytest.mark.skipif(
    not BROWSER, reason=f"no browser: none of {', '.join(NAMES)}, no TXL_JAX_CHROMIUM"
)
def test_a_browser_shows_the_selected_head_and_target(folder: Path) -> None:
    address = f"{(folder / 'attention.html').as_uri()}#layer=1&head=2&target=3"
    flags = "--headless --no-sandbox --disable-gpu --disable-dev-shm-usage --dump-dom"
    offline = "--host-resolver-rules=MAP * ~NOTFOUND"
    profile = f"--user-data-dir={folder / 'profile'}"
    command = [str(BROWSER), *flags.split(), offline, profile, address]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=LIMIT_SECONDS, check=True
    )
    shown = element(done.stdout, "text")
    assert plain(shown) == shown_text(2) and shown.count("<mark") == 2
    assert shown.count('class="edge"') == 1
    options = re.findall(r"<option>(.*?)</option>", done.stdout)
    assert len(options) == N + H + I
    assert f"2 (entropy {MAPS.entropy_NH[0, 1]:.2f} nats" in done.stdout
