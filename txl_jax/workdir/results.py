"""Saved measurements, so that a command which is repeated resumes."""

import json
from collections.abc import Callable
from pathlib import Path

from txl_jax.report.output import to_json
from txl_jax.runtime import distributed
from txl_jax.runtime.storage import Json, refusing_damage, write_atomically


def cached(path: Path, key: Json, measure: Callable[[], Json]) -> Json:
    """Returns the result in a JSON file if it contains the fields of `key`.

    Otherwise measures, and replaces the file by `key` and the result; of several
    processes, all measure and the first one writes. Raises UserError for a damaged
    file.
    """
    key = json.loads(to_json(key))
    with refusing_damage(path):
        if path.exists():
            saved: Json = json.loads(path.read_text("utf-8"))
            if all(saved[name] == value for name, value in key.items()):
                return saved
    text = to_json(key | measure())
    if distributed.is_first():
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, f"{text}\n")
    result: Json = json.loads(text)
    return result
