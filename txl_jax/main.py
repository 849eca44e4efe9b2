"""The command line: one function per mode.

    python -m txl_jax.main --config=FILE [--workdir=DIR] [--mode=MODE] [--config.x.y=V]

The last line on stdout is one JSON object; progress and logs go to stderr. Status 0
means that the work is done, 2 that the user can mend what the one line on stderr says,
75 that the same command goes on where this one was interrupted, 76 that training
stopped at bad numbers, of which none is in the checkpoint it leaves (see `errors`). Of
several processes the first writes and prints.
"""

import dataclasses
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import jax
from absl import logging as absl_logging

from txl_jax import (
    aot,
    distributed,
    flags,
    help,
    metrics,
    pod,
    restore,
    sampling,
    sharding,
    table,
    workdir,
)
from txl_jax.config import Config
from txl_jax.convert import transfer
from txl_jax.data import tokens as token_files
from txl_jax.data.recipe import drops_newlines
from txl_jax.data.streams import Streams
from txl_jax.data.tokens import DataConfig, Tokens
from txl_jax.distributed import RunConfig
from txl_jax.errors import BadNumbers, Interrupted, UserError
from txl_jax.evaluate import (
    accounting,
    attention,
    cold_start,
    group,
    ngram,
    score,
    speed,
    sweep,
)
from txl_jax.evaluate.perplexity import evaluation_model, make_evaluate
from txl_jax.evaluate.sliding import make_sliding
from txl_jax.flags import Command
from txl_jax.lock import locked
from txl_jax.preemption import stop
from txl_jax.report import page, plots, tensorboard
from txl_jax.report.writer import Progress, read_metrics, say, to_json
from txl_jax.train import make_streams, train


def run_train(command: Command) -> dict[str, Any]:
    """Trains, then shows what the best checkpoint is worth."""
    return learn(command.config, command.workdir, judge)


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


def run_prepare(command: Command) -> dict[str, Any]:
    """Makes the token files of the config's corpus, and counts what is in them."""
    return token_files.statistics(prepare(command.config.data))


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


def load(command: Command) -> restore.Loaded:
    """Returns the workdir's model, and says which of its checkpoints it is."""
    loaded = restore.load(command.workdir, command.config)
    say(f"the model of update {loaded.step} in {command.workdir}")
    return loaded


def run_evaluate(command: Command) -> dict[str, Any]:
    """Scores a split; also against a swept field, or by tokens since a cold start."""
    loaded = load(command)
    check_tokens(loaded.config, len(loaded.vocab), "eval.reset_memory_at")
    tokens, config = prepare(loaded.config.data), loaded.config
    if config.eval.cold_start:
        text, mesh = tokens.split(config.eval.split), loaded.mesh
        given = config.model, config.eval, mesh, loaded.params
        return cold_start.run(*given, text, command.workdir)
    if not config.eval.sweep:
        return evaluate_loaded(loaded, tokens)
    swept = sweep.parse(config.eval.sweep)
    trained = sweep.trained(config.model, config.train, swept.field)
    # All are checked before the first is evaluated.
    each = {
        value: dataclasses.replace(config, eval=swept.at(config.eval, value))
        for value in swept.including(trained).values
    }
    return sweep.run(
        swept,
        trained,
        command.workdir,
        lambda value: evaluate_loaded(loaded._replace(config=each[value]), tokens),
    )


def run_speed(command: Command) -> dict[str, Any]:
    """Times evaluation with memory against windows that are read anew (Table 9)."""
    config, folder = command.config, command.workdir
    params = None  # fresh ones
    if (folder / workdir.CONFIG).exists():
        loaded = restore.load(folder, config)
        config, params = loaded.config, loaded.params
    else:
        config = aot.find_vocab(config)
    return speed.run(config.model, config.eval, config.speed, params, folder)


def run_generate(command: Command) -> dict[str, Any]:
    """Samples what follows prompts, or a context from the test split."""
    loaded = load(command)
    check_tokens(loaded.config, len(loaded.vocab), "generate.stop_token")
    return sampling.run(
        loaded, lambda name: prepare(loaded.config.data).split(name), show
    )


def run_score(command: Command) -> dict[str, Any]:
    """Scores texts of yours: by document, line or token."""
    loaded = load(command)
    what, vocab = loaded.config.score, loaded.vocab
    drop = drops_newlines(loaded.config.data, vocab.kind)
    how = loaded.config.eval
    read = score.make_score(loaded.config.model, how, loaded.params, bool(what.hidden))
    documents = score.read_documents(what.path, vocab, drop)
    result = score.score_all(documents, read, vocab, what)
    lengths = {name: getattr(how, name) for name in score.LENGTHS}
    return {"step": loaded.step, **lengths, **result}


def run_attention(command: Command) -> dict[str, Any]:
    """Maps where each head looks: pictures, and a page for a browser."""
    loaded = load(command)
    config, what = loaded.config, loaded.config.attention
    tokens = prepare(config.data).split(what.split)
    lengths = config.eval.tgt_len, config.eval.clamp_len
    maps = attention.make_maps(config.model, loaded.params, tokens, what, *lengths)
    found = {"step": loaded.step, "split": what.split, **attention.summarise(maps)}
    if distributed.is_first():
        title = f"Attention of {command.workdir.name}, step {loaded.step}"
        decode, folder = loaded.vocab.decode, command.workdir
        found["files"] = page.write_files(maps, tokens, decode, folder, title)
    return found


def show(text: str) -> None:
    """Prints text on stdout as it comes."""
    if distributed.is_first():
        print(text, end="", flush=True)


def run_import(command: Command) -> dict[str, Any]:
    """Makes a workdir of another code base's model."""
    how = command.config.convert
    return transfer.import_model(how, command.workdir, command.overrides)


def run_export(command: Command) -> dict[str, Any]:
    """Writes the model as another code base's files."""
    loaded = load(command)
    return transfer.export_model(command.config.convert, loaded)


def run_compile(command: Command) -> dict[str, Any]:
    """Compiles the steps for a TPU slice that is not there: memory, bounds on speed."""
    return pod.run(command.config)


def run_table(command: Command) -> dict[str, Any]:
    """Trains and scores the rows of the paper's Table 6, 7 or 10, and compares them."""
    how, folder = command.config.table, command.workdir
    return table.run(how, folder, command.overrides, learn)


def run_recl(command: Command) -> dict[str, Any]:
    """Compares how long a context helps each of several workdirs' models."""
    how, folder = command.config.recl, command.workdir
    return group.run(how, folder, command.overrides, prepare)


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


MODES: dict[str, Callable[[Command], dict[str, Any]]] = {
    "train": run_train,
    "evaluate": run_evaluate,
    "generate": run_generate,
    "score": run_score,
    "attention": run_attention,
    "prepare": run_prepare,
    "import": run_import,
    "export": run_export,
    "compile": run_compile,
    "table": run_table,
    "speed": run_speed,
    "recl": run_recl,
}


def _bpc(entry: tuple[str, float]) -> float:
    return entry[1]


def main(argv: list[str] | None = None) -> int:
    """Runs one mode and returns the exit status.

    As a program, without argv, it also meets other processes and ends on signals; a
    caller in Python keeps its own ways.
    """
    is_program = argv is None
    argv = sys.argv[1:] if argv is None else argv
    absl_logging.set_verbosity(absl_logging.FATAL)  # we tell what fails in orbax
    if {"--help", "--helpfull", "-h"} & set(argv):
        print((help.full if "--helpfull" in argv else help.short)(MODES), end="")
        return 0
    try:
        command = flags.parse(argv, list(MODES))
        if command.print_config:
            print(help.resolved(command), end="")
            return 0
        with ExitStack() as stack:
            if is_program:
                start(command.config.run)
                stack.push(distributed.fail)
                stack.enter_context(stop.listening())
            result = MODES[command.mode](command)
            distributed.wait_for_all()
    except (UserError, Interrupted, BadNumbers) as error:
        return distributed.say_why(error)
    except jax.errors.JaxRuntimeError as error:
        return distributed.say_why(out_of_memory(error))
    if distributed.is_first():
        print(to_json({"mode": command.mode, **result}), flush=True)
    return 0


def out_of_memory(error: jax.errors.JaxRuntimeError) -> UserError:
    """Returns what a device's lack of memory means; raises any other error again."""
    reason = str(error).partition("\n")[0][:200]
    if "RESOURCE_EXHAUSTED" not in reason:
        raise error
    return UserError(
        f"the devices' memory is too small ({reason}): lower train.batch_size or raise "
        "train.batch_chunk, set model.remat, or split the model by mesh.fsdp"
    )


def start(how: RunConfig) -> None:
    """Meets the other processes, before anything computes."""
    if how.compilation_cache:
        jax.config.update("jax_compilation_cache_dir", how.compilation_cache)
    distributed.connect(how.connect_seconds)


if __name__ == "__main__":
    sys.exit(main())
