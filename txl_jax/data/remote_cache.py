"""Token files on gs://, copied once per host, because they are memory-mapped."""

import contextlib
import errno
import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from txl_jax.data.download import checksum
from txl_jax.errors import UserError
from txl_jax.report.log import say
from txl_jax.runtime import storage


def local_root(data_dir: str) -> Path:
    """Returns the folder of this host that mirrors a remote data_dir."""
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    name = hashlib.sha256(data_dir.rstrip("/").encode()).hexdigest()[:16]
    return Path(cache).expanduser().absolute() / "txl_jax" / name


class RemoteCache:
    """One folder of token files on gs://, whose manifest lists them."""

    def __init__(self, data_dir: str, folder: str, manifest: str) -> None:
        self.remote = storage.remote_path(data_dir, "data.data_dir") / folder
        self.manifest = manifest

    @contextlib.contextmanager
    def _reporting(self, verb: str) -> Iterator[None]:
        try:
            yield
        except storage.errors() as error:
            if getattr(error, "errno", None) == errno.ENOSPC:
                raise  # of the local disk
            raise UserError(
                f"cannot {verb} {self.remote} ({storage.one_line(error)}): check the "
                "address and the rights, or set data.data_dir to a local folder"
            ) from error

    def read_manifest(self) -> str:
        """Returns the text of the remote manifest, "" if nothing is complete."""
        path = self.remote / self.manifest
        with self._reporting("read"):
            return path.read_text() if path.exists() else ""

    def fetch(self, manifest: str, folder: Path) -> None:
        """Copies the files to `folder`: it appears complete, verified, or not at all.

        Raises OSError if the local disk is full.
        """
        incomplete = folder.with_name(f"{folder.name}.incomplete")
        for leftover in (incomplete, folder):
            if leftover.exists():
                shutil.rmtree(leftover)
        incomplete.mkdir(parents=True)
        try:
            digests = {str(k): str(v) for k, v in json.loads(manifest)["files"].items()}
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise UserError(
                f"{self.remote / self.manifest} is damaged ({error}): delete the "
                "folder and prepare again"
            ) from error
        say(f"data: copying {self.remote} to {folder}")
        for name, expected in digests.items():
            with self._reporting("read"):
                (self.remote / name).copy(incomplete / name)
            if (digest := checksum(incomplete / name)) != expected:
                raise UserError(
                    f"{self.remote / name} has SHA-256 {digest}, its manifest says "
                    f"{expected}: delete the folder and prepare again"
                )
        (incomplete / self.manifest).write_text(manifest, "utf-8")
        incomplete.rename(folder)

    def store(self, folder: Path) -> None:
        """Copies a folder to gs://, its manifest last: only then is it complete.

        Two hosts may do it at once, because both write the same bytes.
        """
        say(f"data: copying {folder} to {self.remote}")
        names = sorted(path.name for path in folder.iterdir())
        names.sort(key=self.manifest.__eq__)
        with self._reporting("write"):
            for name in names:
                local = type(self.remote)(folder / name)
                local.copy(self.remote / name, overwrite=True)
