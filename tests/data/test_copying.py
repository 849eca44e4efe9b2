"""The copying task's text: what copies what, over which distance, and how it is cut."""

import hashlib
import re
from pathlib import Path

import numpy as np
import pytest

from txl_jax.cli.plan import make_streams
from txl_jax.config import Config
from txl_jax.data import copying, corpora
from txl_jax.data.byte_ranges import blocks
from txl_jax.data.copying import FIRST_ANSWER, Task
from txl_jax.data.options import DataConfig
from txl_jax.data.streams import Position
from txl_jax.update.options import TrainConfig

CORPUS = "copying:12,5,4"
TASK = Task.parse(CORPUS)
DISTANCE = 17  # of a pattern and its delay
VALID = "862c02c312d5758b"  # how the SHA-256 of its valid split begins
EPISODE = re.compile(rb"([0-9]{0,5})([A-D]{5})([0-9]{12})>([a-d]{5})")


def test_an_answer_repeats_the_pattern_at_the_stated_distance() -> None:
    text, valid = TASK.text("test"), TASK.text("valid")
    assert hashlib.sha256(valid).hexdigest().startswith(VALID) and text != valid
    assert copying.SIZES["test"] <= len(text) < copying.SIZES["test"] + 28
    result = EPISODE.findall(text)
    assert b"".join(map(b"%b%b%b>%b".__mod__, result)) == text
    assert all(pattern.lower() == answer for _, pattern, _, answer in result)
    # The token read before a letter of the answer is DISTANCE after that letter.
    codes = np.frombuffer(text, np.uint8)
    (at,) = np.nonzero(codes >= FIRST_ANSWER)
    assert (codes[at - 1 - DISTANCE] == codes[at] - 32).all()
    shares = np.bincount(codes[at] - FIRST_ANSWER) / len(at)
    np.testing.assert_allclose(shares, 0.25, atol=0.02)
    gaps = np.bincount([len(before) for before, *_ in result]) / len(result)
    np.testing.assert_allclose(gaps, 1 / 6, atol=0.03)


def test_only_answers_are_scored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copying, "SIZES", dict.fromkeys(copying.SIZES, 3000))
    source = corpora.find(CORPUS)
    assert source.config == "copying-12-5-4-0"
    for split, ranges in source.split(tmp_path).items():
        assert b"".join(blocks(ranges, 999)) == TASK.text(split)
    text = np.frombuffer(TASK.text("test")[:600], np.uint8)
    train = TrainConfig(batch_size=4, tgt_len=16, segments_per_call=8)
    config = Config(data=DataConfig(corpus=CORPUS), train=train)
    streams = make_streams(config, text, slice(None))
    segment, _ = streams.batch(Position())
    scored = segment.weights_SBL == 1
    assert 0 < scored.sum() < scored.size / 2
    real = np.arange(16) < segment.length_SB[..., None]
    np.testing.assert_array_equal(scored, real & (segment.targets_SBL >= FIRST_ANSWER))
