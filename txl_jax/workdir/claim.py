"""The run that a workdir belongs to: its config, corpus and starts."""

import contextlib
import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path

from txl_jax import config as configs
from txl_jax import metrics
from txl_jax.checkpoint.manifest import Imported
from txl_jax.config import Config
from txl_jax.data import vocab as vocabulary
from txl_jax.data.tokens import Tokens
from txl_jax.errors import UserError
from txl_jax.model.config import ModelConfig
from txl_jax.report import provenance
from txl_jax.report.checksum import DAMAGE, Json
from txl_jax.report.log import say, whole_lines
from txl_jax.report.timing import PURPOSES, goodput
from txl_jax.runtime import distributed, storage
from txl_jax.runtime.storage import write_atomically
from txl_jax.update.init import abstract_params
from txl_jax.workdir.folder import CONFIG, METRICS, RUN, VOCAB
from txl_jax.workdir.lock import Fence, Replaced

IMPORTED = "imported"  # in run.json: the source of an imported model


def check_trainable(workdir: Path, config: Config) -> None:
    """Raises UserError if the workdir belongs to an import or to another config.

    Both of its files state the config, in case one of them was edited or lost.
    """
    run = read_run(workdir)
    with _refusing_damage(workdir / RUN):
        recorded = run and configs.from_saved(run["config"], workdir / RUN)
        started = recorded and configs.parse(recorded)
    if IMPORTED in run:
        raise Imported(workdir)
    if started:
        check_same_run(workdir, started, config)
    if (workdir / CONFIG).exists():
        saved = configs.parse(configs.load_json(workdir / CONFIG))
        check_same_run(workdir, saved, config)


def check_same_run(workdir: Path, saved: Config, config: Config) -> None:
    """Raises UserError if the workdir's saved config conflicts with `config`."""
    fixed = {*configs.having("identity")} - {*configs.having("changeable")}
    conflicts = [
        f"{name} was {old!r}, is now {new!r}"
        for name, (old, new) in configs.differences(saved, config).items()
        if name in fixed
    ]
    if conflicts:
        raise UserError(
            f"{workdir} belongs to another config ({'; '.join(conflicts)}): give "
            "another --workdir, or restore these fields"
        )


def claim(workdir: Path, config: Config, tokens: Tokens, model: ModelConfig) -> Json:
    """Makes `workdir` the folder of this run, and logs a start; see `check_trainable`.

    model: with the vocabulary's size. Returns the entry of the run's first start.
    Reports libraries and devices that changed since then: the results may differ in the
    last bits from those of an uninterrupted run. Every process checks, process 0
    writes. Raises UserError if the workdir belongs to another version of the corpus.
    """
    parameters = metrics.parameter_count(abstract_params(model))
    run = provenance.provenance(dataclasses.asdict(config), tokens.manifest, parameters)
    try:
        earlier = _earlier(workdir, run)
        run |= earlier | {"starts": [*earlier["starts"], provenance.start(run)]}
        if not distributed.is_first():
            return run["starts"][0]
        text = json.dumps(run, indent=2) + "\n"
        write_atomically(workdir / CONFIG, lambda path: configs.save_json(config, path))
        write_atomically(
            workdir / VOCAB, lambda path: vocabulary.save(tokens.vocab, path)
        )
        write_atomically(workdir / RUN, lambda path: path.write_text(text, "utf-8"))
    except OSError as error:
        raise UserError(
            f"cannot write {storage.place(error) or workdir} ({error.strerror}): give "
            "another --workdir"
        ) from error
    return run["starts"][0]


def record_goodput(workdir: Path, fence: Fence) -> Json:
    """Adds the goodput of the run so far to run.json; returns it in process 0.

    Returns {} if another run has taken the workdir over, if the files cannot be read or
    written, and in other processes.
    """
    if not distributed.is_first():
        return {}
    failures: tuple[type[Exception], ...] = (*DAMAGE, *storage.errors())
    try:
        fence()
        run = json.loads((workdir / RUN).read_text("utf-8"))
        lines, _ = whole_lines(workdir / METRICS, 2**62)
        run["goodput"] = goodput(lines, run)
        text = json.dumps(run, indent=2) + "\n"
        write_atomically(workdir / RUN, lambda path: path.write_text(text, "utf-8"))
    except Replaced:
        return {}
    except failures as error:
        say(f"the goodput is not in {workdir / RUN} ({storage.one_line(error)})")
        return {}
    return {"goodput": run["goodput"]}


def summarize(workdirs: list[Path]) -> Json:
    """Returns the total hours of finished runs, with their revisions, devices and days.

    The hours are those of updates, input, compilation, checkpoints and validation:
    start-up, shutdown and downtime are left out. Raises UserError if a run.json is
    damaged.
    """
    hours, revisions, devices, days = 0.0, set(), set(), set()
    for workdir in workdirs:
        run = read_run(workdir)
        with _refusing_damage(workdir / RUN):
            seconds = run.get("goodput", {}).get("seconds", {})
            hours += sum(seconds.get(name, 0.0) for name in PURPOSES) / 3600
            for start in run.get("starts", []):
                revisions.add(str(start["git_revision"]))
                devices.add(f"{start['device_count']} x {start['device_kind']}")
                days.add(start["time"][:10])
    return {
        "hours": hours,
        "git_revisions": sorted(revisions),
        "devices": sorted(devices),
        "days": sorted(days),
    }


def _earlier(workdir: Path, run: Json) -> Json:
    """Returns the run's starts so far, and its goodput if that was recorded.

    Raises UserError if its corpus has changed.
    """
    path = workdir / RUN
    if not (before := read_run(workdir)):
        return {"starts": []}
    with _refusing_damage(path):
        changed = before["data"]["splits"] != run["data"]["splits"]
        starts = list(before["starts"])
        differences = provenance.differences(starts[0], run)
    if changed:
        raise UserError(
            f"{workdir} was trained on another version of corpus "
            f"{run['data']['corpus']!r} (SHA-256 in {path}): restore it, or "
            "give another --workdir"
        )
    for difference in differences:
        say(f"results are not bit-identical to those before this start: {difference}")
    kept = {"goodput": before["goodput"]} if "goodput" in before else {}
    return {"starts": starts, **kept}


def read_run(workdir: Path) -> Json:
    """Returns the content of run.json, or {} if there is no such file.

    Raises UserError if it is damaged.
    """
    path = workdir / RUN
    with _refusing_damage(path):
        if not path.exists():
            return {}
        run = json.loads(path.read_text("utf-8"))
        if not isinstance(run, dict):
            raise ValueError("it is not a JSON object")
        return run


@contextlib.contextmanager
def _refusing_damage(path: Path) -> Iterator[None]:
    """Raises UserError for errors that a damaged run.json can cause."""
    try:
        yield
    except (OSError, *DAMAGE) as error:
        raise UserError(
            f"{path} is damaged ({error}): restore it from a backup, or delete it to "
            "continue"
        ) from error
