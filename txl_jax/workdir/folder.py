"""The folder of a run: its path and the names of its files.

The parsing of flags imports this module, so it must not import jax, even indirectly.
"""

from pathlib import Path

from txl_jax.runtime import storage

CONFIG = "config.json"
RUN = "run.json"  # provenance: code, libraries, devices, data, starts
VOCAB = "vocab.json"
CHECKPOINTS = "checkpoints"
METRICS = "metrics.jsonl"
RESULT = "result.json"  # of a run that has reached its last update


def find(address: str) -> Path:
    """Returns the folder of a --workdir, local or on gs://."""
    if "://" in address:
        return storage.remote_path(address, "--workdir")
    storage.require_unicode(address, "--workdir")
    return Path(address)
