"""The mode `train`: trains a run, then evaluates its best checkpoint."""

import contextlib
import dataclasses
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from txl_jax.cli import draw_samples, evaluate_split
from txl_jax.cli.plan import Plan, make_training, plan_run
from txl_jax.config import Config, with_values
from txl_jax.data.tokens import Tokens
from txl_jax.evaluate import baselines
from txl_jax.model.initializers import Params
from txl_jax.report import plots, viewers
from txl_jax.report.log import SendLine, read_metrics, say, to_json
from txl_jax.runtime import distributed
from txl_jax.runtime.storage import Json, write_atomically
from txl_jax.train import train
from txl_jax.workdir import claim
from txl_jax.workdir.fit import NO_TOKENS, TokenIds, fit_mesh, warn_of_rotations
from txl_jax.workdir.folder import METRICS, RESULT
from txl_jax.workdir.load import load_fitted
from txl_jax.workdir.staging import locked, writing


@dataclasses.dataclass
class Trained:
    """A run that has reached its last update, and still locks its workdir."""

    plan: Plan
    tokens: Tokens  # those of the plan, for the programs of `paper`
    result: Json  # of `train`
    log: SendLine  # to Weights & Biases; takes further numbers


def train_and_evaluate(config: Config, workdir: Path, keep_prompt: bool) -> Json:
    """Trains up to train.num_steps, and returns the scores of the best checkpoint."""
    with trained(config, workdir, keep_prompt) as run:
        return evaluate_best(workdir, run)


@contextlib.contextmanager
def trained(
    config: Config, workdir: Path, keep_prompt: bool = False
) -> Iterator[Trained]:
    """Trains, and locks the workdir until the block ends.

    A run that cannot start raises UserError before the first update. keep_prompt: see
    `plan_run`.
    """
    viewers.check_wandb(config.run.wandb)
    plan = plan_run(config, workdir, keep_prompt)
    training, options = plan.training, config.train
    prompt = training.config.generate.prompt
    config = with_values(config, {"generate.prompt": prompt})
    with contextlib.ExitStack() as stack:
        with distributed.together():
            stack.enter_context(locked(workdir))
        start = distributed.first_then_others(
            lambda: claim.claim(workdir, config, plan.tokens, training.config.model)
        )
        log = viewers.open_wandb(
            config.run.wandb, workdir, start, dataclasses.asdict(config)
        )
        started = time.perf_counter()
        warn_of_rotations(training.config)
        if (rise := config.optim.warmup_steps) > (end := options.num_steps):
            say(f"the run ends at update {end} of optim.warmup_steps = {rise}")
        result = train(training, workdir, log)
        result["train_seconds"] = time.perf_counter() - started
        yield Trained(plan, plan.tokens, result, log)


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

    For programs with tokens of their own: the workdir gets neither config.json nor a
    lock. config.model.vocab_size is set. ids: of the tokens that the config names.
    For result and errors see `train.train`.
    """
    training, _ = make_training(
        config, fit_mesh(config), train_tokens, valid_tokens, ids
    )
    return train(training._replace(params=params), workdir, send_line)


def evaluate_best(workdir: Path, run: Trained) -> Json:
    """Scores the best checkpoint; writes result.json, a plot and a sample."""
    tokens, training = run.tokens, run.plan.training
    config = training.config
    loaded = load_fitted(workdir, config, tokens.vocab, training.mesh)
    scored = evaluate_split.evaluate_split(
        loaded, tokens, workdir, plain=run.plan.evaluate
    )
    result = scored | {"workdir": str(workdir), **run.result}
    scores = {f"{config.eval.split}/{x}": result[x] for x in ("nll", "ppl", "bpc")}
    run.log(loaded.step, scores)
    sample = draw_samples.draw_samples(loaded, tokens)[0].text
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
    with writing(workdir, result) as folder:
        lines = read_metrics(workdir / METRICS)
        plots.plot_loss(lines, folder / "loss.png", baselines_bpc)
        (folder / "sample.txt").write_text(sample, "utf-8")
        viewers.write_result(workdir, folder, loaded.step, scores, sample)
        body = to_json(result, indent=2) + "\n"
        write_atomically(folder / RESULT, lambda path: path.write_text(body, "utf-8"))
    say(evaluate_split.describe(result))
    return result
