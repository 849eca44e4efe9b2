"""The mode `evaluate`: a split's nll, a sweep over a field, or a cold-start curve."""

import dataclasses
import functools
import hashlib
import math
import time
from pathlib import Path

import jax
import numpy as np

from txl_jax import metrics
from txl_jax.checkpoint.manifest import checksums, named_leaves
from txl_jax.data.streams import Streams
from txl_jax.data.tokens import Tokens, prepare
from txl_jax.evaluate import cold_start, continuous_cache
from txl_jax.evaluate.dynamic import Adaptation, root_mean_squares
from txl_jax.evaluate.options import (
    MIXTURE,
    RATES,
    EvalConfig,
    evaluation_model,
    in_order,
    parse_sweep,
)
from txl_jax.evaluate.perplexity import Evaluate, each_segment, make_evaluate
from txl_jax.evaluate.reader import Reader
from txl_jax.model.modules import Params
from txl_jax.report import plots, provenance
from txl_jax.report.log import aligned, say
from txl_jax.report.progress import Progress
from txl_jax.runtime.explain import one_line, storage_errors
from txl_jax.runtime.storage import Json
from txl_jax.sharding.rules import check_streams
from txl_jax.workdir.load import Loaded
from txl_jax.workdir.resolve import warn_of_rotations
from txl_jax.workdir.staging import read_arrays, save_arrays, write_files

STATISTICS = "dynamic.npz"  # r of every parameter, and a key of its inputs
DECIMALS = 2  # the paper's, for perplexities; smaller gains do not count
WIDTH = 12  # characters in the first column of a sweep's table
SCORES = ("nll", "ppl", "bpc", "tokens", "cold_tokens", "seconds")


def evaluate_model(loaded: Loaded, workdir: Path) -> Json:
    """Evaluates a trained model as its `eval` section describes."""
    config = loaded.config
    tokens = prepare(config.data, loaded.vocab, loaded.trained_on)
    if config.eval.cold_start:
        return evaluate_cold_start(loaded, tokens, workdir)
    if config.eval.sweep:
        return evaluate_sweep(loaded, tokens, workdir)
    warn_of_rotations(config)
    result = evaluate_split(loaded, tokens, workdir)
    say(describe(result))
    return result | {"provenance": provenance.describe_result()}


def describe(result: Json) -> str:
    """Returns the main scores of a split as one line, for people."""
    rate = float(f"{result['tokens_per_second']:.2g}")
    return f"{result['split']}: {describe_nll(result)}, {rate:,.0f} tokens/s"


def describe_nll(result: Json) -> str:
    """Returns bits per token, and per byte if that differs, perplexity and tokens."""
    bits = f"{metrics.bits(result['nll']):.2f} bits/token"
    per_byte = result.get("bits_per_byte")  # absent for a part of a split, or numbers
    if per_byte and not bits.startswith(f"{per_byte:.2f} "):
        bits += f", {per_byte:.2f} bits/byte"
    return f"{bits}, perplexity {result['ppl']:,.2f}, {result['tokens']:,} tokens"


def evaluate_sweep(loaded: Loaded, tokens: Tokens, workdir: Path) -> Json:
    """Evaluates at each value of the swept field, including training's."""
    config = loaded.config
    field, values = parse_sweep(config.eval.sweep)
    of_training = config.train if field in ("ext_len", "tgt_len") else config.model
    trained = 0.0 if field in (*RATES, *MIXTURE) else getattr(of_training, field)
    # All configs are checked before the first evaluation.
    configs = {
        value: dataclasses.replace(config, eval=config.eval.swept(field, value))
        for value in in_order(field, [*values, trained])
    }
    warn_of_rotations([*configs.values()][-1])
    rates = field in RATES  # all values share one compiled program
    adaptation = make_adaptation(loaded, tokens, workdir) if rates else None
    rows: list[Json] = []
    say(aligned(field, ("perplexity", "bits/token", "tokens/s"), WIDTH))
    for value, each in configs.items():
        adapted = adaptation and adaptation.at_rates(each.eval)
        scores = evaluate_split(
            loaded._replace(config=each), tokens, workdir, adaptation=adapted
        )
        if rates and value != trained and not math.isfinite(scores["ppl"]):
            say(f"{value:<{WIDTH}}diverges, and is left out of the result")
            continue
        rows.append({field: value, **{name: scores[name] for name in SCORES}})
        rate = f"{scores['tokens_per_second']:,.0f}"
        cells = f"{scores['ppl']:,.2f}", f"{scores['bpc']:.4f}", rate
        say(aligned(str(value), cells, WIDTH))
    result = summarize_sweep(field, rows, trained) | describe_input(loaded, tokens)
    options = describe_options(config.eval)
    result |= {x: options[x] for x in options if x not in (*result, field)}
    say(
        f"{field}: perplexity {result['ppl_init']:.2f} at training's {trained}, best "
        f"{result['ppl_best']:.2f}, reached at {result['shortest']}"
    )
    files = write_files(workdir / f"sweep_{field}", result, plots.plot_sweep)
    return result | files


def summarize_sweep(field: str, rows: list[Json], trained: float) -> Json:
    """Returns the columns of Table 6, and the rows, which are in ascending order.

    ppl_init: at training's value; ppl_best: the lowest; shortest: the smallest value
    whose ppl, rounded, equals ppl_best.
    """
    best = min(row["ppl"] for row in rows)
    reached = round(best, DECIMALS)
    return {
        "sweep": field,
        "init": trained,
        "ppl_init": next(row["ppl"] for row in rows if row[field] == trained),
        "ppl_best": best,
        "shortest": next(
            row[field] for row in rows if round(row["ppl"], DECIMALS) <= reached
        ),
        "rows": rows,
    }


def evaluate_cold_start(loaded: Loaded, tokens: Tokens, workdir: Path) -> Json:
    """Returns the loss since a cold start in bins; the file has the whole curve."""
    config = loaded.config.eval
    warn_of_rotations(loaded.config)
    text, started = tokens.split(config.split), time.perf_counter()
    with Progress("cold starts") as progress:
        nll_T, pieces = cold_start.measure(
            loaded.config.model, config, loaded.params, loaded.mesh, text, progress
        )
    result = cold_start.summarize(nll_T, pieces, config)
    result |= describe_input(loaded, tokens)
    result["seconds"] = time.perf_counter() - started
    say(
        f"{config.split}: {result['settled_bpc']:.2f} bits/token after "
        f"{len(nll_T):,} tokens; a cold start costs {result['cost_nats']:.1f} nats"
    )
    curve = {"nll_by_tokens_read": [round(nll, 6) for nll in nll_T.tolist()]}
    plot = functools.partial(cold_start.plot_cold_start, nll_T)
    return result | write_files(workdir / "cold_start", result | curve, plot)


def make_adaptation(loaded: Loaded, tokens: Tokens, workdir: Path) -> Adaptation:
    """Returns the reader of dynamic evaluation; raises UserError for many streams."""
    config, mesh = loaded.config.eval, loaded.mesh
    check_streams(mesh, config.streams, "eval.streams")
    by_size = config.dynamic == "rms"
    rms = gradient_sizes(loaded, tokens, workdir) if by_size else None
    return Adaptation(loaded.config.model, config, mesh, rms)


def evaluate_split(
    loaded: Loaded,
    tokens: Tokens,
    workdir: Path,
    plain: Evaluate | None = None,
    adaptation: Adaptation | None = None,
) -> Json:
    """Returns the nll of a split.

    plain, adaptation: the results of `make_evaluate` and, with eval.dynamic,
    `make_adaptation`, if they exist already.
    """
    config, split = loaded.config.eval, loaded.config.eval.split
    model, mesh = loaded.config.model, loaded.mesh
    reader: Reader | Adaptation | None = None
    if config.dynamic:
        reader = adaptation or make_adaptation(loaded, tokens, workdir)
    elif config.cache_len:
        reader = continuous_cache.make_reader(model, config, mesh)
    score = None if reader else plain
    score = score or make_evaluate(model, config, mesh, reader, loaded.ids.eval_reset)
    with Progress(split) as progress:
        scores = score(loaded.params, tokens.split(split), progress)
    return {
        "split": split,
        **scores,
        **({} if config.max_tokens else per_unit(tokens, split, scores)),
        **describe_input(loaded, tokens),
        **describe_options(config),
    }


def gradient_sizes(loaded: Loaded, tokens: Tokens, workdir: Path) -> Params:
    """Returns r of every parameter: from the workdir, or else collected and saved."""
    config, path = loaded.config.eval, workdir / STATISTICS
    model = evaluation_model(loaded.config.model, config)
    split = tokens.manifest["splits"]["train"]["sha256"]
    state = checksums(loaded.params), model, config.tgt_len, config.dynamic_segments
    key = hashlib.sha256(repr((*state, loaded.ids.eval_reset, split)).encode())
    saved, names = read_arrays(path), [name for name, _ in named_leaves(loaded.params)]
    if saved.get("key") == key.hexdigest():
        arrays = [saved[name] for name in names]
        rms = jax.tree.unflatten(jax.tree.structure(loaded.params), arrays)
        return jax.device_put(rms, jax.tree.map(lambda x: x.sharding, loaded.params))
    L, text = config.tgt_len, tokens.split("train")
    if config.dynamic_segments:
        text = text[: config.dynamic_segments * L + 1]
    streams = Streams(text, 1, L, reset_memory_at=loaded.ids.eval_reset)
    with Progress("gradients of train") as progress:
        segments = each_segment(streams, progress)
        rms = root_mean_squares(
            loaded.config.model, config, loaded.mesh, loaded.params, segments
        )
    made = {name: np.asarray(x) for name, x in named_leaves(rms)}
    try:
        save_arrays(path, made | {"key": np.array(key.hexdigest())})
        say(f"the statistics of {streams.segments_per_epoch:,} gradients are in {path}")
    except storage_errors() as error:
        say(f"the statistics of gradients are not kept ({one_line(error)})")
    return rms


def describe_input(loaded: Loaded, tokens: Tokens) -> Json:
    """Returns the step of the model, and the text that it is evaluated on."""
    split = loaded.config.eval.split
    return {
        "split": split,
        "step": loaded.step,
        "corpus": tokens.manifest["corpus"],
        "sha256": tokens.manifest["splits"][split]["sha256"],
    }


def describe_options(config: EvalConfig) -> Json:
    """Returns the options, without those of a cache or adaptation that is off."""
    off = {"dynamic": not config.dynamic, "cache": not config.cache_len}
    return {
        name: value
        for name, value in dataclasses.asdict(config).items()
        if not off.get(name.partition("_")[0])
    }


def per_unit(tokens: Tokens, split: str, scores: Json) -> dict[str, float]:
    """Returns the nll of a whole split per byte and per word; {} for numbers.

    Ends of lines count as words in word_ppl, as in WikiText, but not in bare_word_ppl,
    as in PG-19. The first token, which nothing predicts, counts as the mean of others.
    """
    count = tokens.denominators(split)
    if "bytes" not in count:
        return {}
    nats, words = scores["nll"] * count["tokens"], count["words"]
    return {
        "bits_per_byte": metrics.bits(nats / count["bytes"]),
        "bits_per_original_byte": metrics.bits(nats / count["original_bytes"]),
        "word_ppl": metrics.perplexity(nats / (words + count["lines"])),
        "bare_word_ppl": metrics.perplexity(nats / words) if words else math.inf,
    }
