"""The plan of a training run: checks its config and makes what it needs, once."""

import contextlib
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from txl_jax.aot.lower import abstract_segments
from txl_jax.checkpoint.save_restore import abstract
from txl_jax.cli import draw_samples
from txl_jax.config import Config, with_values
from txl_jax.data.files import require_apart
from txl_jax.data.options import SLACK
from txl_jax.data.streams import OFF, Streams, check_length
from txl_jax.data.tokens import Tokens, prepare
from txl_jax.errors import UserError, refuse
from txl_jax.evaluate.perplexity import Evaluate, make_evaluate
from txl_jax.model.segment import Segment
from txl_jax.report.log import say
from txl_jax.runtime import distributed, storage
from txl_jax.sharding.rules import check_streams, host_rows
from txl_jax.train import Training
from txl_jax.update.state import TrainState, Updater
from txl_jax.update.step import make_updater
from txl_jax.workdir import claim, fit
from txl_jax.workdir.fit import NO_TOKENS, TokenIds
from txl_jax.workdir.load import initial_data, load_initial

LONGEST_PROMPT = 64  # tokens of the corpus


class Plan(NamedTuple):
    """A run that may start: its corpus, what its updates need, and its evaluation."""

    tokens: Tokens
    training: Training
    evaluate: Evaluate  # of any split


def plan_run(config: Config, workdir: Path, keep_prompt: bool) -> Plan:
    """Returns the plan of a run; writes nothing in the workdir.

    A prompt that the vocabulary lacks is replaced unless keep_prompt. Raises UserError
    if the config does not fit the corpus, the machine or the workdir.
    """
    claim.check_trainable(workdir, config)
    if config.data.path and not storage.is_remote(workdir):
        require_apart(config.data.path, workdir)
    tokens = prepare(initial_data(config, workdir))
    distributed.require_equal({"the corpus": tokens.manifest["splits"]})
    if not keep_prompt:
        config = fit_prompt(config, tokens)
    fitted = fit.fit_vocab(config, tokens.vocab)
    ids = fit.find_ids(config, tokens.vocab)
    mesh = fit.fit_mesh(fitted)
    training, evaluate = make_training(
        fitted, mesh, tokens.split("train"), tokens.split("valid"), ids
    )
    for split in dict.fromkeys(("valid", config.eval.split)):  # the same order in all
        text = config.eval.cut(tokens.split(split))
        check_length(text, config.eval.streams, "eval.streams")
    # A split of segments, and kernels for one device, refuse some shapes: trace the
    # step now, before anything is written.
    is_split = mesh.shape["segments"] > 1
    if is_split or config.model.kernel not in ("auto", "xla"):
        state, segments = step_arguments(fitted, mesh, training.updater)
        jax.jit(training.updater.step).trace(state, segments)
    if config.generate.prompt != "@-":  # stdin can be read once
        draw_samples.find_prompts(fitted, tokens.vocab, tokens)
    params = load_initial(fitted, workdir, tokens.vocab, mesh)
    return Plan(tokens, training._replace(params=params), evaluate)


def fit_prompt(config: Config, tokens: Tokens) -> Config:
    """Replaces a prompt that the vocabulary lacks by the first line of the corpus."""
    prompt, vocab = config.generate.prompt, tokens.vocab
    with contextlib.suppress(UserError):
        if prompt.startswith("@") or vocab.encode(prompt) is not None:
            return config
    text = vocab.decode(tokens.split("train")[:LONGEST_PROMPT])
    lines = (x for x in text.splitlines() if x.strip() and x[0] != "@")
    line = next(lines, fit.default_prompt(vocab))
    say(
        f"generate.prompt = {prompt!r} is not in the vocabulary: samples continue the "
        f"first line of the corpus, {line!r}"
    )
    return with_values(config, {"generate.prompt": line})


def step_arguments(
    config: Config, mesh: Mesh, updater: Updater
) -> tuple[TrainState, Segment]:
    """Returns the shapes of the training step's arguments.

    Raises UserError if the streams of a chunk do not divide over the mesh.
    """
    train = config.train
    streams = train.batch_size // train.batch_chunk
    check_streams(mesh, streams, "train.batch_size / batch_chunk")
    state = abstract(jax.eval_shape(updater.init), updater.shardings)
    L = train.ext_len + train.tgt_len + (SLACK if train.varlen else 0)
    S = train.segments_per_update
    S *= train.updates_of_call(config.checkpoint.every_steps)
    return state, abstract_segments(mesh, S, train.batch_size, L)


def make_training(
    config: Config,
    mesh: Mesh,
    train_tokens: np.ndarray,
    valid_tokens: np.ndarray,
    ids: TokenIds,
) -> tuple[Training, Evaluate]:
    """Returns what updates need, without their start, and how to evaluate a split."""
    rows = host_rows(mesh, config.train.batch_size, "train.batch_size")
    evaluate = make_evaluate(
        config.model, config.eval, mesh, reset_memory_at=ids.eval_reset
    )
    training = Training(
        config=config,
        mesh=mesh,
        updater=make_updater(config.model, config.train, config.optim, mesh),
        read_batch=make_streams(config, train_tokens, rows, ids).batch,
        mean_nll=lambda params, show: evaluate(params, valid_tokens, show)["nll"],
    )
    return training, evaluate


def make_streams(
    config: Config,
    tokens: np.ndarray,
    rows: slice | np.ndarray,
    ids: TokenIds = NO_TOKENS,
) -> Streams:
    """Returns the streams `rows` of the training text."""
    train, types = config.train, config.model.vocab_size
    refuse(
        train.score_from >= types,
        f"train.score_from = {train.score_from} must be below the vocabulary's size, "
        f"{types}: no target would be scored",
    )
    refuse(
        train.reset_memory_at and ids.train_reset == OFF,
        f"train.reset_memory_at = {train.reset_memory_at!r} needs the token's id",
    )
    return Streams(
        tokens,
        train.batch_size,
        train.tgt_len,
        rows=rows,
        ext_len=train.ext_len,
        reset_memory_at=ids.train_reset,
        roll=train.order == "roll",
        varlen=train.varlen,
        half_loss=train.half_loss,
        score_from=train.score_from,
        seed=train.seed,
        sentence_end=ids.sentence_end,
        field="train.batch_size",
    )
