"""The mode `train`: trains a run, then evaluates its best checkpoint."""

import contextlib
import dataclasses
import functools
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jax.sharding import Mesh

from txl_jax import metrics
from txl_jax.cli import dynamic, evaluate, generate
from txl_jax.cli.steps import training_step
from txl_jax.config import Config
from txl_jax.data.copying import FIRST_ANSWER
from txl_jax.data.preparation import prepare
from txl_jax.data.sentences import ShuffledSentences
from txl_jax.data.streams import Order, Streams, in_file_order
from txl_jax.data.tokens import Tokens
from txl_jax.evaluate import accounting
from txl_jax.evaluate.perplexity import make_evaluate
from txl_jax.generate import texts
from txl_jax.generate.options import generation_model
from txl_jax.paper import baselines
from txl_jax.report import plots, tensorboard, wandb
from txl_jax.report.log import last_step, read_metrics, say, to_json
from txl_jax.report.progress import compile_step
from txl_jax.runtime import distributed, storage
from txl_jax.runtime.storage import write_atomically
from txl_jax.sharding.mesh import make_mesh
from txl_jax.sharding.rules import check_streams, host_rows
from txl_jax.train import NO_HOOKS, Hooks, train
from txl_jax.update.bad_numbers import Diagnosis
from txl_jax.update.init import abstract_params
from txl_jax.update.step import make_program
from txl_jax.workdir import claim
from txl_jax.workdir.fit import fit_mesh, fit_vocab, warn_of_rotations
from txl_jax.workdir.folder import METRICS, RESULT
from txl_jax.workdir.load import initial_data, load, load_initial
from txl_jax.workdir.lock import Fence, locked, unfenced
from txl_jax.workdir.staging import writing


class Trained(NamedTuple):
    """A run that has reached its last update, and still owns its workdir."""

    tokens: Tokens
    result: dict[str, Any]  # of `train`
    log: wandb.Log  # takes further numbers
    fence: Fence


def train_and_evaluate(config: Config, workdir: Path) -> dict[str, Any]:
    """Trains up to train.num_steps, and returns the scores of the best checkpoint."""
    with trained(config, workdir) as run:
        return evaluate_best(config, workdir, run)


@contextlib.contextmanager
def trained(config: Config, workdir: Path) -> Iterator[Trained]:
    """Trains, and owns the workdir until the `with` block ends.

    An invalid run raises UserError before anything is written to the workdir.
    """
    wandb.check_installed(config.run.wandb)
    claim.check_trainable(workdir, config)
    tokens = prepare(initial_data(config, workdir))
    distributed.require_equal({"the corpus": tokens.manifest["splits"]})
    fitted = fit_vocab(config, tokens.vocab)
    check_fit(fitted, tokens)
    initial = load_initial(fitted, workdir, tokens.vocab)
    with contextlib.ExitStack() as stack:
        fence = stack.enter_context(locked(workdir))
        start = distributed.first_then_others(
            lambda: claim.claim(workdir, config, tokens)
        )
        run = config.run.wandb, workdir, start, dataclasses.asdict(config)
        log = stack.enter_context(wandb.logging(*run))
        started = time.perf_counter()
        splits = tokens.split("train"), tokens.split("valid")
        sizes = fitted.model, config.train.batch_size, config.train.tgt_len
        say(accounting.describe(*sizes))
        warn_of_rotations(fitted)
        if (rise := config.optim.warmup_steps) > (end := config.train.num_steps):
            say(f"the run ends at update {end} of optim.warmup_steps = {rise}")
        finished = last_step(workdir / METRICS) >= config.train.num_steps
        try:
            hooks = Hooks(logged=[log])
            training = train_on(fitted, workdir, *splits, initial, hooks, fence)
        finally:
            goodput = {} if finished else claim.record_goodput(workdir, fence)
        training |= goodput
        training["train_seconds"] = time.perf_counter() - started
        training["train_memory"] = accounting.account(*sizes)
        yield Trained(tokens, training, log, fence)


def train_on(
    config: Config,
    workdir: Path,
    train_tokens: np.ndarray,
    valid_tokens: np.ndarray,
    params: Any = None,
    observers: Hooks = NO_HOOKS,
    fence: Fence = unfenced,
) -> dict[str, Any]:
    """Trains; returns the number of updates and the steps whose save failed.

    Raises BadNumbers if train.max_bad_steps updates in a row are skipped.
    """
    mesh = make_mesh(config.mesh)
    rows = host_rows(mesh, config.train.batch_size, "train.batch_size")
    evaluate_split = make_evaluate(config.model, config.eval, mesh)

    def mean_nll(params: Any, progress: Callable[[int, int], None]) -> float:
        return evaluate_split(params, valid_tokens, progress)["nll"]

    program = make_program(config.model, config.train, config.optim, mesh)

    compile = functools.partial(compile_step, "the training step", program.step)
    program = program._replace(compile=compile)
    read_batch = make_streams(config, train_tokens, rows).batch
    diagnosis = Diagnosis(config.model, config.train)
    hooks = dataclasses.replace(
        observers,
        fetched=[diagnosis.fetched, *observers.fetched],
        boundary=[diagnosis.ends, *observers.boundary],
        saved=[*observers.saved, diagnosis.raise_if_found],  # which may raise
    )
    return train(config, workdir, program, read_batch, mean_nll, params, hooks, fence)


def make_streams(
    config: Config, tokens: np.ndarray, rows: slice | np.ndarray
) -> Streams:
    """Returns the streams `rows` of the training text; copying scores only answers."""
    train = config.train
    order: Order = in_file_order
    if train.sentence_end >= 0:
        order = ShuffledSentences(tokens, train.sentence_end, train.seed)
    copying = config.data.corpus.startswith("copying:")
    return Streams(
        tokens,
        train.batch_size,
        train.tgt_len,
        train.segments_per_call,
        rows=rows,
        ext_len=train.ext_len,
        reset_memory_at=int(train.reset_memory_at),
        roll=train.order == "roll",
        varlen=train.varlen,
        half_loss=train.half_loss,
        score_ids_from=FIRST_ANSWER if copying else 0,
        seed=train.seed,
        order=order,
    )


def check_fit(config: Config, tokens: Tokens) -> None:
    """Raises UserError if ids, splits, mesh, kernel or prompt do not fit the config."""
    mesh = fit_mesh(config)
    dynamic.check_processes(config.eval)
    check_memory(config, mesh)
    host_rows(mesh, config.train.batch_size, "train.batch_size")
    host_rows(mesh, config.eval.streams, "eval.streams")
    make_streams(config, tokens.split("train"), slice(None))
    for split in ("valid", config.eval.split):
        text = config.eval.cut(tokens.split(split))
        Streams(text, config.eval.streams, config.eval.tgt_len)
    if config.model.kernel not in ("auto", "xla"):  # it may not support this step
        parts = config.train.batch_size // config.train.batch_chunk
        check_streams(mesh, parts, "train.batch_size / batch_chunk")
        step, *args = training_step(config, mesh)
        step.trace(*args)
    if config.generate.prompt != "@-":  # stdin can be read once
        generate.find_prompts(config, tokens.vocab, tokens)


def check_memory(config: Config, mesh: Mesh) -> None:
    """Raises UserError if the parameters or a memory or segment are too large."""
    model, train = config.model, config.train
    parameters = metrics.parameter_count(abstract_params(model))
    numbers = 2 if config.optim.optimizer == "sgd" else 4
    accounting.check_parameters(parameters, mesh.shape["data"], numbers)
    accounting.check_cache(model, config.eval)
    sizes = model, train.batch_size, train.ext_len + train.tgt_len
    counts = train.segments_per_call, train.batch_chunk
    accounting.check_fits(*sizes, accounting.TRAIN_FIELDS, *counts)
    accounting.check_fits(*evaluate.sizes(config), accounting.EVAL_FIELDS)
    generator = generation_model(model, config.generate)
    samples = min(config.generate.samples, texts.STREAMS)
    accounting.check_fits(generator, samples, 1, accounting.GENERATE_FIELDS)


def evaluate_best(config: Config, workdir: Path, run: Trained) -> dict[str, Any]:
    """Returns the scores of the best checkpoint and the results of the training.

    Writes them to result.json, with a plot and a sample. Raises UserError if another
    run has taken the workdir over.
    """
    tokens = run.tokens
    loaded = load(workdir, config)
    result = evaluate.evaluate(loaded, tokens, workdir) | {
        "workdir": str(workdir),
        **run.result,
    }
    scores = {f"{config.eval.split}/{x}": result[x] for x in ("nll", "ppl", "bpc")}
    run.log(loaded.step, scores)
    sample = generate.draw(loaded, tokens)[0].text
    with distributed.together(), contextlib.suppress(*storage.errors()):
        run.fence()  # again in `writing`, which keeps the result if gs:// fails
    if not distributed.is_first():
        return result
    baselines_bpc = {}
    if config.eval.baselines and tokens.vocab.kind == "byte":
        text = tokens.split(config.eval.split)
        baselines_bpc = baselines.measure(tokens.split("train"), text)
        result["baselines_bpc"] = baselines_bpc
    say(f"a sample:\n{sample}\n")
    ranking = {"this model": result["bpc"], **baselines_bpc}
    for name, bits in sorted(ranking.items(), key=lambda row: row[1]):
        say(f"{name:>12}: {bits:.3f} bits per token on {config.eval.split}")
    result["picture"] = str(workdir / "loss.png")
    result["sample"] = str(workdir / "sample.txt")
    with writing(workdir, result, run.fence) as folder:
        lines = read_metrics(workdir / METRICS)
        plots.plot_loss(lines, folder / "loss.png", baselines_bpc)
        (folder / "sample.txt").write_text(sample, "utf-8")
        tensorboard.write_result(workdir, folder, loaded.step, scores, sample)
        body = to_json(result, indent=2) + "\n"
        write_atomically(folder / RESULT, lambda path: path.write_text(body, "utf-8"))
    return result
