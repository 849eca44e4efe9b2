"""The mode `train`: trains a run, then evaluates its best checkpoint."""

import contextlib
import dataclasses
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np

from txl_jax.cli import draw_samples, evaluate_split
from txl_jax.config import Config
from txl_jax.data.files import require_apart
from txl_jax.data.streams import check_length
from txl_jax.data.tokens import Tokens, prepare
from txl_jax.evaluate import baselines
from txl_jax.generate.texts import find_prompts
from txl_jax.model.initializers import Params
from txl_jax.report import plots, viewers
from txl_jax.report.log import SendLine, read_metrics, say, to_json
from txl_jax.runtime import distributed, storage
from txl_jax.runtime.storage import Json, write_atomically
from txl_jax.train import TrainingParts, make_parts, step_segments, train
from txl_jax.update.state import parameter_count
from txl_jax.workdir import resolve, run_record
from txl_jax.workdir.folder import METRICS, RESULT
from txl_jax.workdir.load import initial_data, load_fitted, load_initial
from txl_jax.workdir.resolve import NO_TOKENS, TokenIds
from txl_jax.workdir.staging import locked, writing


class PlannedRun(NamedTuple):
    """A run that may start: its config is checked, and its parts are made."""

    saved_config: Config  # parts.config is fitted to the vocabulary
    tokens: Tokens
    parts: TrainingParts
    params: Params | None  # of a fresh run; None = random


@dataclasses.dataclass
class TrainedRun:
    """A run that has reached its last update, and still locks its workdir."""

    tokens: Tokens
    parts: TrainingParts
    result: Json  # the result of `train`
    send_line: SendLine  # sends further numbers to Weights & Biases


def train_and_evaluate(config: Config, workdir: Path, keep_prompt: bool) -> Json:
    """Trains up to train.num_steps, and returns the scores of the best checkpoint."""
    with trained(config, workdir, keep_prompt) as run:
        return evaluate_best(workdir, run)


@contextlib.contextmanager
def trained(
    config: Config, workdir: Path, keep_prompt: bool = False
) -> Iterator[TrainedRun]:
    """Trains, and locks the workdir until the block ends.

    A run that cannot start raises UserError before the first update. keep_prompt: see
    `plan_run`.
    """
    saved, tokens, parts, params = plan_run(config, workdir, keep_prompt)
    with contextlib.ExitStack() as stack:
        with distributed.together():
            stack.enter_context(locked(workdir))
        with distributed.first_before_others():
            count = parameter_count(parts.updater.like.params)
            start = run_record.claim(workdir, saved, tokens, count)
        options = dataclasses.asdict(saved)
        send_line = viewers.open_wandb(config.run.wandb, workdir, start, options)
        if (rise := config.optim.warmup_steps) > config.train.num_steps:
            say(f"lr rises until the last update, because optim.warmup_steps = {rise}")
        started = time.perf_counter()
        result = train(parts, workdir, send_line, params)
        result["train_seconds"] = time.perf_counter() - started
        yield TrainedRun(tokens, parts, result, send_line)


def plan_run(config: Config, workdir: Path, keep_prompt: bool) -> PlannedRun:
    """Returns the plan of a run; writes nothing in the workdir.

    A prompt that the vocabulary lacks is replaced unless keep_prompt. Raises UserError
    if the config does not fit the corpus, the machine or the workdir.
    """
    data = initial_data(config, workdir)
    run_record.check_trainable(workdir, config)
    if config.data.path and not storage.is_remote(workdir):
        require_apart(config.data.path, workdir)
    tokens = prepare(data)
    vocab, split = tokens.vocab, config.eval.split
    # All processes verify the splits in the same order.
    texts = {x: tokens.split(x) for x in dict.fromkeys(("train", "valid", split))}
    distributed.require_equal({"the corpus": tokens.manifest["splits"]})
    if not keep_prompt:
        config = resolve.fit_prompt(config, vocab, texts["train"])
    fitted = resolve.fit_vocab(config, vocab)
    resolve.warn_of_rotations(fitted)
    mesh = resolve.fit_mesh(fitted)
    ids = resolve.find_ids(fitted, vocab)
    for text in (texts["valid"], texts[split]):
        check_length(config.eval.cut(text), config.eval.streams, "eval.streams")
    parts = make_parts(fitted, mesh, texts["train"], texts["valid"], ids)
    updater = parts.updater
    # Kernels for one device refuse some shapes: trace the step now, before anything is
    # written.
    if config.model.kernel not in ("auto", "xla"):
        jax.jit(updater.step).trace(updater.like, step_segments(fitted, mesh))
    if config.generate.prompt != "@-":  # stdin can be read once
        find_prompts(config.generate, vocab, texts[split], split)
    viewers.check_wandb(config.run.wandb)
    params = load_initial(fitted, workdir, vocab, mesh, updater.like.params)
    return PlannedRun(config, tokens, parts, params)


def train_on(
    config: Config,
    workdir: Path,
    train_tokens: np.ndarray,
    valid_tokens: np.ndarray,
    params: Params | None = None,
    send_line: SendLine = lambda step, numbers: None,
    ids: TokenIds = NO_TOKENS,
) -> Json:
    """Trains on given tokens, from `params` or from random parameters if None.

    For programs with their own tokens: the workdir gets neither config.json nor a lock.
    config.model.vocab_size must be set. ids: the tokens that the config names. For
    result and errors see `train.train`.
    """
    run_record.check_trainable(workdir, config)
    mesh = resolve.fit_mesh(config)
    parts = make_parts(config, mesh, train_tokens, valid_tokens, ids)
    return train(parts, workdir, send_line, params)


def evaluate_best(workdir: Path, run: TrainedRun) -> Json:
    """Scores the best checkpoint; writes result.json, a plot and a sample."""
    tokens, config = run.tokens, run.parts.config
    loaded = load_fitted(workdir, config, tokens.vocab, run.parts.mesh)
    plain = run.parts.evaluate
    scored = evaluate_split.evaluate_split(loaded, tokens, workdir, plain=plain)
    result = scored | {"workdir": str(workdir), **run.result}
    scores = {f"{config.eval.split}/{x}": result[x] for x in ("nll", "ppl", "bpc")}
    run.send_line(loaded.step, scores)
    sample = draw_samples.draw_samples(loaded, tokens)[0].text
    if not distributed.is_first():
        return result
    baselines_bpc = {}
    if config.eval.baselines and tokens.vocab.kind == "byte":
        text = tokens.split(config.eval.split)
        baselines_bpc = baselines.measure(tokens.split("train"), text)
        result["baselines_bpc"] = baselines_bpc
    first = textwrap.shorten(sample, 200) if tokens.vocab.kind == "number" else sample
    say(f"a sample:\n{first}\n")
    ranking = {"this model": result["bpc"], **baselines_bpc}
    for name, bits in sorted(ranking.items(), key=lambda row: row[1]):
        say(f"{name:>12}: {bits:.3f} bits/token on {config.eval.split}")
    result["picture"] = str(workdir / "loss.png")
    result["sample"] = str(workdir / "sample.txt")
    with writing(workdir, result) as folder:
        lines = read_metrics(workdir / METRICS)
        plots.plot_loss(lines, folder / "loss.png", baselines_bpc)
        write_atomically(folder / "sample.txt", sample)
        viewers.write_result(workdir, folder, loaded.step, scores, sample)
        write_atomically(folder / RESULT, to_json(result, indent=2) + "\n")
    say(evaluate_split.describe(result))
    return result
