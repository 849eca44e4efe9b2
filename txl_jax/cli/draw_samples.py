"""The mode `generate`: samples that continue prompts, or contexts from a split."""

import dataclasses
import sys
import time
from collections.abc import Callable

import numpy as np

from txl_jax.data.number import NumberVocab
from txl_jax.data.tokens import Tokens, prepare
from txl_jax.errors import UserError, printable
from txl_jax.generate import texts
from txl_jax.generate.sampler import SHOWN, Reading
from txl_jax.report.log import say
from txl_jax.report.output import json_lines, open_output
from txl_jax.runtime import distributed
from txl_jax.runtime.storage import Json
from txl_jax.workdir.load import Loaded
from txl_jax.workdir.resolve import warn_of_rotations


def generate_samples(loaded: Loaded) -> Json:
    """Draws the samples of the `generate` section and prints them as they grow."""
    config = loaded.config.generate
    started = time.perf_counter()
    # All processes must run the same program.
    every = SHOWN if sys.stdout.isatty() and not distributed.several() else 0
    samples = draw_samples(loaded, show=print_first, every=every)
    settings = dataclasses.asdict(config)
    del settings["prompt" if config.context_tokens else "context_tokens"]  # unused
    sampled = [each.describe(loaded.step) for each in samples]
    if sys.stdout.isatty() and not config.output:  # they would fill several screens
        for each in sampled:
            del each["token_texts"], each["token_nlls"]
    seconds = time.perf_counter() - started
    count, tokens = len(sampled), sum(each["tokens"] for each in sampled)
    say(
        f"{count} sample{'s' if count > 1 else ''}: {tokens:,} tokens in "
        f"{seconds:.1f} s, compilation included"
    )
    return {
        "text": samples[0].text,
        "sampled": sampled,
        "seconds": seconds,
        "step": loaded.step,
        **settings,
    }


def draw_samples(
    loaded: Loaded,
    tokens: Tokens | None = None,
    show: Callable[[str], None] = lambda text: None,
    every: int = 0,
) -> list[texts.Sample]:
    """Returns the samples, and appends each to generate.output when it is complete.

    If generate.output is a .npy, it gets the numbers of all samples at the end.
    `tokens` is the corpus if it is already prepared. `show` gets a single sample piece
    by piece, of `every` tokens, and several samples one after the other.
    """
    config, vocab, options = loaded.config, loaded.vocab, loaded.config.generate
    split = config.eval.split
    if options.context_tokens and tokens is None:
        tokens = prepare(config.data, vocab, loaded.trained_on)
    text_T = tokens.split(split) if tokens else np.zeros(0)
    prompts = texts.find_prompts(options, vocab, text_T, split)
    arrays = options.output.endswith(".npy")
    lengths = range(len(prompts)) if options.stop else {*map(len, prompts)}
    if arrays and (vocab.kind != NumberVocab.kind or len(lengths) > 1):
        raise UserError(
            f"generate.output = {options.output!r} takes samples of numbers of one "
            "length, without generate.stop: write JSON lines to FILE.jsonl"
        )
    longest = max(map(len, prompts)) + options.num_tokens
    warn_of_rotations(config, "generate", longest)
    window = config.eval.ext_len + config.eval.tgt_len
    reading = Reading(window, config.eval.segments_per_step)
    model = config.model, loaded.params, vocab
    drawn = texts.sample_prompts(*model, options, prompts, show, reading, every)
    samples: list[texts.Sample] = []
    lines, numbers = ("", options.output) if arrays else (options.output, "")
    with (
        json_lines(lines, "generate.output") as append,
        open_output(numbers, "generate.output") as file,
    ):
        for sample in drawn:
            samples.append(sample)
            append(sample.describe(loaded.step))
            if len(prompts) > 1:
                head = f"=== sample {len(samples)} of {len(prompts)}"
                show(f"{head}, seed {sample.seed}\n{sample.text}\n")
        if arrays:
            rows = [np.array(sample.tokens, vocab.dtype) for sample in samples]
            np.save(file, rows[0] if len(rows) == 1 else np.stack(rows))
    return samples


def print_first(text: str) -> None:
    """Prints text at once, in the first process; escapes it for a terminal."""
    if distributed.is_first():
        text = printable(text) if sys.stdout.isatty() else text
        print(text, end="", flush=True)
