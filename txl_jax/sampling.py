"""Samples of a trained model as text: what they follow, where they end, how they read.

The paper's protocol (Appendix E) is a context of at most 512 tokens from the test set,
then 500 or 1,000 tokens, each among the 40 likeliest.

Dims: T tokens.
"""

import dataclasses
import functools
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from txl_jax import generate
from txl_jax.data.detokenization import check_detokenizes, detokenize
from txl_jax.data.spelling import spell
from txl_jax.data.vocab import Vocab
from txl_jax.errors import UserError
from txl_jax.generate import GenerateConfig
from txl_jax.report.writer import json_lines, say
from txl_jax.restore import Loaded

STREAMS = 32  # samples drawn side by side; more come after them
UNSURE = 4  # characters, that a byte to come may change

Show = Callable[[str], object]
# Of a split's name, its tokens.
Split = Callable[[str], np.ndarray]


class Sample(NamedTuple):
    """A prompt and what the model made of it."""

    prompt: str
    text: str  # prompt and continuation
    seed: int
    token_texts: list[str]  # of the continuation
    token_nlls: list[float]  # in nats, as the model has them

    def describe(self, step: int, scores: bool) -> dict[str, Any]:
        """Returns the sample for JSON, each token's score with `scores` alone."""
        found = self._asdict() | {
            "step": step,
            "tokens": len(self.token_nlls),
            "nll": float(np.mean(self.token_nlls)) if self.token_nlls else None,
        }
        hidden = () if scores else ("token_texts", "token_nlls")
        return {name: value for name, value in found.items() if name not in hidden}


class Growing:
    """A sample while it is drawn: it ends with its stop_token or before its stop."""

    def __init__(self, vocab: Vocab, prompt_T: np.ndarray, how: GenerateConfig) -> None:
        self.vocab = vocab
        self.how = how
        self.tokens: list[int] = prompt_T.tolist()
        self.nlls: list[float] = []
        self.prompt = self.text = vocab.decode(prompt_T)
        self.ended = False

    def add(self, tokens_T: np.ndarray, nll_T: np.ndarray) -> None:
        """Takes more tokens, but none after the end."""
        if self.ended:
            return
        for token, nll in zip(tokens_T.tolist(), nll_T.tolist(), strict=True):
            self.tokens.append(token)
            self.nlls.append(nll)
            if token == self.how.stop_token:
                self.ended = True
                break
        self.text = self.vocab.decode(self.tokens)
        stop = self.how.stop
        end = self.text.find(stop, len(self.prompt)) if stop else -1
        if end >= 0:
            self.text = self.text[:end]
            self.ended = True

    def settled(self) -> str:
        """Returns what no token to come can change: no half characters, or stops."""
        if self.ended:
            return self.text
        return self.text[: len(self.text) - max(len(self.how.stop), UNSURE)]

    def finish(self, seed: int, write: Callable[[str], str]) -> Sample:
        """Returns the sample, as `write` writes it."""
        before = len(self.tokens) - len(self.nlls)
        texts = spell(self.vocab.decode, np.array(self.tokens), before=before)
        lengths = np.cumsum([0, *map(len, texts)])[:-1]
        # Those of the stop and after it are in no text.
        count = int(np.sum(lengths < max(len(self.text) - len(self.prompt), 1)))
        count = count if self.how.stop and self.ended else len(texts)
        return Sample(
            self.prompt, write(self.text), seed, texts[:count], self.nlls[:count]
        )


def read_prompts(loaded: Loaded, split: Split) -> list[np.ndarray]:
    """Returns the tokens that each sample follows, without the warm-up."""
    how, vocab = loaded.config.generate, loaded.vocab
    if how.context_tokens:
        name = loaded.config.eval.split
        return [
            _context(split(name), how, name, how.seed + n) for n in range(how.samples)
        ]
    prompts = [how.prompt]
    if how.prompt_file:
        given = _read(how.prompt_file, "generate.prompt_file")
        # Not splitlines: a prompt may hold one of Unicode's other line ends.
        lines = (line.removesuffix("\r") for line in given.split("\n"))
        prompts = [line for line in lines if line]
        if not prompts:
            raise UserError(
                f"generate.prompt_file = {how.prompt_file!r} has no prompts: write one "
                "on each line"
            )
    field = "generate.prompt_file" if how.prompt_file else "generate.prompt"
    encoded = [_encode(vocab, prompt, field) for prompt in prompts]
    return [prompt_T for prompt_T in encoded for _ in range(how.samples)]


def _encode(vocab: Vocab, text: str, field: str) -> np.ndarray:
    """Returns the tokens of a text; raises UserError, with the field it came from."""
    try:
        return vocab.encode(text)
    except UserError as error:
        raise UserError(f"{field}: {error}") from error


def _context(
    tokens: np.ndarray, how: GenerateConfig, split: str, seed: int
) -> np.ndarray:
    """Returns context_tokens of a split, from context_at on or from where chance is."""
    at, last = how.context_at, len(tokens) - how.context_tokens
    if at > last or last < 0:
        raise UserError(
            f"generate.context_tokens = {how.context_tokens} from context_at = "
            f"{how.context_at} on are not in the {split} split, which has "
            f"{len(tokens)} tokens: lower them"
        )
    if at < 0:
        at = int(np.random.default_rng(seed).integers(last + 1))
    return np.asarray(tokens[at : at + how.context_tokens])


def _read(path: str, field: str) -> str:
    """Returns what is in a file, or on stdin for "-"."""
    try:
        if path == "-":
            return sys.stdin.buffer.read().decode("utf-8")
        return Path(path).expanduser().read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8"
        raise UserError(
            f"{field} = {path!r} cannot be read ({reason}): give a text file"
        ) from error


def sample(
    loaded: Loaded, split: Split, show: Show = lambda text: None
) -> list[Sample]:
    """Returns the samples that config.generate asks for, showing them as they come.

    One alone is shown while it grows, with `detokenize` line by line.
    """
    how, vocab = loaded.config.generate, loaded.vocab
    corpus = loaded.config.data.corpus
    write: Callable[[str], str] = str
    if how.detokenize:
        check_detokenizes(corpus, vocab.kind)
        write = functools.partial(detokenize, corpus=corpus)
    warmup = how.warmup
    if warmup.startswith("@"):
        warmup = _read(warmup[1:], "generate.warmup")
    warm_T = _encode(vocab, warmup, "generate.warmup")
    prompts = read_prompts(loaded, split)
    longest = max(map(len, prompts)) + len(warm_T)
    if not how.mem_len and longest > how.ext_len + 1:
        say(f"the prompt has {longest} tokens: the newest {how.ext_len + 1} count")
    found: list[Sample] = []
    with json_lines(how.output, "generate.output") as put:
        for begin in range(0, len(prompts), STREAMS):
            group = prompts[begin : begin + STREAMS]
            seed = (how.seed + begin) % 2**32
            grown = _grow(loaded, dataclasses.replace(how, seed=seed), warm_T, group)
            if len(prompts) == 1:
                samples = [_stream(next(grown), grown, seed, write, show)]
            else:
                *_, last = grown
                samples = [
                    each.finish((seed + n) % 2**32, write)
                    for n, each in enumerate(last)
                ]
            for each in samples:
                found.append(each)
                put(each.describe(loaded.step, scores=True))
                if len(prompts) > 1:
                    head = f"=== sample {len(found)} of {len(prompts)}"
                    show(f"{head}, seed {each.seed}\n{each.text}\n")
    return found


def _grow(
    loaded: Loaded,
    how: GenerateConfig,
    warm_T: np.ndarray,
    prompts: list[np.ndarray],
) -> Iterator[list[Growing]]:
    """Yields the same samples again and again, each time grown, until all ended."""
    growing = [Growing(loaded.vocab, prompt_T, how) for prompt_T in prompts]
    if not all(map(len, prompts)):
        raise UserError("generate.prompt has no tokens: give it something to follow")
    yield growing
    for drawn in generate.stream(
        loaded.config.model,
        loaded.params,
        [np.concatenate([warm_T, prompt_T]) for prompt_T in prompts],
        how,
        len(loaded.vocab),
    ):
        for each, tokens_T, nll_T in zip(growing, *drawn, strict=True):
            each.add(tokens_T, nll_T)
        yield growing
        if all(each.ended for each in growing):
            return


def _stream(
    growing: list[Growing],
    grown: Iterator[list[Growing]],
    seed: int,
    write: Callable[[str], str],
    show: Show,
) -> Sample:
    """Returns the one sample, shown as it grows."""
    (only,) = growing
    shown = 0
    for _ in grown:
        text = only.settled()
        if write is not str:  # a line is written the same whatever follows it
            text = write(text[: text.rfind("\n") + 1])
        show(text[shown:])
        shown = max(shown, len(text))
    done = only.finish(seed, write)
    show(done.text[shown:] + "\n")
    return done


def run(loaded: Loaded, split: Split, show: Show) -> dict[str, Any]:
    """Samples, and returns what `--mode=generate` prints."""
    how = loaded.config.generate
    started = time.perf_counter()
    samples = sample(loaded, split, show)
    return {
        "step": loaded.step,
        **dataclasses.asdict(how),
        "text": samples[0].text,
        "sampled": [each.describe(loaded.step, how.scores) for each in samples],
        "seconds": time.perf_counter() - started,
    }
