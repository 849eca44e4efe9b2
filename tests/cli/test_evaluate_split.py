"""Losses per byte and per word, and the syntax and results of sweeps."""

import math
from pathlib import Path

import pytest

from txl_jax import config
from txl_jax.cli.evaluate_split import per_unit, summarize_sweep
from txl_jax.data.options import DataConfig
from txl_jax.data.tokens import prepare
from txl_jax.evaluate.options import EvalConfig, parse_sweep
from txl_jax.workdir.resolve import warn_of_rotations

# 9 words on 4 lines of 12, 13, 1 and 14 bytes.
LINES = "the cat sat\non the mat  \n\n a naïve cat\n"
BYTES = 40


@pytest.mark.parametrize("kind", ["byte", "char", "word", "subword"])
def test_word_perplexity_is_right_for_every_vocabulary(
    kind: str, tmp_path: Path
) -> None:
    folder = tmp_path / "text"
    folder.mkdir()
    for split in ("train", "valid", "test"):
        (folder / f"{split}.txt").write_text(LINES, "utf-8")
    size = 260 if kind == "subword" else 0
    data = DataConfig("text", str(folder), str(tmp_path), kind, vocab_size=size)
    tokens = prepare(data)
    count = len(tokens.split("test"))
    # 13 nats in total, including a share for the first token, which is not scored.
    nll = 13 / count
    scores = per_unit(tokens, "test", {"nll": nll, "tokens": count - 1})
    assert scores["word_ppl"] == pytest.approx(math.e)
    assert scores["bare_word_ppl"] == pytest.approx(math.exp(13 / 9))
    bits = 13 / math.log(2)
    assert scores["bits_per_byte"] == pytest.approx(bits / BYTES)
    assert scores["bits_per_original_byte"] == scores["bits_per_byte"]
    if kind == "byte":
        assert scores["bits_per_byte"] == pytest.approx(nll / math.log(2))
    if kind == "word":
        assert scores["word_ppl"] == pytest.approx(math.exp(nll))


@pytest.mark.parametrize(
    "text, values",
    [
        ("mem_len=7,3,7", (3, 7)),
        ("clamp_len=0,400,20", (20, 400, 0)),
        ("same_length=true,false", (False, True)),
        ("cold_start=512", (512,)),
        ("dynamic_lr=3e-2,0,0.01", (0.0, 0.01, 0.03)),
        ("cache_weight=0.1,0.05", (0.05, 0.1)),
    ],
)
def test_sweeps_are_parsed(text: str, values: tuple[int, ...]) -> None:
    assert parse_sweep(text) == (text.partition("=")[0], values)


def test_no_memory_needs_no_same_length() -> None:
    options = EvalConfig(same_length=True)
    assert not options.swept("mem_len", 0).same_length
    longer = options.swept("mem_len", 8)
    assert (longer.same_length, longer.mem_len) == (True, 8)


@pytest.mark.parametrize("section", ["eval", "generate"])
def test_far_rotations(section: str, capsys: pytest.CaptureFixture[str]) -> None:
    quickstart = config.load("quickstart")
    L = quickstart.train.tgt_len
    for position, length in (("rotary", 64), ("rotary", 65), ("alibi", 65)):
        values = {"eval.tgt_len": L, "model.position": position}
        values |= {f"{section}.mem_len": length}
        c = config.with_values(quickstart, values)
        warn_of_rotations(c, section)
        warned = f"of training, {section}.mem_len=64" in capsys.readouterr().err
        assert warned == (position == "rotary" and length > 64)
        warn_of_rotations(c, section, max_keys=64 + L)
        assert not capsys.readouterr().err


PPL = {0: 30.0, 100: 27.02, 200: 26.7749, 300: 26.7712, 400: 26.7701, 500: 26.9}


def test_the_columns_match_table_6() -> None:
    rows = [{"mem_len": at, "ppl": PPL[at]} for at in (0, 100, 200, 400)]
    result = summarize_sweep("mem_len", rows, 100)
    # 26.7712 and 26.7701 are 26.77 in the table, 26.7749 too.
    columns = [result[key] for key in ("init", "ppl_init", "ppl_best", "shortest")]
    assert columns == [100, 27.02, 26.7701, 200] and result["rows"] == rows
