"""Metrics and scores of a run on Weights & Biases, as an option (extra `wandb`)."""

import contextlib
import hashlib
import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path

from txl_jax.errors import UserError
from txl_jax.report.checksum import Json
from txl_jax.report.log import SendLine, say
from txl_jax.runtime import distributed, storage


def check_installed(project: str) -> None:
    """Raises UserError if a project is named but the package is missing."""
    if project and not importlib.util.find_spec("wandb"):
        raise UserError(
            f"run.wandb = {project!r} needs wandb: pip install 'txl_jax[wandb]', or "
            "leave the field empty"
        )


@contextlib.contextmanager
def logging(
    project: str, workdir: Path, start: Json, config: Json
) -> Iterator[SendLine]:
    """Yields a function that logs to the run of the first start; "" logs nothing."""
    if not project or not distributed.is_first():
        yield lambda step, values: None
        return
    import wandb

    text = json.dumps(start, sort_keys=True)
    try:
        run = wandb.init(
            project=project,
            id=hashlib.sha256(text.encode()).hexdigest()[:12],
            name=workdir.name,
            dir=None if storage.is_remote(workdir) else workdir,
            config=config,
            resume="allow",
            settings=wandb.Settings(console="off", quiet=True),
        )
    except wandb.errors.Error as error:
        raise UserError(
            f"run.wandb = {project!r} cannot be opened ({error}); WANDB_MODE=offline "
            "needs no account"
        ) from error
    run.define_metric("*", step_metric="update")
    is_open, status = True, 1

    def log(step: int, values: dict[str, float]) -> None:
        nonlocal is_open
        try:
            if is_open:
                run.log({"update": step, **values})
        except Exception as error:  # a report must not end the run
            is_open = False
            say(f"no more numbers to wandb until the next start ({error!r:.100})")

    try:
        yield log
        status = 0
    finally:
        with contextlib.suppress(Exception):
            run.finish(status)
