"""Samples of a trained model as text, with their prompts and scores.

In the paper's protocol (Appendix E) the context is at most 512 tokens of the test set,
followed by 500 or 1,000 sampled tokens, each among the 40 likeliest.
"""

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
from jax.sharding import Mesh

from txl_jax.data.files import read_blocks, read_stdin, text_files
from txl_jax.data.vocab import CONTEXT, HALF, Vocab, report_unknown, spell
from txl_jax.errors import UserError, prefixed
from txl_jax.generate.options import GenerateConfig
from txl_jax.generate.sampler import Sampler
from txl_jax.model.config import ModelConfig
from txl_jax.model.initializers import Params
from txl_jax.report.log import require_other, say

STREAMS = 32  # samples drawn in parallel

Show = Callable[[str], object]


class Sample(NamedTuple):
    """A prompt and its continuation."""

    prompt: str
    text: str  # prompt and continuation
    seed: int
    token_texts: list[str]  # of the continuation
    token_nlls: list[float]  # in nats, by the model's own distribution

    def describe(self, step: int) -> dict[str, Any]:
        """Returns the sample as JSON."""
        return self._asdict() | {
            "step": step,
            "tokens": len(self.token_nlls),
            "nll": float(np.mean(self.token_nlls)),
        }


class Growing:
    """A sample being drawn; it ends before `stop`."""

    def __init__(
        self, vocab: Vocab, prompt_T: np.ndarray, config: GenerateConfig
    ) -> None:
        self.decode, self.stop = vocab.decode, config.stop
        self.tokens: list[int] = prompt_T.tolist()
        self.token_texts: list[str] = []
        self.nlls: list[float] = []
        self.prompt = self.decode(self.tokens)
        self.text = self.prompt.rstrip(HALF)  # the next byte may complete a character
        self.start, self.ended = len(self.text), False  # where the continuation starts

    def add(self, tokens_T: np.ndarray, nll_T: np.ndarray) -> None:
        """Appends tokens, unless the sample has ended."""
        if self.ended:
            return
        known = self.tokens[-CONTEXT:]
        new = spell(self.decode, np.array([*known, *tokens_T]), before=len(known))
        self.tokens += tokens_T.tolist()
        self.nlls += nll_T.tolist()
        self.token_texts += new
        self.text += "".join(new)
        end = self.text.find(self.stop, self.start) if self.stop else -1
        if end >= 0:
            self.text, self.ended = self.text[:end], True
            # The tokens of `stop` are not part of the text.
            starts = np.cumsum([0, *map(len, self.token_texts)])[:-1]
            count = int(np.sum(starts < max(end - self.start, 1)))
            self.token_texts, self.nlls = self.token_texts[:count], self.nlls[:count]

    def settled(self) -> str:
        """Returns the text that later tokens cannot cut off."""
        return self.text if self.ended else self.text[: len(self.text) - len(self.stop)]

    def finish(self, seed: int) -> Sample:
        """Returns the complete sample."""
        return Sample(self.prompt, self.text, seed, self.token_texts, self.nlls)


def read_prompts(config: GenerateConfig, vocab: Vocab) -> list[np.ndarray]:
    """Returns the prompt of each sample, and reports unknown words."""
    field, prompts = "generate.prompt", [config.prompt]
    if config.prompt.startswith("@"):
        path = config.prompt[1:]
        paths = [] if path == "-" else text_files(path, field)
        require_other(config.output, paths, "generate.output")
        blocks = (block for file in paths for block in read_blocks(file))
        try:
            text = (b"".join(blocks) if paths else read_stdin()).decode("utf-8")
        except UnicodeDecodeError as error:
            raise UserError(f"{field} = {path!r} is not UTF-8: give a text") from error
        # Not splitlines: a prompt may contain other Unicode line separators.
        lines = (line.removesuffix("\r") for line in text.split("\n"))
        prompts = [line for line in lines if line]
    report_unknown(vocab, field, "\n".join(prompts))
    with prefixed(field):
        encoded = [vocab.encode(prompt) for prompt in prompts]
    if not encoded or not all(map(len, encoded)):
        raise UserError(
            f"{field} = {config.prompt!r} has no token: give at least one, such as a "
            r"line end, --prompt=$'\n'"
        )
    return [prompt_T for prompt_T in encoded for _ in range(config.samples)]


def draw_contexts(
    config: GenerateConfig, tokens_T: np.ndarray, split: str
) -> list[np.ndarray]:
    """Returns a context of a split for each sample, whose seed draws its position."""
    last = len(tokens_T) - config.context_tokens
    if last < 0:
        raise UserError(
            f"generate.context_tokens = {config.context_tokens} exceeds the {split} "
            f"split, which has {len(tokens_T)} tokens: lower it"
        )
    seeds = range(config.seed, config.seed + config.samples)
    starts = [int(np.random.default_rng(seed).integers(last + 1)) for seed in seeds]
    return [np.asarray(tokens_T[at : at + config.context_tokens]) for at in starts]


def draw(
    model_config: ModelConfig,
    params: Params,
    vocab: Vocab,
    config: GenerateConfig,
    prompts: list[np.ndarray],
    show: Show,
    window: int = 1,
    segments: int = 1,
    mesh: Mesh | None = None,
) -> Iterator[Sample]:
    """Yields a sample for each prompt; window, segments, mesh: see `Sampler`.

    A single sample is shown while it is drawn.
    """
    longest, one = max(map(len, prompts)), len(prompts) == 1
    remembers = config.mem_len or model_config.memory_tokens
    if not remembers and longest > window:
        say(f"the prompt has {longest} tokens: only the newest {window} are used")
    B = math.ceil(len(prompts) / math.ceil(len(prompts) / STREAMS))
    more = len(vocab), window, segments, mesh
    sampler = Sampler(model_config, params, config, B, longest, *more)
    for first in range(0, len(prompts), B):
        own = prompts[first : first + B]
        growing = [Growing(vocab, prompt_T, config) for prompt_T in own]
        shown = 0
        for tokens_BT, nll_BT in sampler.stream(own, config.seed + first):
            for each, tokens_T, nll_T in zip(growing, tokens_BT, nll_BT, strict=True):
                each.add(tokens_T, nll_T)
            if one:
                text = growing[0].settled()
                show(text[shown:])
                shown = max(shown, len(text))
            if all(each.ended for each in growing):
                break
        if one:
            show(growing[0].text[shown:] + "\n")
        for n, each in enumerate(growing):
            yield each.finish((config.seed + first + n) % 2**32)
