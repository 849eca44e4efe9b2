"""The run that a workdir belongs to: its config, corpus and starts."""

import json
from pathlib import Path

from txl_jax import config as configs
from txl_jax.checkpoint import listing
from txl_jax.checkpoint.manifest import Imported
from txl_jax.config import Config
from txl_jax.data import vocab as vocabulary
from txl_jax.data.tokens import Tokens
from txl_jax.errors import UserError, refuse
from txl_jax.fields import Role
from txl_jax.report import provenance
from txl_jax.report.log import say
from txl_jax.report.metrics_log import read_metrics
from txl_jax.runtime import distributed
from txl_jax.runtime.storage import Json, refusing_damage, write_atomically
from txl_jax.workdir.folder import CONFIG, METRICS, RESULT, RUN, VOCAB, read_config

IMPORTED = "imported"  # in run.json: the source of an imported model


def check_trainable(workdir: Path, config: Config) -> None:
    """Raises UserError if the workdir holds an import or a run that cannot continue."""
    if IMPORTED in read_run(workdir):
        raise Imported(workdir)
    if (workdir / CONFIG).exists():
        check_same_run(workdir, saved_config(workdir), config)
    refuse(
        (step := last_step(workdir)) > (end := config.train.num_steps),
        f"{workdir} is already at update {step}: raise train.num_steps = {end}, or "
        "read the run with --mode=evaluate",
    )


def last_step(workdir: Path, result: str = RESULT) -> int:
    """Returns the newest checkpoint's step, or 0; raises UserError if it has gone.

    A training, even one killed before its first save, leaves something in the folder.
    """
    steps = listing.list_steps(folder := listing.find_folder(workdir))
    is_empty = not (folder.is_dir() and any(folder.iterdir()))
    for line in read_metrics(workdir / METRICS)[-1:] if is_empty else ():
        spent, has_result = line["timing"]["total_seconds"], (workdir / result).exists()
        refuse(
            "valid_nll" in line["exact"] or spent.get("checkpoint") or has_result,
            f"{workdir} was at update {line['step']}, and {folder} has no checkpoint: "
            "mount its disk or restore it from a backup, or give another --workdir",
        )
    return max(steps, default=0)


def saved_config(workdir: Path) -> Config:
    """Returns a run's config; raises UserError if a field of its last start is gone."""
    config, starts = read_config(workdir), read_run(workdir).get("starts", [{}])
    with refusing_damage(workdir / RUN):
        saved = json.loads((workdir / CONFIG).read_text("utf-8"))
        for section, fields in starts[-1].get("config", {}).items():
            for name in fields.keys() - saved.get(section, {}).keys():
                value = f"which is {json.dumps(fields[name])} in {RUN}: add it"
                line = f"{workdir / CONFIG} lacks {section}.{name}, {value}"
                refuse(f"{section}.{name}" in configs.FIELDS, line)
    return config


def check_same_run(workdir: Path, saved: Config, config: Config) -> None:
    """Raises UserError if the saved config conflicts with `config`."""
    conflicts = [
        f"{name} was {old!r}, is now {new!r}"
        for name, (old, new) in configs.differences(saved, config).items()
        if Role.IDENTITY in configs.FIELDS[name].roles
    ]
    if conflicts:
        raise UserError(
            f"{workdir} belongs to another config ({'; '.join(conflicts)}): give "
            "another --workdir, or restore these fields"
        )


def claim(workdir: Path, config: Config, tokens: Tokens, parameters: int) -> Json:
    """Makes `workdir` the folder of this run, and returns its first start.

    Reports changes of libraries and devices. All processes check, process 0 writes.
    Raises UserError for another corpus. parameters: their number.
    """
    state = configs.to_json(config)
    start = provenance.start(state)
    run = read_run(workdir) or {
        "parameters": parameters,
        "data": tokens.manifest,
        "starts": [],
    }
    with refusing_damage(workdir / RUN):
        if run["data"]["splits"] != tokens.manifest["splits"]:
            raise UserError(
                f"{workdir} was trained on another version of corpus "
                f"{tokens.manifest['corpus']!r} (SHA-256 in {workdir / RUN}): restore "
                "it, or give another --workdir"
            )
        run["starts"].append(start)
        first: Json = run["starts"][0]
        for change in provenance.describe_changes(first, start):
            bits = "results are not bit-identical to those before this start"
            say(f"{bits}: {change}")
        last = [x.get("config", start["config"]) for x in run["starts"][-2:]]
        old, new = last[0]["train"]["num_steps"], config.train.num_steps
    if old != new and config.optim.schedule.startswith("cosine"):
        say(f"train.num_steps was {old}, is now {new}, where the cosine of lr ends")
    if distributed.is_first():
        texts = {
            CONFIG: json.dumps(state, indent=2),
            VOCAB: vocabulary.dumps(tokens.vocab),
            RUN: json.dumps(run, indent=2),
        }
        for name, text in texts.items():
            write_atomically(workdir / name, text + "\n")
    return first


def read_run(workdir: Path) -> Json:
    """Returns run.json, {} if there is none; raises UserError if it is damaged."""
    path = workdir / RUN
    with refusing_damage(path):
        if not path.exists():
            return {}
        run = json.loads(path.read_text("utf-8"))
        if not isinstance(run, dict):
            raise ValueError("it is not a JSON object")
        return run


def trained_on(workdir: Path, run: Json) -> dict[str, str]:
    """Returns the SHA-256 of the splits that a run read, {} for an imported model."""
    with refusing_damage(workdir / RUN):
        splits = run.get("data", {}).get("splits", {})
        return {name: entry["sha256"] for name, entry in splits.items()}
