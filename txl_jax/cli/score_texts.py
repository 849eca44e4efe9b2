"""The mode `score`: the nll of the user's own texts, by document, line or token."""

import collections
import io
import itertools
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from txl_jax import metrics
from txl_jax.cli.evaluate_split import describe_nll
from txl_jax.data import files, number
from txl_jax.data.encode import drops_newlines
from txl_jax.data.number import NumberVocab
from txl_jax.data.text import Meter
from txl_jax.data.vocab import Vocab, report_unknown, spell
from txl_jax.errors import UserError, refuse
from txl_jax.evaluate.options import ScoreConfig
from txl_jax.evaluate.text_reader import EVAL_FIELDS, Results, join
from txl_jax.report.log import say
from txl_jax.report.output import json_lines, open_output, require_other
from txl_jax.report.progress import Progress
from txl_jax.runtime.storage import Json
from txl_jax.workdir.load import Loaded
from txl_jax.workdir.resolve import warn_of_rotations
from txl_jax.workdir.scoring import ReadTexts, open_reader

# Entries of the scores that add up over documents.
SUMS = ("tokens", "scored_tokens", "total_nll_nats", "bytes", "unknown_tokens")


class Document(NamedTuple):
    """A text to score."""

    name: str
    tokens_T: np.ndarray
    bytes: int  # the size of the original text


def score_texts(loaded: Loaded) -> Json:
    """Scores the texts of the `score` section."""
    config, vocab, options = loaded.config, loaded.vocab, loaded.config.score
    read = open_reader(loaded, *(("nll", "hidden") if options.hidden else ("nll",)))
    texts = files.text_inputs(options.path, "score.path")
    require_other(options.output, filter(None, texts), "score.output")
    of_numbers = vocab.kind == NumberVocab.kind
    refuse(
        of_numbers and (options.lines or None in texts),
        "score.lines and score.path = '-' are for text: give numbers as a .npy",
    )
    refuse(
        config.data.dtype and not of_numbers, "data.dtype is for numbers: leave it out"
    )
    drop = not of_numbers and drops_newlines(config.data, vocab.kind)
    documents = read_documents(options, texts, vocab, drop, config.data.dtype)
    warn_of_rotations(config)
    result = score_documents(documents, read, vocab, options)
    lengths = {name: getattr(config.eval, name) for name in EVAL_FIELDS}
    return {**result, "step": loaded.step, **lengths}


def read_documents(
    config: ScoreConfig,
    texts: Sequence[Path | None],
    vocab: Vocab,
    drop_newlines: bool,
    dtype: str = "",
) -> Iterator[Document]:
    """Yields the documents of texts, or of files of numbers of a dtype."""
    for file in texts:
        name = str(file or "stdin")
        if file and vocab.kind == NumberVocab.kind:
            numbers = number.read_numbers(file, dtype)
            yield Document(name, encode_blocks(vocab, numbers, name), 0)
            continue
        blocks = files.read_blocks(file)
        # bytes.splitlines would also end a line at a lone carriage return.
        lines = io.BytesIO(b"".join(blocks)) if config.lines else ()
        for n, text in enumerate(zip(lines) if config.lines else [blocks], 1):
            where, meter = f"{name}:{n}" if config.lines else name, Meter()
            tokens_T = encode_blocks(vocab, meter.measure(text, drop_newlines), where)
            yield Document(where, tokens_T, meter.original_bytes)


def encode_blocks(vocab: Vocab, blocks: Iterator[bytes], name: str) -> np.ndarray:
    """Returns the tokens of a document's blocks."""
    return np.concatenate([np.zeros(0, vocab.dtype), *vocab.stream(blocks, name)])


def score_documents(
    documents: Iterator[Document], read: ReadTexts, vocab: Vocab, config: ScoreConfig
) -> Json:
    """Returns scores, or totals if score.output has the others as JSON lines."""
    prefix_T = vocab.encode(config.prefix)
    report_unknown(vocab, "score.prefix", config.prefix)
    count, rows, whole = 0, [], dict.fromkeys(SUMS, 0)
    hidden: Json = {}
    per = config.per if config.output and not config.hidden else ""
    lines, arrays = ("", config.output) if config.hidden else (config.output, "")
    with (
        json_lines(lines, "score.output") as write,
        open_output(arrays, "score.output") as file,
        Progress("score") as bar,
    ):
        documents, again = itertools.tee(documents)
        texts = (document.tokens_T for document in again)
        for document, parts in zip(documents, read(texts, prefix_T), strict=True):
            if config.hidden:
                parts = iter([results := join(parts)])
                hidden[f"document_{count}"] = results["hidden"]
            sums = dict.fromkeys(SUMS, 0)
            nlls = each_nll(parts, sums, bar)
            for unit in score_units(per, document, nlls, vocab):
                write(unit)
            unknown = int(np.count_nonzero(document.tokens_T == vocab.unknown))
            sums |= {"bytes": document.bytes, "unknown_tokens": unknown}
            row = {"document": document.name, **add_means(sums)}
            if per == "document":
                write(row)
            elif not per:
                rows.append(row)
            whole = {name: whole[name] + sums[name] for name in SUMS}
            count += 1
        if config.hidden:
            np.savez(file, **hidden)
    totals = add_means(whole)
    if not totals["scored_tokens"]:
        raise UserError(
            f"score.path = {config.path!r} has no token after another: give more text, "
            r"or a token before it, --prefix=$'\n'"
        )
    word = None  # the vocabulary refuses unknown text
    if vocab.unknown >= 0:
        word = vocab.decode([vocab.unknown]) or str(vocab.unknown)
    if unknown := totals["unknown_tokens"]:
        say(f"{unknown} tokens were read as {word!r}, the token of unknown text")
    say(f"{count:,} document{'s' if count > 1 else ''}: {describe_nll(totals)}")
    listed = {} if per else {"documents": rows}
    return {**totals, "unknown_is": word, **listed, "output": config.output}


def sum_nll(nll_T: np.ndarray) -> Json:
    """Returns the numbers of tokens and of scored tokens, and their nll."""
    return {
        "tokens": len(nll_T),
        "scored_tokens": int(np.isfinite(nll_T).sum()),
        "total_nll_nats": float(np.nansum(nll_T, dtype=np.float64)),
    }


def add_means(sums: Json) -> Json:
    """Puts means behind the sums: nll and perplexity, and the bits per byte."""
    nats, scored = sums["total_nll_nats"], sums["scored_tokens"]
    scores: Json = {}
    for name, value in sums.items():
        scores[name] = value
        if name == "total_nll_nats":
            scores["nll"] = nats / scored if scored else None
            scores["ppl"] = metrics.perplexity(nats / scored) if scored else None
        if name == "bytes":
            scores["bits_per_byte"] = metrics.bits(nats) / value if value else None
    return scores


def each_nll(parts: Iterable[Results], sums: Json, bar: Progress) -> Iterator[float]:
    """Yields the nll of each token, and adds them to the sums and to the bar."""
    for part in parts:
        nll_T = part["nll"]
        for name, value in sum_nll(nll_T).items():
            sums[name] += value
        bar(bar.n + len(nll_T))
        yield from nll_T.tolist()


def score_units(
    per: str, document: Document, nlls: Iterable[float], vocab: Vocab
) -> Iterator[Json]:
    """Yields the scores of each line or token of a document; reads all nlls."""
    if per not in ("line", "token"):
        collections.deque(nlls, maxlen=0)
        return
    tokens_T = document.tokens_T
    line, words, nlls_of_line = 1, [], []
    texts = spell(vocab.decode, tokens_T)
    for at, (token, text, nll) in enumerate(zip(tokens_T, texts, nlls, strict=True)):
        place = {"document": document.name, "line": line}
        if per == "token":
            scores = {"token": int(token), "text": text, "nll": nll}
            yield {**place, "index": at, **scores}
        words.append(text)
        nlls_of_line.append(nll)
        if "\n" in text or at + 1 == len(tokens_T):
            if per == "line":
                means = add_means(sum_nll(np.array(nlls_of_line)))
                yield {**place, "text": "".join(words), **means}
            line, words, nlls_of_line = line + 1, [], []
