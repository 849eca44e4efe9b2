"""Finds released models, each in one file, also in the package; reads their configs.

The parsing of flags imports this module, so it must not import jax, even indirectly.
"""

import json
from pathlib import Path

import safetensors

from txl_jax import config as configs
from txl_jax.config import Config
from txl_jax.data.byte_ranges import reading
from txl_jax.errors import UserError, nearest
from txl_jax.runtime import storage
from txl_jax.runtime.storage import DAMAGE, Json
from txl_jax.workdir.folder import describe_path

SUFFIX = ".safetensors"
PACKAGED = Path(__file__).parents[1] / "packaged"


def packaged() -> dict[str, Path]:
    """Returns the files of the models in the package, by name."""
    return {path.stem: path for path in sorted(PACKAGED.glob(f"*{SUFFIX}"))}


def find_model(name: str) -> Path:
    """Returns the file of a --model: a path, or the name of a model in the package."""
    storage.to_utf8(name, "--model")
    path = storage.local_path(name, "--model")
    if storage.is_file(path):
        return path
    known = packaged()
    if name not in known:
        description = (
            describe_path(path)
            or f"no packaged model{nearest(name, known)} and no file"
        )
        names = ", ".join(known) or "none, because txl_jax is in a zip: install it"
        raise UserError(f"--model={name!r} is {description}; there are {names}")
    return known[name]


def load_config(path: Path) -> Config:
    """Returns the config of a model in one file; raises UserError."""
    with reading(path):
        try:
            with safetensors.safe_open(path, framework="numpy") as file:
                metadata = file.metadata() or {}
            config, origin = (json.loads(metadata[x]) for x in ("config", "origin"))
        except (safetensors.SafetensorError, *DAMAGE) as error:
            description = describe_path(path) or f"not a model in one file ({error})"
            raise UserError(
                f"{path} is {description}; a --model is a file that --mode=export "
                "--format=txl_jax wrote"
            ) from error
    return check_config(config, origin, path)


def check_config(config: Json, origin: Json, path: Path) -> Config:
    """Returns the config of a released model; raises UserError if it is not valid.

    Unknown fields, of other versions, are left out, unless they change the model: those
    of its section that are not off.
    """
    try:
        values = {
            f"{section}.{name}": value
            for section in configs.SECTIONS.keys() & config.keys()
            for name, value in config[section].items()
            if f"{section}.{name}" in configs.FIELDS or (section == "model" and value)
        }
        return configs.with_values(Config(), values)
    except (*DAMAGE, UserError) as error:
        is_known = isinstance(origin, dict) and "git_revision" in origin
        revision = origin["git_revision"] if is_known else "unknown"
        raise UserError(
            f"{path} has a config that this version does not read ({error}): use the "
            f"version that exported it (its model was trained at revision {revision})"
        ) from error
