"""Metrics and scores of a run on Weights & Biases, as an option (extra `wandb`)."""

import hashlib
import json
from pathlib import Path

from txl_jax.errors import UserError
from txl_jax.report.log import SendLine
from txl_jax.runtime import distributed, storage
from txl_jax.runtime.storage import Json


def opened(project: str, workdir: Path, start: Json, config: Json) -> SendLine:
    """Returns a function that logs to the run of the first start; "" logs nothing."""
    if not project or not distributed.is_first():
        return lambda step, values: None
    text = json.dumps(start, sort_keys=True)
    try:
        import wandb

        run = wandb.init(
            project=project,
            id=hashlib.sha256(text.encode()).hexdigest()[:12],
            name=workdir.name,
            dir=None if storage.is_remote(workdir) else workdir,
            config=config,
            resume="allow",
            settings=wandb.Settings(console="off", quiet=True),
        )
    except Exception as error:  # without the package, a key or the network
        raise UserError(
            f"run.wandb = {project!r} cannot be opened ({error}): pip install "
            "'txl_jax[wandb]'; WANDB_MODE=offline needs no account"
        ) from error
    run.define_metric("*", step_metric="update")
    return lambda step, values: run.log({"update": step, **values})
