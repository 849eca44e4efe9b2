"""The table of claims of the results page, from committed results."""

import collections
import json
import math
import statistics
from collections.abc import Iterator
from typing import Any, NamedTuple

from generate import ablations
from generate.markdown import ROOT, table

EXPERIMENTS = ROOT / "experiments"
ONE_SEED = "one seed: no verdict"
SEEDS = 1111, 1112, 1113  # for RECL and WikiText-2


class Claim(NamedTuple):
    """A row of the table of claims; `seeds` may also be the number of timings."""

    claim: str  # links to the page with the experiment
    others: str
    here: str
    seeds: int | str
    verdict: str


def read(name: str) -> Any:
    """Returns a committed result below experiments/; a list for JSON lines."""
    text = (EXPERIMENTS / name).read_text("utf-8")
    if name.endswith(".jsonl"):
        return [json.loads(line) for line in text.splitlines()]
    return json.loads(text)


def perplexity(row: str) -> str:
    """Returns the mean perplexity of FILE/ROW of an ablation table."""
    file, name = row.split("/")
    outcome = ablations.read(file)["outcomes"][name]
    return f"{statistics.fmean(outcome['best_by_seed']):.2f}"


def ablation(claim: str, paper: str, row: str, above: str) -> Claim:
    """Compares a row without a part with the row above that has it."""
    one = ablations.compare(row, above)
    here = f"{perplexity(above)} against {perplexity(row)}"
    linked = f"[{claim}](ablations.md)"
    verdict = one.verdict
    if paper == "not done":  # the paper has a cost only for the row with less text
        verdict = "yes" if one.cost > one.spread else "no difference"
    return Claim(linked, paper, f"{here} ppl", one.seeds, verdict)


def ablation_claims() -> Iterator[Claim]:
    """Yields the claims of Tables 6, 7 and 10."""
    memory, lost = "table6/wt103_128m", "table6/wt103_no_recurrence"
    half = "table6/wt103_no_recurrence_half_loss"
    base, longer = "table10/wt103_128m", "wt103_no_recurrence_176"
    for claim, paper, row, above in (
        ("A memory helps (Table 6)", "26.77 against 29.02", lost, memory),
        ("A memory helps in shuffled sentences (Table 7)", "25.2 against 27.1")
        + ("table7/lm1b_no_recurrence", "table7/lm1b_300m"),
        ("A memory beats longer segments (Table 10)", "26.77 against 27.98")
        + (f"table10/{longer}", base),
        ("A memory beats longer segments that read equal amounts of text", "not done")
        + (f"table10_tokens/{longer}", base),
        ("The positions beat Shaw's (Table 6)", "26.77 against 27.94")
        + ("table6/wt103_shaw", memory),
        (
            "Relative positions beat sinusoids (Table 6, no memory)",
            "30.10 against 30.97",
        )
        + ("table6/wt103_vaswani", half),
        ("Relative positions beat learned ones (the same)", "30.10 against 31.16")
        + ("table6/wt103_al_rfou", half),
    ):
        yield ablation(claim, paper, row, above)
    saved = ablations.read("table6_words")["comparisons"][0]
    ppl = ablations.read("table6_words")["outcomes"]["wt103_128m"]
    gain = 100 * saved["cost"] / statistics.fmean(ppl["ppl_init"])
    yield Claim(
        "[Attention longer than in training helps (Table 6)](ablations.md)",
        "0.9 % better",
        f"{-gain:.2f} % better, words; none, bytes",
        saved["seeds"],
        saved["verdict"],
    )


def recl_claim() -> Claim:
    """Returns the claim of Table 8: RECL at r = 0.1 with and without a memory."""
    members = [
        {
            member["workdir"].split("/")[-2]: member["recl_tokens"]["0.1"]
            for member in read(f"logs/recl_{seed}.json")["members"]
        }
        for seed in SEEDS
    ]
    rows = "wt103_128m", "wt103_no_recurrence", "wt103_vaswani"
    here = ["/".join(map(str, sorted({m[row] for m in members}))) for row in rows]
    longer = all(m[rows[0]] > max(m[rows[1]], m[rows[2]]) for m in members)
    return Claim(
        "[It uses more context (Table 8, RECL at r = 0.1)](recl.md)",
        "700 tokens; 300 without memory; 128 with absolute positions",
        f"{here[0]} bytes; {here[1]}; {here[2]}",
        len(members),
        "as the paper" if longer else "not in every seed",
    )


def accuracy(name: str, distance: int, segments: int) -> list[float]:
    """Returns the right answers of each seed in percent."""
    return [
        100 * cell["accuracy"]
        for cell in read(name)["cells"]
        if (cell["distance_tokens"], cell["gradient_segments"]) == (distance, segments)
    ]


def memory_claims() -> Iterator[Claim]:
    """Yields the claims on speed, reach and what is learned of it."""
    logs = [read(f"logs/speed{end}.json")["rows"][-1] for end in ("", "_1", "_2")]
    fair = sorted(round(row["fair_ratio"]) for row in logs)
    yield Claim(
        "[Evaluation with it is faster (Table 9, 3,800 tokens)](long_context.md)",
        "1,874 times",
        f"{logs[0]['ratio']:,.0f} times; "
        f"against a fair window {fair[0]:,} to {fair[-1]:,}",
        "timed 3 times",
        "as the paper" if fair[0] > 1000 else "less",
    )
    yield Claim(
        "[The reach is N x L (section 3.2)](copying.md)",
        "stated",
        "bit for bit, for the tested lengths",
        "exact",
        "as the paper",
    )
    name, here, apart = "logs/copying_gradients.json", [], True
    for distance in (32, 64):
        one, eight = (accuracy(name, distance, count) for count in (1, 8))
        here.append(f"{statistics.fmean(one):.1f} % to {statistics.fmean(eight):.1f} %")
        apart = apart and max(one) < min(eight)
    yield Claim(
        "[Gradients across 8 segments teach the reach](copying.md)",
        "not done",
        f"copying from 32 tokens back {here[0]}, from 64 back {here[1]}",
        len(accuracy(name, 32, 8)),
        "yes, in every seed" if apart else "not in every seed",
    )


def kind_claims() -> Iterator[Claim]:
    """Yields the claims on kinds of memory, each against the row without it."""
    result = read("logs/memories.json")
    tasks = result["rows_by_task"]
    seeds = collections.Counter((x["task"], x["kind"]) for x in result["cells"])

    def against(task: str, kind: str, field: str) -> str:
        """Returns a figure without and with a kind."""
        other = tasks[task][kind]
        one = tasks[task][other["compared_with"]]
        if field == "accuracy":
            return f"{100 * one[field]:.1f} % to {100 * other[field]:.1f} %"
        return f"{one['nll']['mean']:.3f} to {other['nll']['mean']:.3f} nats"

    for claim, source, task, kind, field in (
        ("Gradients across 4 segments teach copying from 96 back", "not done")
        + ("copying_96", "gradients", "accuracy"),
        ("Gradients across 4 segments help recall", "not done")
        + ("recall", "gradients", "accuracy"),
        ("Gradients across 4 segments help bytes", "not done")
        + ("stdlib", "gradients", "nll"),
        ("A continuous cache helps bytes", "Grave et al.: words")
        + ("stdlib", "cache", "nll"),
        ("A continuous cache helps words", "Grave et al.: words")
        + ("wikitext2", "cache", "nll"),
        ("A compressed memory helps bytes", "Rae et al.: bytes of enwik8")
        + ("stdlib", "compressive", "nll"),
        ("Retrieval helps bytes", "Wu et al.: code", "stdlib", "retrieval", "nll"),
        ("Same-layer recurrence helps words", "Ding et al.: words")
        + ("wikitext2", "same_layer", "nll"),
        ("Memory tokens help bytes", "Bulatov et al.: bytes of enwik8")
        + ("stdlib", "tokens", "nll"),
        ("Fast weights recall from 96 back, beyond the reach of 79", "not done")
        + ("recall_96", "fast_weights", "accuracy"),
        ("Fast weights help bytes", "Yang et al.: words")
        + ("stdlib", "fast_weights", "nll"),
    ):
        yield Claim(
            f"[{claim}](tried.md)",
            source,
            against(task, kind, field),
            seeds[task, kind],
            tasks[task][kind]["verdict"],
        )


def model_claims() -> Iterator[Claim]:
    """Yields the claims on whole models."""
    training = [line for line in read("benchmarks/training.jsonl") if "peer" in line]
    gaps = [x["float32"]["valid_nats"] - x["peer"]["valid_nats"] for x in training]
    error = statistics.stdev(gaps) / len(gaps) ** 0.5
    mean = statistics.fmean(gaps)
    yield Claim(
        "[It trains as Hugging Face's port does](migration.md)",
        "the port",
        f"{mean:+.4f} ± {error:.4f} nats",
        len(gaps),
        "no difference" if abs(mean) <= 2 * error else "a difference",
    )
    test, cached = (
        statistics.fmean(
            read(f"logs/wikitext2_{x}_{seed}.json")["ppl"] for seed in SEEDS
        )
        for x in ("seed", "cache")
    )
    yield Claim(
        "[WikiText-2, 5.0 million parameters](models.md)",
        "AWD-LSTM, 33 million: 65.8; with a continuous cache 52.0",
        f"{test:.1f} ppl; with a continuous cache {cached:.1f}",
        len(SEEDS),
        "worse, with fewer parameters",
    )
    (small,) = read("benchmarks/shakespeare.jsonl")
    ours, port = (small["runs"][0][name]["nats"] for name in ("ours", "nanogpt"))
    yield Claim(
        "[tiny Shakespeare, 0.8 million, three minutes](models.md)",
        f"nanoGPT's CPU recipe: {port:.3f} nats",
        f"{ours:.3f} nats",
        1,
        ONE_SEED,
    )
    long = min(x.get("valid_nats", 9) for x in read("logs/shakespeare_long.jsonl"))
    yield Claim(
        "[tiny Shakespeare, 2.9 million, two hours](models.md)",
        "nanoGPT, 10.7 million: 1.4697 nats",
        f"{long:.3f} nats",
        1,
        ONE_SEED,
    )
    cold = read("logs/cold_start.json")["cost_nats"]
    yield Claim(
        "[A cold start costs](long_context.md)",
        "not measured",
        f"{cold:.1f} nats",
        1,
        ONE_SEED,
    )
    packed = read("logs/compress_1mb_decode.json")
    rate = packed["bytes"] / packed["seconds"]
    yield Claim(
        "[enwik8's first 1 MB, compressed](howto/compress.md)",
        "PPMd, order 16: 1.970; xz -9e: 2.326",
        f"{packed['bits_per_byte']:.3f} bits per byte, decoded at {rate:,.0f} bytes/s",
        1,
        ONE_SEED,
    )
    yield variants_claim()


def variants_claim() -> Claim:
    """Returns the claim on what came after the paper."""
    lines = {line["variant"]: line for line in read("benchmarks/variants.jsonl")}
    costs = (
        lines[name]["test_nats"] - lines["paper"]["test_nats"]
        for name in ("muon", "dynamic", "cache")
    )
    here = "; ".join(f"{100 * (1 - math.exp(cost)):.0f} %" for cost in costs)
    return Claim(
        "[Muon, dynamic evaluation and a cache help](howto/variants.md)",
        "each by its own paper",
        f"{here} of perplexity, tiny Shakespeare",
        1,
        ONE_SEED,
    )


def claims() -> str:
    """Returns the table of claims; claims with one seed are in bold."""
    found = [*ablation_claims(), recl_claim(), *memory_claims()]
    found += [*kind_claims(), *model_claims()]
    rows = [
        (each.claim, each.verdict, seeds, each.here, each.others)
        for each in found
        for seeds in ["**1**" if each.seeds == 1 else each.seeds]
    ]
    head = "claim", "verdict", "seeds", "here", "the paper or others"
    return table(head, rows).replace(" %", "\u00a0%")
