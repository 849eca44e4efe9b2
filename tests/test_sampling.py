"""Samples as text: their prompts, seeds, ends, scores and how they are shown.

Dims: T tokens of prompt and continuation.
"""

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests import tiny
from txl_jax import sampling
from txl_jax.config import Config
from txl_jax.data.recipe import DataConfig
from txl_jax.data.word import WordVocab
from txl_jax.errors import UserError
from txl_jax.evaluate.perplexity import EvalConfig
from txl_jax.generate import GenerateConfig
from txl_jax.model.memory import Memory
from txl_jax.model.txl import TransformerXL
from txl_jax.restore import Loaded
from txl_jax.sampling import Growing, Sample

pytestmark = pytest.mark.usefixtures("quick_compiler")

PARAMS = tiny.make_params()
WORDS = ["<eos>", "<unk>", "the", "cat", "dog", ",", ".", "@-@", "n't", "is", "=", "a"]
VOCAB = WordVocab(WORDS)
SPLIT_T = tiny.make_tokens(1, 40)[0]
HOW = {"num_tokens": 9, "mem_len": 8, "stream_every": 4, "prompt": "the cat"}


def loaded(**fields: Any) -> Loaded:
    """Returns a tiny model of words, asked for samples."""
    given: Any = {**HOW, **fields}
    config = Config(
        model=tiny.CONFIG,
        generate=GenerateConfig(**given),
        data=DataConfig(corpus="wikitext2"),
        eval=EvalConfig(split="test"),
    )
    mesh: Any = None  # nothing here is spread over devices
    return Loaded(TransformerXL(tiny.CONFIG), PARAMS, VOCAB, config, 7, mesh)


def split(name: str) -> np.ndarray:
    assert name == "test"
    return SPLIT_T


def draw(show: sampling.Show = lambda text: None, **fields: Any) -> list[Sample]:
    return sampling.sample(loaded(**fields), split, show)


@pytest.fixture(scope="module")
def several(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Sample], Path]:
    """Returns two samples of each of two prompts, with scores, and their file."""
    folder = tmp_path_factory.mktemp("samples")
    (folder / "prompts").write_text("the cat\n\na dog is a\n")
    output = folder / "out.jsonl"
    fields: dict[str, Any] = {
        "prompt_file": str(folder / "prompts"),
        "samples": 2,
        "seed": 5,
    }
    return draw(**fields, output=str(output)), output


def test_each_line_is_a_prompt_and_each_sample_has_its_seed(
    several: tuple[list[Sample], Path],
) -> None:
    samples, _ = several
    assert [each.prompt for each in samples] == ["the cat"] * 2 + ["a dog is a"] * 2
    assert [each.seed for each in samples] == [5, 6, 7, 8]
    assert len({each.text for each in samples}) == 4
    for each in samples:
        assert each.text.startswith(each.prompt)
        assert len(each.token_nlls) == len(each.token_texts) == 9
        assert each.text == each.prompt + "".join(each.token_texts)


def test_a_sample_alone_is_the_one_among_several(
    several: tuple[list[Sample], Path],
) -> None:
    samples, _ = several
    (alone,) = draw(seed=8, prompt="a dog is a")
    assert alone.text == samples[3].text
    np.testing.assert_allclose(alone.token_nlls, samples[3].token_nlls, rtol=1e-4)


def test_scores_are_the_model_s_own(several: tuple[list[Sample], Path]) -> None:
    """Before top_k: the model reads its own sample and finds the same."""
    sample = several[0][2]
    config = tiny.config(mem_len=8)
    tokens_T = VOCAB.encode(sample.text).astype(np.int32)
    memory, nlls = Memory.empty(config, 1), []
    for token, target in zip(tokens_T, tokens_T[1:], strict=False):
        log_probs, memory = tiny.apply(
            config, PARAMS, np.full((1, 1), token), memory, method="logits"
        )
        nlls.append(-float(log_probs[0, 0, target]))
    np.testing.assert_allclose(sample.token_nlls, nlls[-9:], rtol=1e-4)


def test_the_file_has_a_line_for_each_sample(
    several: tuple[list[Sample], Path],
) -> None:
    samples, output = several
    lines = [json.loads(line) for line in output.read_text().splitlines()]
    for line, each in zip(lines, samples, strict=True):
        assert line == each._asdict() | {
            "step": 7,
            "tokens": 9,
            "nll": pytest.approx(np.mean(each.token_nlls)),
        }
    short = samples[0].describe(7, scores=False)
    assert set(lines[0]) - set(short) == {"token_texts", "token_nlls"}


def test_a_warm_up_is_read_and_not_shown(tmp_path: Path) -> None:
    warm = "a dog is a cat .\n"
    (whole,) = draw(prompt=f"{warm}the cat")
    (tmp_path / "warm").write_text(warm)
    (warmed,) = draw(warmup=f"@{tmp_path / 'warm'}")
    assert warmed.prompt == "the cat"
    assert warmed.text == whole.text.removeprefix(warm)
    np.testing.assert_allclose(warmed.token_nlls, whole.token_nlls, rtol=1e-4)


def test_a_context_comes_from_the_split() -> None:
    """Each sample draws its own by its own seed, so it can be drawn again alone."""
    asked = loaded(context_tokens=5, samples=3, seed=2)
    contexts = [prompt_T.tolist() for prompt_T in sampling.read_prompts(asked, split)]
    text = SPLIT_T.tolist()
    assert all(
        context in [text[at : at + 5] for at in range(36)] for context in contexts
    )
    assert len(set(map(str, contexts))) == 3
    last = sampling.read_prompts(loaded(context_tokens=5, seed=4), split)
    assert last[0].tolist() == contexts[2]
    fixed = loaded(context_tokens=5, context_at=35, samples=2)
    for prompt_T in sampling.read_prompts(fixed, split):
        assert prompt_T.tolist() == text[35:]
    for at in (-1, 36):
        tokens = 5 if at > 0 else 41
        with pytest.raises(UserError, match="not in the test split, which has 40"):
            beyond = loaded(context_tokens=tokens, context_at=at)
            sampling.read_prompts(beyond, split)


def test_prompts_come_from_stdin(monkeypatch: pytest.MonkeyPatch) -> None:
    for given, expected in ((b"the dog\r\n", ["the dog"]), (b"\n", [])):
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(given)))
        asked = loaded(prompt_file="-")
        if expected:
            prompts = sampling.read_prompts(asked, split)
            assert [VOCAB.decode(each) for each in prompts] == expected
        else:
            with pytest.raises(UserError, match="has no prompts"):
                sampling.read_prompts(asked, split)


def test_what_is_shown_is_the_text() -> None:
    shown: list[str] = []
    (only,) = draw(shown.append, detokenize=True, num_tokens=30, top_k=0)
    assert "".join(shown) == only.text + "\n"
    assert len([part for part in shown if part]) > 1, "it was shown as it grew"
    assert " ," not in only.text and " ." not in only.text


def test_a_sample_ends_before_its_stop() -> None:
    def grow(prompt: str, **fields: Any) -> Growing:
        growing = Growing(VOCAB, VOCAB.encode(prompt), GenerateConfig(**fields))
        for part in ("dog . a", "cat . is", "a a"):
            tokens_T = VOCAB.encode(part)
            growing.add(tokens_T, np.arange(len(tokens_T)) + 1.0)
        return growing

    stopped = grow("the .", stop=" .").finish(3, str)
    assert stopped == Sample("the .", "the . dog", 3, [" dog"], [1.0])
    across = grow("the", stop="a cat").finish(3, str)
    assert across.text == "the dog . "
    assert across.token_texts == [" dog", " .", " a"]
    token = grow("the .", stop_token=WORDS.index("cat")).finish(3, str)
    assert token.text == "the . dog . a cat"
    assert token.token_nlls == [1.0, 2.0, 3.0, 1.0]
    settled = grow("the", stop="is it").settled()
    assert settled == "the dog . a cat . i", "all but what may become the stop"


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"prompt_file": "x", "context_tokens": 3}, "leave one of them out"),
        ({"context_at": 3}, "say how long it is with generate.context_tokens"),
        ({"samples": 0}, "generate.samples = 0 must be at least 1"),
        ({"prompt_file": "nowhere"}, "generate.prompt_file = 'nowhere' cannot be read"),
        ({"warmup": "@nowhere"}, "generate.warmup = 'nowhere' cannot be read"),
        ({"output": "no/where"}, "generate.output = 'no/where' cannot be written"),
    ],
    ids=str,
)
def test_mistakes_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        draw(**fields)


def test_text_that_was_not_cut_into_words_is_not_joined() -> None:
    asked = loaded(detokenize=True)
    other = asked.config.__class__(
        model=tiny.CONFIG,
        generate=asked.config.generate,
        data=DataConfig(corpus="stdlib"),
    )
    with pytest.raises(UserError, match="generate.detokenize is for the words of"):
        sampling.sample(asked._replace(config=other), split)
