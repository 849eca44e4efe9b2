"""The last line of each mode on stderr: its main figures, for people."""

from collections.abc import Callable

from txl_jax import metrics
from txl_jax.report.checksum import Json


def _scores(result: Json) -> str:
    """Returns the scores of a split, a sweep or a cold start."""
    if "shortest" in result:
        field = result["sweep"]
        return (
            f"{field}: perplexity {result['ppl_init']:.2f} at training's "
            f"{result['init']}, best {result['ppl_best']:.2f}, reached at "
            f"{result['shortest']}"
        )
    if "settled_bpc" in result:
        return (
            f"{result['split']}: {result['settled_bpc']:.2f} bits per token after "
            f"{result['cold_start']:,} tokens; a cold start costs "
            f"{result['cost_nats']:.1f} nats"
        )
    rate = float(f"{result['tokens_per_second']:.2g}")
    return f"{result['split']}: {_units(result)}, {rate:,.0f} tokens/s"


def _units(result: Json) -> str:
    """Returns bits per byte, or per token, the perplexity and the tokens."""
    count = f"{result['tokens']:,} tokens"
    if result["nll"] is None:  # of texts without a token that has a context
        return count
    bits = f"{metrics.bits(result['nll']):.2f} bits per token"
    if result.get("bits_per_byte") is not None:  # not of a part of a split
        bits = f"{result['bits_per_byte']:.2f} bits per byte"
    return f"{bits}, perplexity {result['ppl']:,.2f}, {count}"


def _samples(result: Json) -> str:
    count, seconds = len(result["sampled"]), result["seconds"]
    tokens = sum(sample["tokens"] for sample in result["sampled"])
    return (
        f"{_counted(count, 'sample')}: {tokens:,} tokens in {seconds:.1f} s, "
        "compilation included"
    )


def _counted(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'s' if count != 1 else ''}"


def _splits(result: Json) -> str:
    if "deleted" in result:
        return f"deleted: {' and '.join(result['deleted']) or 'nothing was prepared'}"
    counts = [f"{name} {x['tokens']:,}" for name, x in result["splits"].items()]
    copies = " and ".join(result["copies"])
    return f"{result['corpus']}: {', '.join(counts)} tokens; copies lie in {copies}"


def _compiled(result: Json) -> str:
    used, total = (result[x] / 2**30 for x in ("hbm_bytes", "hbm_capacity_bytes"))
    fits = "fits" if result["fits"] else "does not fit"
    slices = f"{result['slices']} x {result['topology']}"
    return f"{slices}: training {fits}, {used:.2f} of {total:.2f} GiB per device"


def _lengths(result: Json) -> str:
    cells = [
        f"{member['workdir']} {length}"
        for member in result["members"]
        for length in list(member["recl_tokens"].values())[-1:]
    ]
    ratio = list(result["members"][0]["recl_tokens"])[-1]
    return f"RECL in tokens, r = {ratio}: {', '.join(cells)}"


# By mode, what returns the main figures of its result as one line.
LINES: dict[str, Callable[[Json], str]] = {
    "train": _scores,
    "evaluate": _scores,
    "generate": _samples,
    "score": lambda x: f"{_counted(len(x['documents']), 'document')}: {_units(x)}",
    "attention": lambda x: f"open {x['files']['page']} in a browser",
    "prepare": _splits,
    "import": lambda x: f"{x['parameters']:,} parameters imported to {x['workdir']}",
    "export": lambda x: f"update {x['step']} exported to {x['target']}",
    "compile": _compiled,
    "table": lambda x: (
        f"Table {x['table']}: {_counted(len(x['outcomes']), 'row')} in {x['file']}"
    ),
    "speed": lambda x: (
        f"attention length {x['rows'][-1]['attention_len']:,}: windows are "
        f"{x['rows'][-1]['ratio']:,.0f} times slower than a memory"
    ),
    "recl": _lengths,
}
