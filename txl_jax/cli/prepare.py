"""The mode `prepare`: prepares the corpus of a config, or deletes it."""

from typing import Any

from txl_jax.data import tokens as token_files
from txl_jax.data.options import DataConfig
from txl_jax.data.preparation import prepare
from txl_jax.runtime import distributed


def run(config: DataConfig, delete: bool) -> dict[str, Any]:
    """Prepares the corpus and returns its figures, or deletes its prepared copies."""
    if delete:
        folders = distributed.first_then_others(lambda: token_files.delete(config))
        return {"deleted": folders}
    tokens = prepare(config)
    figures = {k: x for k, x in tokens.manifest.items() if k != "files"}
    places = list(map(str, token_files.copies(config)))
    return {**figures, "folder": str(tokens.folder), "copies": places}
