"""The folder of a run: its path and the names of its files.

The parsing of flags imports this module, so it must not import jax, even indirectly.
"""

from pathlib import Path

from txl_jax.errors import UserError

CONFIG = "config.json"
RUN = "run.json"  # provenance: code, libraries, devices, data, starts
VOCAB = "vocab.json"
CHECKPOINTS = "checkpoints"
METRICS = "metrics.jsonl"


def find(address: str) -> Path:
    """Returns the folder of a --workdir; for a workdir on gs://, its local copy.

    The files of the bucket are downloaded, checkpoints only when they are restored.
    """
    if "://" in address:
        return _open_bucket(address)
    folder = Path(address)
    try:
        folder.exists()
    except OSError as error:
        raise UserError(
            f"--workdir={address!r} cannot be used ({error.strerror}): give another"
        ) from error
    return folder


def _open_bucket(address: str) -> Path:
    from txl_jax.runtime import distributed
    from txl_jax.workdir import bucket
    from txl_jax.workdir.lock import InUse, locked_folder

    url = bucket.address(address)
    if distributed.several() or distributed.find_processes():
        raise UserError(
            f"--workdir={url} is for one process: of several each writes its part of a "
            "checkpoint, so give a folder of a file system that all of them see"
        )
    opened = bucket.Bucket(url)
    try:
        with locked_folder(opened.folder):
            opened.open(ours=True)
    except InUse:  # by a run that keeps the folder at least as new as the bucket
        opened.open(ours=False)
    return opened.folder
