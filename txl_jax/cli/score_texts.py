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
from txl_jax.evaluate.options import STDIN, ScoreConfig
from txl_jax.evaluate.score import EVAL_FIELDS, Document, describe, split
from txl_jax.report.log import Progress, json_lines, require_other, say, writing
from txl_jax.runtime.storage import Json
from txl_jax.workdir.fit import warn_of_rotations
from txl_jax.workdir.load import Loaded
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
        data = b"".join(files.read_blocks(file)) if file else files.read_stdin()
        name = str(file or "stdin")
        # bytes.splitlines would also end a line at a lone carriage return.
        for n, text in enumerate(io.BytesIO(data) if config.lines else [data], 1):
            where = f"{name}:{n}" if config.lines else name
            blocks = Meter().measure([text], drop)
            yield Document(where, encode(vocab, blocks, where), len(text))


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
    """Returns the scores of all documents, and writes score.output."""
    prefix_T = vocab.encode(config.prefix)
    report_unknown(vocab, "score.prefix", config.prefix)
    nlls, rows = [], []
    hidden: Json = {}
    with json_lines(config.output, "score.output") as write, Progress("score") as bar:
        documents, again = itertools.tee(documents)
        texts = (document.tokens_T for document in again)
        for document, results in zip(documents, read(texts, prefix_T), strict=True):
            nll_T = results["nll"]
            unknown = int(np.count_nonzero(document.tokens_T == vocab.unknown))
            row = describe(nll_T, document.bytes, unknown)
            rows.append({"document": document.name, **row})
            nlls.append(nll_T)
            bar(bar.n + len(nll_T))
            if config.hidden:
                hidden[f"document_{len(hidden)}"] = results["hidden"]
            elif config.per == "document":
                write(rows[-1])
            elif config.output:
                for part in split(config.per, document, nll_T, vocab):
                    write(part)
    if config.hidden:
        with writing(config.output, "score.output") as target:
            np.savez(target, **hidden)
    size, unknown = (
        sum(row[name] for row in rows) for name in ("bytes", "unknown_tokens")
    )
    whole = describe(np.concatenate([np.zeros(0), *nlls]), size, unknown)
    if not whole["scored_tokens"]:
        raise UserError(
            f"score.path = {config.path!r} has no token after another: give more text, "
            r"or a token before it, --prefix=$'\n'"
        )
    word = None  # the vocabulary refuses unknown text
    if vocab.unknown >= 0:
        word = vocab.decode([vocab.unknown]) or str(vocab.unknown)
    if unknown:
        say(f"{unknown} tokens were read as {word!r}, the token of unknown text")
    count = f"{len(rows):,} document{'s' if len(rows) > 1 else ''}"
    say(f"{count}: {describe_nll(whole)}")
    return {**whole, "unknown_is": word, "documents": rows}
