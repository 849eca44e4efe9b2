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

from txl_jax import config as configs
from txl_jax import (
    distributed,
    flags,
    generate,
    metrics,
    pod,
    restore,
    sharding,
    workdir,
)
from txl_jax.config import Config
from txl_jax.convert import transfer
from txl_jax.data import tokens as token_files
from txl_jax.data.streams import Streams
from txl_jax.data.tokens import DataConfig, Tokens
from txl_jax.distributed import RunConfig
from txl_jax.errors import BadNumbers, Interrupted, UserError
from txl_jax.evaluate import group, ngram
from txl_jax.evaluate.perplexity import make_evaluate
from txl_jax.flags import Command
from txl_jax.lock import locked
from txl_jax.preemption import stop
from txl_jax.report import plots
from txl_jax.report.writer import Progress, read_metrics, say, to_json
from txl_jax.train import make_streams, train

HELP = """\
usage: python -m txl_jax.main --config=FILE [--workdir=DIR] [--mode=MODE] [overrides]

modes:
{modes}

flags:
  --config=FILE|NAME  an experiment's file, or the name of a packaged experiment;
                      without it, the config that the workdir's run was started with
  --workdir=DIR       where the run lives (default: runs/NAME)
  --config.S.F=V      field F of the config's section S, which is one of
                      {sections}
  --F=V               field F of the mode's own section, in evaluate, generate, recl
                      and compile, such as --mem_len=1024, --prompt='def ' or
                      --topology=v4:4x4x8; in prepare, of the section data; in import
                      and export of convert, as --format; in train, of the section
                      run, as --profile_steps=10:15
"""


def run_train(command: Command) -> dict[str, Any]:
    """Trains, then shows what the best checkpoint is worth."""
    config, folder = command.config, command.workdir
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
        done = train(fitted, folder, *splits, initial)
        done |= {"train_seconds": time.perf_counter() - started}
        return judge(config, folder, tokens, done)


def judge(
    config: Config, folder: Path, tokens: Tokens, done: dict[str, Any]
) -> dict[str, Any]:
    """Shows what the best checkpoint is worth, and keeps it in the workdir."""
    loaded = restore.load(folder, config)
    result = evaluate_loaded(loaded, tokens) | {"workdir": str(folder), **done}
    sample, _ = sample_loaded(loaded)
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
    for field in (
        "train.reset_memory_at",
        "train.sentence_end",
        "eval.reset_memory_at",
    ):
        section, _, name = field.partition(".")
        if (token := getattr(getattr(config, section), name)) >= len(tokens.vocab):
            raise UserError(f"{field} = {token} is no token: {len(tokens.vocab)} exist")
    sharding.host_rows(mesh, train.batch_size, "train.batch_size")
    sharding.host_rows(mesh, how.streams, "eval.streams")
    make_streams(train, tokens.split("train"), slice(None))
    for split in ("valid", how.split):
        Streams(tokens.split(split), how.streams, how.tgt_len)


def run_evaluate(command: Command) -> dict[str, Any]:
    """Scores a split."""
    loaded = restore.load(command.workdir, command.config)
    return evaluate_loaded(loaded, prepare(loaded.config.data))


def run_generate(command: Command) -> dict[str, Any]:
    """Samples a continuation of a prompt."""
    loaded = restore.load(command.workdir, command.config)
    text, seconds = sample_loaded(loaded, show)
    show("\n")
    how = dataclasses.asdict(loaded.config.generate)
    return {"step": loaded.step, **how, "text": text, "seconds": seconds}


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
    loaded = restore.load(command.workdir, command.config)
    return transfer.export_model(command.config.convert, loaded)


def run_compile(command: Command) -> dict[str, Any]:
    """Compiles the steps for a TPU slice that is not there: memory, bounds on speed."""
    return pod.run(command.config)


def run_recl(command: Command) -> dict[str, Any]:
    """Compares how long a context helps each of several workdirs' models."""
    how, folder = command.config.recl, command.workdir
    return group.run(how, folder, command.overrides, prepare)


def evaluate_loaded(loaded: restore.Loaded, tokens: Tokens) -> dict[str, Any]:
    """Returns the nll of config.eval.split, and how it was measured."""
    how = loaded.config.eval
    evaluate = make_evaluate(loaded.config.model, how, loaded.mesh)
    with Progress(how.split, 0) as bar:

        def progress(done: int, total: int) -> None:
            bar(done, total)
            if stop.at_boundary():
                raise stop.end("while evaluating")

        scores = evaluate(loaded.params, tokens.split(how.split), progress)
    # The same bits, shared among what others count: bytes of the stream, bytes of the
    # corpus as it came, and words as a word vocabulary would have them.
    count = tokens.denominators(how.split)
    nats = scores["nll"] * scores["tokens"]
    return {
        **dataclasses.asdict(how),
        **scores,
        "bits_per_byte": metrics.bits(nats / count["bytes"]),
        "bits_per_original_byte": metrics.bits(nats / count["original_bytes"]),
        "word_ppl": metrics.perplexity(nats / count["words"]),
        "step": loaded.step,
        "corpus": tokens.manifest["corpus"],
        "sha256": tokens.manifest["splits"][how.split]["sha256"],
    }


def sample_loaded(
    loaded: restore.Loaded, show: Callable[[str], object] = lambda text: None
) -> tuple[str, float]:
    """Returns (prompt and continuation, seconds taken), showing the text as it grows.

    The continuation ends before the first generate.stop in it.
    """
    how, vocab = loaded.config.generate, loaded.vocab
    prompt = vocab.encode(how.prompt)
    if not how.mem_len and len(prompt) > how.ext_len + 1:
        say(f"the prompt has {len(prompt)} tokens: the newest {how.ext_len + 1} count")
    started = time.perf_counter()
    tokens, begin, shown = list(prompt), len(vocab.decode(prompt)), 0
    for part_BT in generate.stream(
        loaded.config.model, loaded.params, [prompt], how, len(vocab)
    ):
        tokens += part_BT[0].tolist()
        if how.stop_token in tokens[len(prompt) :]:
            del tokens[tokens.index(how.stop_token, len(prompt)) + 1 :]
        text = vocab.decode(tokens)
        end = text.find(how.stop, begin) if how.stop else -1
        if end >= 0:
            text = text[:end]
        # Of a character or a stop whose rest is to come nothing is shown yet.
        whole = text if end >= 0 else text[: len(text) - max(len(how.stop), 4)]
        show(whole[shown:])
        shown = max(shown, len(whole))
        if end >= 0:
            break
    show(text[shown:])
    return text, time.perf_counter() - started


MODES: dict[str, Callable[[Command], dict[str, Any]]] = {
    "train": run_train,
    "evaluate": run_evaluate,
    "generate": run_generate,
    "prepare": run_prepare,
    "import": run_import,
    "export": run_export,
    "compile": run_compile,
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
        modes = "\n".join(
            f"  {name:<10}{(run.__doc__ or '').strip()}" for name, run in MODES.items()
        )
        print(HELP.format(modes=modes, sections=", ".join(configs.SECTIONS)), end="")
        return 0
    try:
        command = flags.parse(argv, list(MODES))
        with ExitStack() as stack:
            if is_program:
                start(command.config.run)
                stack.push(distributed.fail)
                stack.enter_context(stop.listening())
            result = MODES[command.mode](command)
            distributed.wait_for_all()
    except (UserError, Interrupted, BadNumbers) as error:
        return distributed.say_why(error)
    if distributed.is_first():
        print(to_json({"mode": command.mode, **result}), flush=True)
    return 0


def start(how: RunConfig) -> None:
    """Meets the other processes, before anything computes."""
    if how.compilation_cache:
        jax.config.update("jax_compilation_cache_dir", how.compilation_cache)
    distributed.connect(how.connect_seconds)


if __name__ == "__main__":
    sys.exit(main())
