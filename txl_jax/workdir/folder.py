"""The folder of a run: its path and the names of its files.

The parsing of flags imports this module, so it must not import jax, even indirectly.
"""

from pathlib import Path

from txl_jax.errors import UserError
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
    folder = Path(address)
    try:
        storage.require_unicode(str(folder.absolute()), "--workdir")
        folder.exists()
    except OSError as error:
        raise UserError(
            f"--workdir={address!r} cannot be used ({error.strerror}): give another"
        ) from error
    return folder
