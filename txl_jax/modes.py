"""What the command line can do: a function per mode, from flags to a JSON object.

Dims: none.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

from txl_jax import (
    aot,
    distributed,
    pod,
    restore,
    sampling,
    table,
    workdir,
)
from txl_jax.convert import transfer
from txl_jax.data import tokens as token_files
from txl_jax.data.recipe import drops_newlines
from txl_jax.evaluate import (
    attention,
    cold_start,
    group,
    score,
    speed,
    sweep,
)
from txl_jax.flags import Command
from txl_jax.report import page
from txl_jax.report.writer import say
from txl_jax.run import check_tokens, evaluate_loaded, judge, learn, prepare


def load(command: Command) -> restore.Loaded:
    """Returns the workdir's model, and says which of its checkpoints it is."""
    loaded = restore.load(command.workdir, command.config)
    say(f"the model of update {loaded.step} in {command.workdir}")
    return loaded


def run_train(command: Command) -> dict[str, Any]:
    """Trains, then shows what the best checkpoint is worth."""
    return learn(command.config, command.workdir, judge)


def run_prepare(command: Command) -> dict[str, Any]:
    """Makes the token files of the config's corpus, and counts what is in them."""
    return token_files.statistics(prepare(command.config.data))


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
        say(f"open {found['files']['page']} in a browser")
    return found


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


def show(text: str) -> None:
    """Prints text on stdout as it comes."""
    if distributed.is_first():
        print(text, end="", flush=True)


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

# Those that several processes make together, of which the first writes; the others
# take one process.
TOGETHER = {"train", "evaluate", "generate", "prepare", "table"}
