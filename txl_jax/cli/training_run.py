"""A training on given tokens, and the evaluation of a run's best checkpoint."""

import textwrap
from pathlib import Path

import numpy as np

from txl_jax.cli import draw_samples, evaluate_split
from txl_jax.config import Config
from txl_jax.evaluate import baselines
from txl_jax.model.modules import Params
from txl_jax.report import plots, viewers
from txl_jax.report.log import say
from txl_jax.report.metrics_log import SendLine, read_metrics
from txl_jax.report.output import to_json
from txl_jax.runtime import distributed
from txl_jax.runtime.storage import Json, write_atomically
from txl_jax.train import Run
from txl_jax.workdir import run_record
from txl_jax.workdir.folder import METRICS, RESULT
from txl_jax.workdir.load import load_fitted
from txl_jax.workdir.resolve import NO_TOKENS, TokenIds
from txl_jax.workdir.staging import writing


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
    result and errors see `Run.train`.
    """
    run_record.check_trainable(workdir, config)
    run = Run(config, workdir, train_tokens, valid_tokens, ids)
    run.params, run.send_line = params, send_line
    return run.train()


def evaluate_best(run: Run) -> Json:
    """Scores the best checkpoint; writes result.json, a plot and a sample."""
    workdir, tokens, config = run.workdir, run.tokens, run.config
    loaded = load_fitted(workdir, config, tokens.vocab, run.mesh)
    scored = evaluate_split.evaluate_split(loaded, tokens, workdir, plain=run.evaluate)
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
