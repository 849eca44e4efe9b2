"""A run from its config to what its best checkpoint is worth.

Dims: none.
"""

import dataclasses
import time
from pathlib import Path
from typing import Any

from txl_jax import (
    aot,
    distributed,
    metrics,
    restore,
    sampling,
    sharding,
    table,
    workdir,
)
from txl_jax.config import Config
from txl_jax.data import tokens as token_files
from txl_jax.data.streams import Streams
from txl_jax.data.tokens import DataConfig, Tokens
from txl_jax.errors import UserError
from txl_jax.evaluate import accounting, ngram
from txl_jax.evaluate.perplexity import evaluation_model, make_evaluate
from txl_jax.evaluate.sliding import make_sliding
from txl_jax.lock import locked
from txl_jax.preemption import stop
from txl_jax.report import plots, tensorboard
from txl_jax.report.writer import Progress, read_metrics, say, to_json
from txl_jax.train import make_streams, train


def learn(config: Config, folder: Path, conclude: table.Conclude) -> dict[str, Any]:
    """Trains, and returns what conclude(config, folder, tokens, done) makes of it."""
    workdir.refuse_imported(folder)
    workdir.refuse_another(folder, config)
    tokens = prepare(config.data)
    fitted = workdir.fit_vocab(config, len(tokens.vocab))
    check_fit(fitted, tokens)
    initial = restore.load_initial(fitted, folder, tokens.vocab)
    with locked(folder):
        distributed.first_then_others(lambda: workdir.claim(folder, config, tokens))
        started = time.perf_counter()
        splits = tokens.split("train"), tokens.split("valid")
        account = fitted.model, config.train.batch_size, config.train.tgt_len
        say(accounting.describe(*account))
        done = train(fitted, folder, *splits, initial)
        done |= {"train_seconds": time.perf_counter() - started}
        done |= {"train_memory": accounting.account(*account)}
        return conclude(config, folder, tokens, done)


def judge(
    config: Config, folder: Path, tokens: Tokens, done: dict[str, Any]
) -> dict[str, Any]:
    """Shows what the best checkpoint is worth, and keeps it in the workdir."""
    loaded = restore.load(folder, config)
    result = evaluate_loaded(loaded, tokens) | {"workdir": str(folder), **done}
    sample = sampling.sample(loaded, tokens.split)[0].text
    if not distributed.is_first():
        return result
    lines = read_metrics(folder / workdir.METRICS)
    levels = {}
    if config.eval.yardsticks and tokens.vocab.kind == "byte":
        levels = ngram.yardsticks(
            tokens.split("train"), tokens.split(config.eval.split)
        )
        result["yardsticks_bpc"] = levels
    result["picture"] = str(folder / "loss.png")
    plots.plot_loss(lines, folder / "loss.png", levels)
    result["sample"] = str(folder / "sample.txt")
    (folder / "sample.txt").write_text(sample, "utf-8")
    if config.run.tensorboard:
        tensorboard.write_sample(folder, loaded.step, sample)
    (folder / "result.json").write_text(to_json(result, indent=2) + "\n", "utf-8")
    say(f"a sample, in {folder / 'sample.txt'}:\n{sample}\n")
    for name, bpc in sorted({"this model": result["bpc"], **levels}.items(), key=_bpc):
        say(f"{name:>12}: {bpc:.3f} bits per token on {config.eval.split}")
    return result


def prepare(config: DataConfig) -> Tokens:
    """Returns the corpus, made by the first process, and on each disk without it."""
    if distributed.is_first():
        stop.holds = False  # a preparation goes on where it ended
    tokens = distributed.first_then_others(lambda: token_files.prepare(config, say))
    stop.release()
    return tokens


def check_fit(config: Config, tokens: Tokens) -> None:
    """Raises UserError for what would stop the run, before any of it is on disk."""
    mesh = workdir.fit_mesh(config)
    train, how = config.train, config.eval
    ids = ("train.reset_memory_at", "train.sentence_end", "eval.reset_memory_at")
    check_tokens(config, len(tokens.vocab), *ids, "generate.stop_token")
    sharding.host_rows(mesh, train.batch_size, "train.batch_size")
    sharding.host_rows(mesh, how.streams, "eval.streams")
    make_streams(train, tokens.split("train"), slice(None))
    for split in ("valid", how.split):
        Streams(how.cut(tokens.split(split)), how.streams, how.tgt_len)
    aot.check_kernel(config, mesh)


def check_tokens(config: Config, vocab_size: int, *fields: str) -> None:
    """Refuses tokens that the vocabulary does not have."""
    for field in fields:
        section, _, name = field.partition(".")
        if (token := getattr(getattr(config, section), name)) >= vocab_size:
            raise UserError(f"{field} = {token} is no token: {vocab_size} exist")


def evaluate_loaded(loaded: restore.Loaded, tokens: Tokens) -> dict[str, Any]:
    """Returns the nll of config.eval.split, and how it was measured."""
    how = loaded.config.eval
    make = make_sliding if how.sliding_window else make_evaluate
    evaluate = make(loaded.config.model, how, loaded.mesh)
    remembered: dict[str, Any] = {}
    if not how.sliding_window:
        model = evaluation_model(loaded.config.model, how)
        say(accounting.describe(model, how.streams, how.tgt_len))
        remembered = {"memory": accounting.account(model, how.streams, how.tgt_len)}
    with Progress(how.split, 0) as bar:

        def progress(done: int, total: int) -> None:
            bar(done, total)
            if stop.at_boundary():
                raise stop.end("while evaluating")

        scores = evaluate(loaded.params, tokens.split(how.split), progress)
    return {
        **dataclasses.asdict(how),
        **scores,
        **({} if how.max_tokens else per_unit(tokens, how.split, scores)),
        **remembered,
        "step": loaded.step,
        "corpus": tokens.manifest["corpus"],
        "sha256": tokens.manifest["splits"][how.split]["sha256"],
    }


def per_unit(tokens: Tokens, split: str, scores: dict[str, Any]) -> dict[str, float]:
    """Returns the same bits of a whole split, shared among what others count.

    Bytes of the stream, bytes of the corpus as it came, and words as a word vocabulary
    would have them.
    """
    count = tokens.denominators(split)
    nats = scores["nll"] * scores["tokens"]
    return {
        "bits_per_byte": metrics.bits(nats / count["bytes"]),
        "bits_per_original_byte": metrics.bits(nats / count["original_bytes"]),
        "word_ppl": metrics.perplexity(nats / count["words"]),
    }


def _bpc(entry: tuple[str, float]) -> float:
    return entry[1]
