"""Texts of copying and recall: the answers, their distances, and scored tokens."""

import hashlib
import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from experiments.recipes.tasks import main as write_task
from tests.support import tiny
from tests.support.refusal import refused
from txl_jax import config as configs
from txl_jax.config import Config
from txl_jax.data.options import SPLITS, DataConfig
from txl_jax.data.streams import Position
from txl_jax.data.tokens import prepare
from txl_jax.evaluate.options import EvalConfig
from txl_jax.model.config import ModelConfig
from txl_jax.paper import tasks
from txl_jax.paper.tasks import FIRST_ANSWER, Copying, MultiQuery, Recall
from txl_jax.train import make_streams
from txl_jax.update.options import TrainConfig

TASK = Copying(12, 5, 4)
DISTANCE = 17  # length of a pattern and its delay
VALID = "862c02c312d5758b"  # beginning of the SHA-256 of the valid split
RECALLED = "176c187f07ff655a"  # the same for Recall(2, 3, 4)
EPISODE = re.compile(rb"([0-9]{0,5})([A-D]{5})([0-9]{12})>([a-d]{5})")


def test_an_answer_repeats_the_pattern_at_the_stated_distance() -> None:
    text, valid = TASK.text("test"), TASK.text("valid")
    assert hashlib.sha256(valid).hexdigest().startswith(VALID) and text != valid
    assert tasks.SIZES["test"] <= len(text) < tasks.SIZES["test"] + 28
    result = EPISODE.findall(text)
    assert b"".join(map(b"%b%b%b>%b".__mod__, result)) == text
    assert all(pattern.lower() == answer for _, pattern, _, answer in result)
    # The token read before a letter of the answer is DISTANCE after that letter.
    codes = np.frombuffer(text, np.uint8)
    (at,) = np.nonzero(codes >= FIRST_ANSWER)
    assert (codes[at - 1 - DISTANCE] == codes[at] - 32).all()


def test_an_answer_is_the_value_of_the_key_that_precedes_it() -> None:
    """With three pairs and a delay of two; keys are asked for in any order."""
    task, of_two = Recall(2, 3, 4), MultiQuery(2, 3, 4).text("test")
    text, valid = task.text("test"), task.text("valid")
    assert hashlib.sha256(valid).hexdigest().startswith(RECALLED) and text != valid
    assert re.fullmatch(rb"(\d{0,6}([N-Z][A-D]){3}\d\d(>[N-Z][a-d]){3})+", of_two), (
        "keys are no values"
    )
    result = re.findall(
        rb"(\d{0,6})((?:[A-Z][A-D]){3})(\d\d)((?:>[A-Z][a-d]){3})", text
    )
    assert b"".join(map(b"".join, result)) == text
    orders, distances = set[tuple[int, ...]](), set[int]()
    for _, pairs, _, questions in result:
        value = dict(zip(pairs[::2], pairs[1::2].lower(), strict=True))
        asked, answers = questions[1::3], questions[2::3]
        assert len(value) == 3 and answers == bytes(value[key] for key in asked)
        order = tuple(pairs[::2].index(key) for key in asked)
        orders.add(order)
        at = [len(pairs) + 2 + 3 * i + 2 - (2 * j + 1) for i, j in enumerate(order)]
        distances |= set(at)
    assert len(orders) == 6 and max(distances) == task.distance


@pytest.mark.parametrize("task", [TASK, Recall(12, 5, 4)], ids=str)
def test_only_answers_are_trained_on(
    task: Copying, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tasks, "SIZES", dict.fromkeys(SPLITS, 3000))
    data = DataConfig("text", str(task.write(tmp_path)), str(tmp_path))
    corpus = prepare(data)
    for split in SPLITS:
        assert corpus.split(split).tobytes() == task.text(split)
    train = TrainConfig(
        batch_size=4, tgt_len=16, segments_per_call=8, score_from=FIRST_ANSWER
    )
    config = Config(model=ModelConfig(vocab_size=256), data=data, train=train)
    text = corpus.split("test")[:600]
    streams = make_streams(config, text, slice(None))
    segment, _ = streams.batch(Position())
    scored = segment.weights_SBL == 1
    assert 0 < scored.sum() < scored.size / 2
    real = np.arange(16) < segment.length_SB[..., None]
    np.testing.assert_array_equal(scored, real & (segment.targets_SBL >= FIRST_ANSWER))
    with refused("train.score_from = 256 must be below"):
        score_from = replace(train, score_from=256)
        make_streams(replace(config, train=score_from), text, slice(None))


def test_answers_are_counted_in_the_order_of_the_text(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """There are three streams, each of which starts cold."""
    params, text_T = tiny.make_params(), tiny.make_tokens(1, 40)[0]
    options = EvalConfig(streams=3, tgt_len=4, mem_len=64)
    monkeypatch.setattr(tasks, "FIRST_ANSWER", 5)
    counts = tasks.count_answers(tiny.loaded(params, eval=options), text_T)
    is_answer_T = text_T[1:] >= 5
    parts = [text_T[n : n + 14] for n in (0, 13, 26)]
    nll_T = np.concatenate([tiny.cold_nll(tiny.CONFIG, params, x) for x in parts])
    assert counts["answers"] == is_answer_T.sum() and 0 < counts["accuracy"] < 1
    tiny.assert_close(counts["nll_nats"], nll_T[is_answer_T].mean())


def test_a_task_is_written_for_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """experiments/copying.py reads the default task."""
    monkeypatch.setattr(tasks, "SIZES", dict.fromkeys(SPLITS, 3000))
    monkeypatch.chdir(tmp_path)
    assert write_task(["copying"]) == 0
    folder = json.loads(capsys.readouterr().out)["folder"]
    assert folder == configs.load("copying").data.path
    assert Path(folder, "valid.txt").read_bytes() == Copying(24, 8, 8).text("valid")
    assert write_task(["recall", "--length=27"]) == 2
    assert "--length and --symbols are at most 26" in capsys.readouterr().err
