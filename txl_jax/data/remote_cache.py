"""Token files on gs://, copied once per host, because they are memory-mapped.

`remote` is a folder of token files there, whose manifest lists them.
"""

import contextlib
import errno
import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from txl_jax.data.byte_ranges import checksum
from txl_jax.errors import UserError
from txl_jax.report.checksum import DAMAGE
from txl_jax.report.log import say
from txl_jax.runtime import programs, storage

MANIFEST = "manifest.json"
RemotePath = Any  # an `epath.Path`, whose module only gs:// needs


def local_root(data_dir: str) -> Path:
    """Returns the folder of this host that mirrors a remote data_dir."""
    name = hashlib.sha256(data_dir.rstrip("/").encode()).hexdigest()[:16]
    return programs.user_cache() / name


@contextlib.contextmanager
def _reporting(verb: str, remote: RemotePath) -> Iterator[None]:
    try:
        yield
    except storage.errors() as error:
        if getattr(error, "errno", None) == errno.ENOSPC:
            raise  # of the local disk
        raise UserError(
            f"cannot {verb} {remote} ({storage.one_line(error)}): check the address "
            "and the permissions, or set data.data_dir to a local folder"
        ) from error


def read_manifest(remote: RemotePath) -> str:
    """Returns the text of the remote manifest, "" if nothing is complete."""
    path = remote / MANIFEST
    with _reporting("read", remote):
        return path.read_text() if path.exists() else ""


def fetch(remote: RemotePath, manifest: str, folder: Path) -> None:
    """Copies the files that the manifest lists to a folder, and verifies them."""
    say(f"data: copying {remote} to {folder.parent}")
    try:
        for name, expected in json.loads(manifest)["files"].items():
            with _reporting("read", remote):
                (remote / name).copy(folder / name)
            if (digest := checksum(folder / name)) != expected:
                raise ValueError(f"{name} has SHA-256 {digest} instead of {expected}")
    except DAMAGE as error:
        raise UserError(
            f"{remote} is damaged ({error}): delete the folder and prepare again"
        ) from error
    (folder / MANIFEST).write_text(manifest, "utf-8")


def store(remote: RemotePath, folder: Path) -> None:
    """Copies a folder to gs://, its manifest last: only then is it complete.

    Two hosts may do it at once, because both write the same bytes.
    """
    say(f"data: copying {folder} to {remote}")
    names = sorted((path.name for path in folder.iterdir()), key=MANIFEST.__eq__)
    with _reporting("write", remote):
        for name in names:
            type(remote)(folder / name).copy(remote / name, overwrite=True)
