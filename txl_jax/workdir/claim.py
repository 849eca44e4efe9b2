"""The run that a workdir belongs to: its config, corpus and starts."""

import json
from collections.abc import Collection
from pathlib import Path

from txl_jax import config as configs
from txl_jax.checkpoint.manifest import Imported
from txl_jax.config import Config
from txl_jax.data import vocab as vocabulary
from txl_jax.data.tokens import Tokens
from txl_jax.errors import UserError
from txl_jax.report import provenance
from txl_jax.report.log import say
from txl_jax.runtime import distributed
from txl_jax.runtime.storage import Json, refusing_damage, write_atomically
from txl_jax.workdir.folder import CONFIG, RUN, VOCAB, read_config

IMPORTED = "imported"  # in run.json: the source of an imported model


def check_trainable(workdir: Path, config: Config) -> None:
    """Raises UserError if the workdir belongs to an import or to another config."""
    if IMPORTED in read_run(workdir):
        raise Imported(workdir)
    if (workdir / CONFIG).exists():
        check_same_run(workdir, read_config(workdir), config)


def check_same_run(
    workdir: Path, saved: Config, config: Config, free: Collection[str] = ()
) -> None:
    """Raises UserError if the saved config conflicts with `config`, beyond `free`."""
    conflicts = [
        f"{name} was {old!r}, is now {new!r}"
        for name, (old, new) in configs.differences(saved, config).items()
        if name in configs.IDENTITY and name not in free
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
