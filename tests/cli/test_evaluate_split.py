"""The loss per byte and per word is the same under every vocabulary."""

import math
from pathlib import Path

import pytest

from txl_jax.cli.evaluate_split import per_unit
from txl_jax.data.options import DataConfig
from txl_jax.data.tokens import prepare

LINES = "the cat sat\non the mat  \n\n a naïve cat\n"  # 9 words on 4 lines


@pytest.mark.parametrize("kind", ["byte", "char", "word", "subword"])
def test_word_perplexity_is_right_for_every_vocabulary(
    kind: str, tmp_path: Path
) -> None:
    folder = tmp_path / "text"
    folder.mkdir()
    for split in ("train", "valid", "test"):
        (folder / f"{split}.txt").write_text(LINES, "utf-8")
    size = 260 if kind == "subword" else 0
    config = DataConfig("text", str(folder), str(tmp_path), kind, vocab_size=size)
    tokens = prepare(config)
    count = len(tokens.split("test"))
    # 13 nats in all, of which the first token, which is not scored, has its share.
    nll = 13 / count
    scores = per_unit(tokens, "test", {"nll": nll, "tokens": count - 1})
    assert scores["word_ppl"] == pytest.approx(math.e)
    assert scores["bare_word_ppl"] == pytest.approx(math.exp(13 / 9))
    bits = 13 / math.log(2)
    assert scores["bits_per_byte"] == pytest.approx(bits / len(LINES.encode()))
    if kind == "word":
        assert scores["word_ppl"] == pytest.approx(math.exp(nll))
