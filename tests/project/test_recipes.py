"""The programs in experiments/recipes convert without loss, and report user errors."""

import functools
import importlib
import re
import types
import zlib
from collections import Counter
from collections.abc import Iterable
from itertools import chain
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from experiments.recipes import classification, counts, series
from tests.project.conftest import Start
from tests.support import tiny
from tests.support.refusal import refused
from txl_jax.data.vocab import CharVocab
from txl_jax.evaluate.options import EvalConfig


def test_a_series_is_quantised_to_levels_in_use() -> None:
    numbers = series.quantise(series.solve(2000))
    assert len(numbers) == 2000 and numbers.dtype == np.uint8
    assert 0 < numbers.min() < 40 and 110 < numbers.max() < series.LEVELS - 1
    assert np.abs(np.diff(numbers.astype(int))).max() < 12, "it is smooth"


def test_files_are_compressed_and_restored(tmp_path: Path) -> None:
    compress = importlib.import_module("experiments.recipes.compress")
    text = (b"It is raining, and it has rained. " * 130)[:4000]
    random = np.random.default_rng(0).bytes(301)
    for size, data in enumerate((text, random, bytes(300), b"x", b"")):
        file, out, copy = (tmp_path / f"{name}{size}" for name in ("a", "b", "c"))
        file.write_bytes(data)
        result = compress.convert("encode", file, out, seed=2**32 - 1)
        assert result["compressed_bytes"] == out.stat().st_size
        compress.convert("decode", out, copy, seed=1)
        assert copy.read_bytes() == data
    assert (tmp_path / "b0").stat().st_size < len(text) // 3
    assert (tmp_path / "b2").stat().st_size < (tmp_path / "b4").stat().st_size + 40
    assert (tmp_path / "b4").stat().st_size < 100


def test_counts_alone_compress_too(tmp_path: Path) -> None:
    compress = importlib.import_module("experiments.recipes.compress")
    text = b"It is raining, and it has rained. " * 60
    file, out, copy = (tmp_path / name for name in ("file", "out", "copy"))
    file.write_bytes(text)
    compress.convert("encode", file, out, seed=1, no_model=True)
    assert out.stat().st_size < len(text) // 3
    compress.convert("decode", out, copy, seed=1)
    assert copy.read_bytes() == text


def test_what_cannot_be_decoded_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compress = importlib.import_module("experiments.recipes.compress")
    out, new = tmp_path / "out", tmp_path / "new"
    content = compress.encode(b"text" * 50, seed=1)
    end = 2 + int.from_bytes(content[:2], "little")
    lines = zlib.decompress(content[2:end], wbits=-15).decode().split("\n")

    def decode(content: bytes) -> None:
        out.write_bytes(content)
        compress.convert("decode", out, new, seed=1)

    def forge(head: bytes) -> bytes:
        head = zlib.compress(head, wbits=-15)
        made = len(head).to_bytes(2, "little") + head + content[end:-4]
        return made + zlib.crc32(made).to_bytes(4, "little")

    def change(number: int, value: str) -> bytes:
        return forge("\n".join([*lines[:number], value, *lines[number + 1 :]]).encode())

    flipped = content[:40] + bytes([content[40] ^ 1]) + content[41:]
    forged = change(0, "-1"), change(0, "1" + 18 * "0"), change(1, "x"), forge(b"[]")
    bomb = forge(b" " * 30_000_000)
    for damaged in (content[:-1], flipped, b"", *forged, bomb, forge(b"\xff")):
        with refused("out is damaged"):
            decode(damaged)
    with refused(re.escape("python was 0.1, is now ")):
        decode(change(4, "0.1"))
    with refused("XLA_FLAGS was None, is now"):
        decode(forge("\n".join(lines[:-1]).encode()))
    with refused("the predictions differ from the encoder's"):
        decode(change(3, "0" * 16))
    monkeypatch.setattr(compress.programs, "processor", lambda: "another")
    with refused("processor was .*, is now another"):
        decode(content)
    assert not new.exists()


TEXTS = b"the cat and the rat sat; the cat and the bat\n" * 9, bytes(405)


def predict(texts: Iterable[bytes]) -> tuple[np.ndarray, counts.Counts]:
    """Returns p_TBXV of the bytes after each prefix, and the counts."""
    counted = counts.Counts(2)
    log_p = [counted.predict(np.array(byte_B)) for byte_B in zip(*texts, strict=True)]
    return np.exp(log_p), counted


def test_counts_predict_the_next_byte() -> None:
    p_TBXV, _ = predict(TEXTS)
    np.testing.assert_allclose(p_TBXV.sum(-1), 1, atol=1e-9)
    assert (p_TBXV > 0).all()
    text, t = TEXTS[0], 300
    hit_XT = np.array([p_TBXV[i, 0, :, text[i + 1]] for i in range(t, 404)]).T
    assert (hit_XT[2:].mean(1) > 0.5).all(), "every longer context knows the text"
    assert hit_XT[-1].mean() > 0.95, "and the match"
    assert p_TBXV[t, 1, 6, 0] > 0.99


def test_counts_depend_on_earlier_bytes_only() -> None:
    changed = TEXTS[0][:200] + b"X" + TEXTS[0][201:], TEXTS[1]
    before, after = (predict(texts)[0] for texts in (TEXTS, changed))
    np.testing.assert_array_equal(before[:200], after[:200])
    assert (before[200] != after[200]).any(-1)[0].all()


def test_counts_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(counts, "LIMIT", 50)
    random = np.random.default_rng(0).bytes(800)
    p_TBXV, counted = predict([random[:400], random[400:]])
    assert len(counted.counts) == len(counted.places) == 50
    np.testing.assert_allclose(p_TBXV.sum(-1), 1, atol=1e-9)


@pytest.mark.parametrize(
    "program, flags, line",
    [
        ("figures.reach", "--tgt_len=0", "argument --tgt_len: 0 must be at least 1"),
        ("figures.reach", "--picture=no/y.png", "cannot write to the folder no"),
        ("figures.positions", "--workdir=~/absent", "{tmp}/absent holds no run"),
        ("recipes.series", "draw --samples=absent.npy", "cannot use absent.npy: No su"),
        ("recipes.compress", "encode absent .", "argument out: . exists: choose"),
        ("recipes.classification", "--path=~no.one", "--path='~no.one': no such user"),
        ("rl.ppo", "--workdir=~no.one/x", "path='~no.one/x': no such user"),
    ],
)
def test_errors_are_one_line(
    program: str, flags: str, line: str, tmp_path: Path, capsys: pytest.CaptureFixture,
    monkeypatch: pytest.MonkeyPatch, start: Start,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert start(program, flags) == 2
    stdout, stderr = capsys.readouterr()
    assert not stdout
    line = line.replace("{tmp}", str(tmp_path))
    assert line in stderr.strip().splitlines()[-1] and "Traceback" not in stderr


SIZES: Any = dict(tgt_len=4, mem_len=8)
KINDS: tuple[dict[str, Any], ...] = {}, tiny.FAST


def make_part(vocab: CharVocab) -> classification.Texts:
    """Returns texts of unequal length, each mostly of one of two letters."""
    rng = np.random.default_rng(0)
    tokens = [rng.integers(0, 9, rng.integers(1, 30)) for _ in range(21)]
    class_P = np.arange(21) % 2
    texts = [
        vocab.decode([number] * 5 + [*x])
        for number, x in zip(class_P, tokens, strict=True)
    ]
    return classification.Texts(texts, class_P)


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_fine_tuning_starts_from_the_frozen_features(
    kind: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(classification, "SEGMENT", 4)
    monkeypatch.setattr(classification, "BATCH", 3)
    config = tiny.config(mem_len=8, **kind)
    params, options = tiny.make_params(config), EvalConfig(**SIZES)
    loaded = tiny.loaded(params, model=config, eval=options)
    loaded = loaded._replace(vocab=CharVocab("abcdefghijkl"))
    part = make_part(loaded.vocab)
    features_PX = classification.average(loaded, part)
    rng = np.random.default_rng(1)
    weights_XC, bias_C = rng.normal(size=(2 * tiny.D, 2)), rng.normal(size=2)
    log_PC = jax.nn.log_softmax(features_PX @ weights_XC + bias_C)
    expected = -log_PC[np.arange(21), part.class_P].sum()
    params = {"model": loaded.params, "weights_XC": weights_XC, "bias_C": bias_C}
    measure = jax.jit(
        lambda batch: classification.sum_losses(loaded.model, params, batch, None)
    )
    for random in (None, rng):
        batches = [*classification.make_batches(loaded, part, random)]
        sums = np.sum([measure(batch) for batch in batches], axis=0)
        # A deviation is the root of a difference, in which digits cancel.
        assert sums[0] == pytest.approx(float(expected), rel=1e-3)
        assert sums[1] == (log_PC.argmax(1) == part.class_P).sum()


def test_the_top_layers_learn_the_classes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in {"SEGMENT": 4, "BATCH": 8}.items():
        monkeypatch.setattr(classification, name, value)
    loaded = tiny.loaded(tiny.make_params())._replace(vocab=CharVocab("abcdefghijkl"))
    part = make_part(loaded.vocab)
    # scikit-learn has one row for two classes.
    coef_, intercept_ = np.zeros((1, 2 * tiny.D)), np.zeros(1)
    head = types.SimpleNamespace(coef_=coef_, intercept_=intercept_)
    parts = dict.fromkeys(classification.PARTS, part)
    tune = functools.partial(classification.fine_tune, loaded, head, parts, layers=1)
    result = tune(rate=0.01, seed=1)
    assert result["fine_tuned"] > 0.8 and 2 <= result["best_epoch"] <= 8
    trained = classification.choose_trained({"model": loaded.params, "bias_C": 1}, 1)
    layers = jax.tree.leaves(trained["model"].pop("layers"))
    assert all(each.ravel().tolist() == [0, 1] for each in layers)
    assert not any(jax.tree.leaves(trained.pop("model"))) and trained["bias_C"] == 1


def test_parts_share_neither_files_nor_texts(tmp_path: Path) -> None:
    classes = classification.read_classes("")
    assert set(classes) == set(classification.PACKAGES)
    parts = classification.split(classes, seed=1)
    texts = [text for part in parts.values() for text in part.texts]
    assert len(texts) == len(set(texts)) > 400
    files = [
        {text[: classification.LONGEST] for text in file}
        for x in classes.values()
        for file in x
    ]
    once = {text for text, count in Counter(chain(*files)).items() if count == 1}
    used = [
        {n for n, file in enumerate(files) if file & once & {*part.texts}}
        for part in parts.values()
    ]
    assert all(used) and sum(map(len, used)) == len(set().union(*used))
    for name, count in {"a": 5, "b": 1}.items():
        (tmp_path / name).mkdir()
        for n in range(count):
            (tmp_path / name / f"{n}.txt").write_text(f"{name} {n} " * 100)
    with refused("class b is too small: its train part is empty; give it more texts"):
        classification.split(classification.read_classes(str(tmp_path)), seed=1)
