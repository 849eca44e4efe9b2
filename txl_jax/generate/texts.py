"""Samples of a trained model as text, with their prompts and scores.

In the paper's protocol (Appendix E) the context is at most 512 tokens of the test set,
followed by 500 or 1,000 sampled tokens, each among the 40 likeliest.
"""

import math
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from txl_jax.data.files import read_blocks, text_inputs
from txl_jax.data.vocab import CONTEXT, Vocab, report_unknown, spell
from txl_jax.errors import UserError, prefixed
from txl_jax.generate.options import GenerateConfig, generation_model
from txl_jax.generate.sampler import READING, Reading, Sampler
from txl_jax.model.config import ModelConfig
from txl_jax.model.modules import Params
from txl_jax.report.log import say
from txl_jax.report.output import require_other
from txl_jax.runtime.storage import Json

STREAMS = 32  # samples drawn in parallel

Show = Callable[[str], object]


class Sample:
    """A prompt and its continuation, to which `add` appends; it ends before `stop`."""

    def __init__(
        self, vocab: Vocab, prompt_T: np.ndarray, seed: int, stop: str = ""
    ) -> None:
        self.decode, self.seed, self.stop = vocab.decode, seed, stop
        self.tokens: list[int] = prompt_T.tolist()
        self.token_texts: list[str] = []  # the continuation's tokens
        self.token_nlls: list[float] = []  # in nats, in the model's own distribution
        self.prompt = self.decode(self.tokens)
        # Prompt and continuation. The next byte may complete a character.
        self.text = self.decode(self.tokens, False)
        self.prompt_end, self.ended = len(self.text), False

    def add(self, tokens_T: np.ndarray, nll_T: np.ndarray) -> None:
        """Appends tokens, unless the sample has ended."""
        if self.ended:
            return
        known = self.tokens[-CONTEXT:]
        together_T = np.array([*known, *tokens_T])
        new = [*spell(self.decode, together_T, before=len(known))]
        self.tokens += tokens_T.tolist()
        self.token_texts += new
        self.token_nlls += nll_T.tolist()
        self.text += "".join(new)
        end = self.text.find(self.stop, self.prompt_end) if self.stop else -1
        if end >= 0:
            self.text, self.ended = self.text[:end], True
            # Tokens that begin before `stop` remain; it may cut the text of the last.
            starts = np.cumsum([0, *map(len, self.token_texts)])[:-1]
            count = int(np.sum(starts < end - self.prompt_end))
            del self.tokens[len(self.tokens) - len(starts) + count :]
            del self.token_texts[count:], self.token_nlls[count:]

    def settled(self) -> str:
        """Returns the text that later tokens cannot cut off."""
        end = max(len(self.text) - len(self.stop), self.prompt_end)
        return self.text if self.ended else self.text[:end]

    def describe(self, step: int) -> Json:
        """Returns the sample as JSON."""
        return {
            "prompt": self.prompt,
            "text": self.text,
            "seed": self.seed,
            "token_texts": self.token_texts,
            "token_nlls": self.token_nlls,
            "step": step,
            "tokens": len(self.token_nlls),
            "nll": float(np.mean(self.token_nlls)) if self.token_nlls else None,
        }


def read_prompts(config: GenerateConfig, vocab: Vocab) -> list[np.ndarray]:
    """Returns the prompt of each sample, and reports unknown words."""
    field, encoded = "generate.prompt", []
    files: list[Path | None] = []
    prompts = [(field, config.prompt)]
    if config.prompt.startswith("@"):
        files, prompts = text_inputs(config.prompt[1:], field), []
        for file in files:
            name, data = str(file or "stdin"), b"".join(read_blocks(file))
            try:
                lines = data.decode("utf-8").split("\n")  # splitlines would cut more
            except UnicodeDecodeError as error:
                where = f"{name} is not UTF-8 at byte {error.start}"
                raise UserError(f"{where}: convert it to UTF-8") from error
            for number, line in enumerate(lines, 1):
                if line := line.removesuffix("\r"):
                    prompts.append((f"{name}:{number}", line))
    report_unknown(vocab, field, "\n".join(prompt for _, prompt in prompts))
    for name, prompt in prompts:
        with prefixed(name):
            encoded.append(vocab.encode(prompt))
    require_other(config.output, filter(None, files), "generate.output")
    if not encoded or not all(map(len, encoded)):
        raise UserError(
            f"{field} = {config.prompt!r} has no token: give at least one, such as a "
            r"line end, --prompt=$'\n'"
        )
    return [prompt_T for prompt_T in encoded for _ in range(config.samples)]


def find_prompts(
    config: GenerateConfig, vocab: Vocab, text_T: np.ndarray, split: str
) -> list[np.ndarray]:
    """Returns the tokens that each sample continues; text_T: the tokens of a split."""
    if config.context_tokens:
        return draw_contexts(config, text_T, split)
    return read_prompts(config, vocab)


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


def sample_prompts(
    model_config: ModelConfig,
    params: Params,
    vocab: Vocab,
    config: GenerateConfig,
    prompts: list[np.ndarray],
    show: Show,
    reading: Reading = READING,
    every: int = 0,
) -> Iterator[Sample]:
    """Yields a sample for each prompt; a single sample is shown while it is drawn.

    every: tokens of a single sample that are shown together, as in `Sampler`.
    """
    longest, one = max(map(len, prompts)), len(prompts) == 1
    mem_len = generation_model(model_config, config).mem_len
    if not mem_len and longest > reading.window:
        used = f"only the newest {reading.window} are used"
        say(f"the prompt has {longest} tokens: {used}")
    B = math.ceil(len(prompts) / math.ceil(len(prompts) / STREAMS))
    rest = B, longest, len(vocab), reading, every if one else 0
    sampler = Sampler(model_config, params, config, *rest)
    for first in range(0, len(prompts), B):
        samples = [
            Sample(vocab, prompt_T, (config.seed + n) % 2**32, config.stop)
            for n, prompt_T in enumerate(prompts[first : first + B], first)
        ]
        shown = 0
        for drawn in sampler.stream(prompts[first : first + B], config.seed + first):
            for sample, tokens_T, nll_T in zip(samples, *drawn, strict=True):
                sample.add(tokens_T, nll_T)
            if one:
                text = samples[0].settled()
                show(text[shown:])
                shown = max(shown, len(text))
            if all(sample.ended for sample in samples):
                break
        if one:
            show(samples[0].text[shown:] + "\n")
        yield from samples
