"""Samples of a trained model as text, with their prompts and scores.

In the paper's protocol (Appendix E) the context is at most 512 tokens of the test set,
followed by 500 or 1,000 sampled tokens, each among the 40 likeliest.

Dims: T tokens.
"""

import dataclasses
import functools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from txl_jax.data.detokenization import check_detokenizes, detokenize
from txl_jax.data.spelling import spell
from txl_jax.data.vocab import Vocab
from txl_jax.errors import UserError
from txl_jax.generate import sampler
from txl_jax.generate.options import GenerateConfig
from txl_jax.model.config import ModelConfig
from txl_jax.report.log import say

STREAMS = 32  # samples drawn in parallel
UNSURE = 4  # characters at the end of a text that the next byte may change

Show = Callable[[str], object]
Write = Callable[[str], str]


class Sample(NamedTuple):
    """A prompt and its continuation."""

    prompt: str
    text: str  # prompt and continuation
    seed: int
    token_texts: list[str]  # of the continuation
    token_nlls: list[float]  # in nats, by the model's own distribution

    def describe(self, step: int, scores: bool) -> dict[str, Any]:
        """Returns the sample as JSON; scores: include the nll of every token."""
        fields = self._asdict() | {
            "step": step,
            "tokens": len(self.token_nlls),
            "nll": float(np.mean(self.token_nlls)) if self.token_nlls else None,
        }
        hidden = () if scores else ("token_texts", "token_nlls")
        return {name: value for name, value in fields.items() if name not in hidden}


class Growing:
    """A sample being drawn; it ends after stop_token or before `stop`."""

    def __init__(
        self, vocab: Vocab, prompt_T: np.ndarray, config: GenerateConfig
    ) -> None:
        self.vocab = vocab
        self.config = config
        self.tokens: list[int] = prompt_T.tolist()
        self.nlls: list[float] = []
        self.prompt = self.text = vocab.decode(prompt_T)
        self.ended = False

    def add(self, tokens_T: np.ndarray, nll_T: np.ndarray) -> None:
        """Appends tokens until the sample ends."""
        if self.ended:
            return
        for token, nll in zip(tokens_T.tolist(), nll_T.tolist(), strict=True):
            self.tokens.append(token)
            self.nlls.append(nll)
            if token == self.config.stop_token:
                self.ended = True
                break
        self.text = self.vocab.decode(self.tokens)
        stop = self.config.stop
        end = self.text.find(stop, len(self.prompt)) if stop else -1
        if end >= 0:
            self.text = self.text[:end]
            self.ended = True

    def settled(self) -> str:
        """Returns the text that later tokens cannot change or cut off."""
        if self.ended:
            return self.text
        return self.text[: len(self.text) - max(len(self.config.stop), UNSURE)]

    def finish(self, seed: int, write: Write) -> Sample:
        """Returns the complete sample, with its text formatted by `write`."""
        before = len(self.tokens) - len(self.nlls)
        texts = spell(self.vocab.decode, np.array(self.tokens), before=before)
        lengths = np.cumsum([0, *map(len, texts)])[:-1]
        # The tokens of `stop` are not part of the text.
        count = int(np.sum(lengths < max(len(self.text) - len(self.prompt), 1)))
        count = count if self.config.stop and self.ended else len(texts)
        return Sample(
            self.prompt, write(self.text), seed, texts[:count], self.nlls[:count]
        )


def read_prompts(config: GenerateConfig, vocab: Vocab) -> list[np.ndarray]:
    """Returns the prompt of each sample, without the warm-up."""
    field, prompts = "generate.prompt", [config.prompt]
    if config.prompt.startswith("@"):
        text = _read(config.prompt[1:], field)
        # Not splitlines: a prompt may contain other Unicode line separators.
        lines = (line.removesuffix("\r") for line in text.split("\n"))
        prompts = [line for line in lines if line]
        if not prompts:
            raise UserError(
                f"{field} = {config.prompt!r} has no prompts: write one per line"
            )
    encoded = [_encode(vocab, prompt, field) for prompt in prompts]
    return [prompt_T for prompt_T in encoded for _ in range(config.samples)]


def draw_contexts(
    config: GenerateConfig, tokens_T: np.ndarray, split: str
) -> list[np.ndarray]:
    """Returns generate.context_tokens tokens of a split for each sample.

    They start at generate.context_at, or at a position drawn with the sample's seed.
    """
    at, last = config.context_at, len(tokens_T) - config.context_tokens
    if at > last or last < 0:
        raise UserError(
            f"generate.context_tokens = {config.context_tokens} from context_at = "
            f"{at} exceed the {split} split, which has {len(tokens_T)} tokens: lower "
            "them"
        )
    seeds = range(config.seed, config.seed + config.samples)
    starts = [
        at if at >= 0 else int(np.random.default_rng(seed).integers(last + 1))
        for seed in seeds
    ]
    return [np.asarray(tokens_T[at : at + config.context_tokens]) for at in starts]


def _encode(vocab: Vocab, text: str, field: str) -> np.ndarray:
    try:
        return vocab.encode(text)
    except UserError as error:
        raise UserError(f"{field}: {error}") from error


def _read(path: str, field: str) -> str:
    """Returns the text of a file, or of stdin for "-"."""
    try:
        if path == "-":
            return sys.stdin.buffer.read().decode("utf-8")
        return Path(path).expanduser().read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8"
        raise UserError(
            f"{field} = {path!r} cannot be read ({reason}): give a text file"
        ) from error


def make_writer(config: GenerateConfig, corpus: str, vocab_kind: str) -> Write:
    """Returns the function that formats a sample's text (generate.detokenize)."""
    if not config.detokenize:
        return str
    check_detokenizes(corpus, vocab_kind)
    return functools.partial(detokenize, corpus=corpus)


def draw(
    model_config: ModelConfig,
    params: Any,
    vocab: Vocab,
    config: GenerateConfig,
    prompts: list[np.ndarray],
    write: Write,
    show: Show,
) -> Iterator[Sample]:
    """Yields a sample for each prompt.

    A single sample is shown while it is drawn, line by line if `write` detokenizes.
    """
    if not all(map(len, prompts)):
        raise UserError("generate.prompt has no tokens: give it something to follow")
    warm_T = _read_warmup(config, vocab)
    longest = max(map(len, prompts)) + len(warm_T)
    if not config.mem_len and longest > config.ext_len + 1:
        say(
            f"the prompt has {longest} tokens: only the newest {config.ext_len + 1} "
            "are used"
        )
    for first in range(0, len(prompts), STREAMS):
        own = prompts[first : first + STREAMS]
        seeds = [(config.seed + first + n) % 2**32 for n in range(len(own))]
        growing = [Growing(vocab, prompt_T, config) for prompt_T in own]
        parts = sampler.stream(
            model_config,
            params,
            [np.concatenate([warm_T, prompt_T]) for prompt_T in own],
            dataclasses.replace(config, seed=seeds[0]),
            len(vocab),
        )
        shown = 0
        for _ in _grow(growing, parts):
            if len(prompts) == 1:
                text = growing[0].settled()
                if write is not str:  # a complete line is final
                    text = write(text[: text.rfind("\n") + 1])
                show(text[shown:])
                shown = max(shown, len(text))
        for each, seed in zip(growing, seeds, strict=True):
            sample = each.finish(seed, write)
            if len(prompts) == 1:
                show(sample.text[shown:] + "\n")
            yield sample


def _read_warmup(config: GenerateConfig, vocab: Vocab) -> np.ndarray:
    field = "generate.warmup"
    is_file = config.warmup.startswith("@")
    text = _read(config.warmup[1:], field) if is_file else config.warmup
    return _encode(vocab, text, field)


def _grow(growing: list[Growing], parts: Iterator[sampler.Drawn]) -> Iterator[None]:
    """Appends each part to the samples until all have ended."""
    for tokens_BT, nll_BT in parts:
        for each, tokens_T, nll_T in zip(growing, tokens_BT, nll_BT, strict=True):
            each.add(tokens_T, nll_T)
        yield
        if all(each.ended for each in growing):
            return
