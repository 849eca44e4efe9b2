"""The mode `score`: the nll of the user's own texts, by document, line or token."""

import io
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from txl_jax.cli.evaluate_split import describe_nll
from txl_jax.data import files, number
from txl_jax.data.encode import drops_newlines
from txl_jax.data.number import NumberVocab
from txl_jax.data.text import Meter
from txl_jax.data.vocab import Vocab, report_unknown
from txl_jax.errors import UserError, refuse
from txl_jax.evaluate import score
from txl_jax.evaluate.options import STDIN, ScoreConfig
from txl_jax.evaluate.score import EVAL_FIELDS, Document, Results, describe, split
from txl_jax.report.log import Progress, json_lines, require_other, say, writing
from txl_jax.runtime.storage import Json
from txl_jax.workdir.load import Loaded
from txl_jax.workdir.resolve import warn_of_rotations
from txl_jax.workdir.scoring import ReadTexts, open_reader


def score_texts(loaded: Loaded) -> Json:
    """Scores the texts of the `score` section."""
    config, vocab, options = loaded.config, loaded.vocab, loaded.config.score
    read = open_reader(loaded, *(("nll", "hidden") if options.hidden else ("nll",)))
    texts = find_files(options)
    require_other(options.output, filter(None, texts), "score.output")
    if vocab.kind == NumberVocab.kind:
        documents = read_sequences(options, texts, vocab, config.data.dtype)
    else:
        refuse(config.data.dtype, "data.dtype is for numbers: leave it out")
        drop = drops_newlines(config.data, vocab.kind)
        documents = read_documents(options, texts, vocab, drop)
    warn_of_rotations(config)
    result = score_documents(documents, read, vocab, options)
    lengths = {name: getattr(config.eval, name) for name in EVAL_FIELDS}
    return {**result, "step": loaded.step, **lengths}


def find_files(config: ScoreConfig) -> Sequence[Path | None]:
    """Returns the files of score.path, or [None] for stdin."""
    is_stdin = config.path == STDIN
    return [None] if is_stdin else files.text_files(config.path, "score.path")


def read_documents(
    config: ScoreConfig, texts: Sequence[Path | None], vocab: Vocab, drop: bool
) -> Iterator[Document]:
    """Yields the documents of texts; drop: drop newlines, as the corpus does."""
    for file in texts:
        blocks = files.read_blocks(file) if file else iter([files.read_stdin()])
        name = str(file or "stdin")
        # bytes.splitlines would also end a line at a lone carriage return.
        lines = io.BytesIO(b"".join(blocks)) if config.lines else ()
        for n, text in enumerate(zip(lines) if config.lines else [blocks], 1):
            where, meter = f"{name}:{n}" if config.lines else name, Meter()
            tokens_T = encode(vocab, meter.measure(text, drop), where)
            yield Document(where, tokens_T, meter.original_bytes)


def read_sequences(
    config: ScoreConfig, texts: Sequence[Path | None], vocab: Vocab, dtype: str
) -> Iterator[Document]:
    """Yields files as documents of numbers, without bytes."""
    for file in texts:
        if not file or config.lines:
            raise UserError(
                "score.lines and score.path = '-' are for text: give numbers as a .npy"
            )
        numbers = number.read_numbers(file, dtype)
        yield Document(str(file), encode(vocab, numbers, str(file)), 0)


def encode(vocab: Vocab, blocks: Iterator[bytes], name: str) -> np.ndarray:
    """Returns the tokens of a document's blocks."""
    return np.concatenate([np.zeros(0, vocab.dtype), *vocab.stream(blocks, name)])


def score_documents(
    documents: Iterator[Document], read: ReadTexts, vocab: Vocab, config: ScoreConfig
) -> Json:
    """Returns scores, or totals if score.output has the others as JSON lines."""
    prefix_T = vocab.encode(config.prefix)
    report_unknown(vocab, "score.prefix", config.prefix)
    number, rows, whole, counts = 0, [], np.zeros(5), np.zeros(5)
    hidden: Json = {}
    per = config.per if config.output and not config.hidden else ""
    lines, arrays = ("", config.output) if config.hidden else (config.output, "")
    with (
        json_lines(lines, "score.output") as write,
        writing(arrays, "score.output") as file,
        Progress("score") as bar,
    ):

        def add(results: Results) -> np.ndarray:
            counts[:3] += score.count(results["nll"])
            bar(bar.n + len(results["nll"]))
            return results["nll"]

        documents, again = itertools.tee(documents)
        texts = (document.tokens_T for document in again)
        for document, parts in zip(documents, read(texts, prefix_T), strict=True):
            unknown = np.count_nonzero(document.tokens_T == vocab.unknown)
            counts[:] = 0, 0, 0, document.bytes, unknown
            if config.hidden:
                parts = iter([results := score.join(parts)])
                hidden[f"document_{number}"] = results["hidden"]
            for part in split(per, document, map(add, parts), vocab):
                write(part)
            whole, number = whole + counts, number + 1
            row = {"document": document.name, **describe(counts)}
            if per == "document":
                write(row)
            rows.extend([] if per else [row])
        if config.hidden:
            np.savez(file, **hidden)
    result = describe(whole)
    if not result["scored_tokens"]:
        raise UserError(
            f"score.path = {config.path!r} has no token after another: give more text, "
            r"or a token before it, --prefix=$'\n'"
        )
    word = None  # the vocabulary refuses unknown text
    if vocab.unknown >= 0:
        word = vocab.decode([vocab.unknown]) or str(vocab.unknown)
    if unknown := result["unknown_tokens"]:
        say(f"{unknown} tokens were read as {word!r}, the token of unknown text")
    say(f"{number:,} document{'s' if number > 1 else ''}: {describe_nll(result)}")
    listed = {} if per else {"documents": rows}
    return {**result, "unknown_is": word, **listed, "output": config.output}
