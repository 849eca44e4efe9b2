"""Trains tiny Shakespeare with each addition of docs/howto/variants.md.

    python -m experiments.benchmarks.variants [--seeds=3] [--only=rotary,muon]

Every row is experiments/shakespeare.py with a few fields changed, at equal characters
and, but for the rounding of gated layers, equal parameters. Each run is scored on the
held-out tenth and adds a line to variants.jsonl; runs that have one are not repeated,
and an interrupted run is resumed from --workdir. variants.md is the table of all lines.
"""

import argparse
import datetime
import json
import math
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from txl_jax.report.provenance import git_revision

HERE = Path(__file__).parent
LINES, PAGE = HERE / "variants.jsonl", HERE / "variants.md"
CONFIG = HERE.parent / "shakespeare.py"

# Without W_R, u and w, the feed-forward layers are wider by as many weights.
WIDER = ("model.d_inner=512",)
MODERN = "model.norm=rms", "model.qk_norm=true", "model.feed_forward=swiglu"
VARIANTS: dict[str, tuple[str, ...]] = {
    "paper": (),
    "rotary": ("model.position=rotary", *WIDER),
    "alibi": ("model.position=alibi", *WIDER),
    "rms": ("model.norm=rms",),
    "geglu": ("model.feed_forward=geglu",),
    "swiglu": ("model.feed_forward=swiglu",),
    "qk_norm": ("model.qk_norm=true",),
    "adamw": ("optim.weight_decay=0.1",),
    "muon": ("optim.optimizer=muon",),
    "pre_lnorm": ("model.pre_lnorm=true",),
    "all": ("model.position=rotary", *WIDER, *MODERN, "optim.optimizer=muon"),
    "stages": ("train.stages=1000:tgt_len=16,mem_len=16", "train.num_steps=2500"),
}


def train(name: str, seed: int, args: argparse.Namespace) -> dict[str, Any]:
    """Trains one run, and returns its line."""
    workdir = Path(args.workdir) / name / str(seed)
    fields = [*VARIANTS[name], f"train.seed={seed}", f"data.data_dir={args.data_dir}"]
    if args.tiny:
        fields += ["train.num_steps=4", "train.stages=", "eval.max_tokens=500"]
    command = [sys.executable, "-m", "txl_jax.main", f"--config={CONFIG}"]
    command += [f"--workdir={workdir}", *(f"--config.{field}" for field in fields)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    result = json.loads(done.stdout.splitlines()[-1])
    described = json.loads((workdir / "run.json").read_text("utf-8"))
    return {
        "variant": name,
        "seed": seed,
        "nats": round(result["nll"], 4),
        "fields": list(VARIANTS[name]),
        "updates": result["updates"],
        "parameters": described["parameters"],
        "characters": result["tokens"],
        "revision": git_revision(),
        "date": datetime.date.today().isoformat(),
    }


def read(path: Path) -> list[dict[str, Any]]:
    """Returns the lines of earlier runs."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


def page(lines: list[dict[str, Any]]) -> str:
    """Returns the table, by variant."""
    rows = {name: [x for x in lines if x["variant"] == name] for name in VARIANTS}
    base = [x["nats"] for x in rows["paper"]]
    text = [
        "| variant | changes | parameters | updates | nats per character | perplexity "
        "against `paper` | seeds |",
        "|---" * 7 + "|",
    ]
    for name, runs in rows.items():
        if not runs:
            continue
        nats = [x["nats"] for x in runs]
        mean = statistics.fmean(nats)
        gain = math.exp(mean - statistics.fmean(base)) - 1 if base else math.nan
        changes = " ".join(f"`{field}`" for field in runs[0]["fields"])
        spread = f"{mean:.4f} ({min(nats):.4f}–{max(nats):.4f})"
        sizes = f"{runs[0]['parameters']:,} | {runs[0]['updates']:,}"
        text.append(
            f"| {name} | {changes} | {sizes} | {spread} | {gain:+.1%} | {len(nats)} |"
        )
    return "\n".join(text) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3, help="runs of each variant")
    parser.add_argument("--first_seed", type=int, default=1, help="that of the first")
    parser.add_argument("--only", default="", help="names with commas between them")
    parser.add_argument("--workdir", default="runs/variants", help="folder of the runs")
    parser.add_argument("--data_dir", default="data", help="folder of prepared text")
    parser.add_argument("--tiny", action="store_true", help="try it with 4 updates")
    args = parser.parse_args()
    names = args.only.split(",") if args.only else list(VARIANTS)
    if unknown := set(names) - VARIANTS.keys():
        parser.error(f"{', '.join(unknown)}: it knows {', '.join(VARIANTS)}")
    folder = Path(args.workdir)
    folder.mkdir(parents=True, exist_ok=True)
    target, table = LINES, PAGE
    if args.tiny:
        target, table = folder / LINES.name, folder / PAGE.name
    for seed in range(args.first_seed, args.first_seed + args.seeds):
        for name in names:
            done = {(x["variant"], x["seed"]) for x in read(target)}
            if (name, seed) not in done:
                line = json.dumps(train(name, seed, args))
                with target.open("a", encoding="utf-8") as file:
                    file.write(line + "\n")
                table.write_text(page(read(target)), "utf-8")
    print(page(read(target)))


if __name__ == "__main__":
    main()
