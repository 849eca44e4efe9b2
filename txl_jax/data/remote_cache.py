"""Token files of a bucket, copied once per host: they are mapped, so they lie on disk.

Dims: none.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from txl_jax.errors import UserError
from txl_jax.report.progress import Progress

COPY_BYTES = 8 << 20


def is_remote(data_dir: str) -> bool:
    """Returns whether a data_dir is no folder of this machine."""
    return "://" in data_dir


def local_root(data_dir: str) -> Path:
    """Returns the folder of this host that mirrors a remote data_dir."""
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    name = hashlib.sha256(data_dir.rstrip("/").encode()).hexdigest()[:16]
    return Path(cache).expanduser().absolute() / "txl_jax" / name


class RemoteCache:
    """One folder of token files in a bucket."""

    def __init__(self, data_dir: str, folder: str, manifest: str) -> None:
        self.where = f"{data_dir.rstrip('/')}/{folder}"
        self.manifest = manifest
        # Here, for it takes a fifth of a second that only buckets need.
        from etils import epath  # type: ignore[import-untyped]

        try:
            self.remote = epath.Path(self.where)
            self.remote.exists()
        except Exception as error:  # each cloud library raises its own kinds
            raise self._failed("reach", error) from error

    def _failed(self, what: str, error: Exception) -> UserError:
        reason = str(error).partition("\n")[0]
        return UserError(
            f"cannot {what} {self.where} ({type(error).__name__}: {reason}): check the "
            "address and the rights, pip install gcsfs for gs://, or set data.data_dir "
            "to a local folder"
        )

    def read_manifest(self) -> str:
        """Returns the text of the bucket's manifest, "" if nothing is complete."""
        try:
            path = self.remote / self.manifest
            return path.read_text() if path.exists() else ""
        except Exception as error:
            raise self._failed("read", error) from error

    def fetch(self, manifest: str, folder: Path, say: Callable[[str], None]) -> None:
        """Copies the files to `folder`: it appears whole, verified, or not at all."""
        incomplete = folder.with_name(f"{folder.name}.incomplete")
        for leftover in (incomplete, folder):
            if leftover.exists():
                shutil.rmtree(leftover)
        incomplete.mkdir(parents=True)
        try:
            digests = _digests(json.loads(manifest))
        except (ValueError, TypeError, KeyError) as error:
            raise UserError(
                f"{self.where}/{self.manifest} is damaged ({error}): delete the folder "
                "and prepare again"
            ) from error
        say(f"data: copying {self.where} to {folder}")
        progress = Progress("data: copying", in_bytes=True, say=say)
        for name, expected in digests.items():
            found = self._copy(name, incomplete / name, progress)
            if found != expected:
                raise UserError(
                    f"{self.where}/{name} has SHA-256 {found}, its manifest says "
                    f"{expected}: delete the folder and prepare again"
                )
        (incomplete / self.manifest).write_text(manifest, "utf-8")
        incomplete.rename(folder)

    def _copy(self, name: str, target: Path, progress: Progress) -> str:
        digest = hashlib.sha256()
        try:
            source = (self.remote / name).open("rb")
        except Exception as error:
            raise self._failed("read", error) from error
        with source, target.open("wb") as out:
            while block := source.read(COPY_BYTES):
                digest.update(block)
                out.write(block)
                progress.add(len(block))
        return digest.hexdigest()

    def store(self, folder: Path, say: Callable[[str], None]) -> None:
        """Copies a folder to the bucket, its manifest last: only then is it complete.

        Two hosts may do it at once, for both write the same bytes.
        """
        say(f"data: copying {folder} to {self.where}")
        progress = Progress("data: copying", in_bytes=True, say=say)
        names = sorted(path.name for path in folder.iterdir())
        names.sort(key=self.manifest.__eq__)
        try:
            self.remote.mkdir(parents=True, exist_ok=True)
            for name in names:
                with (
                    (folder / name).open("rb") as source,
                    (self.remote / name).open("wb") as out,
                ):
                    while block := source.read(COPY_BYTES):
                        out.write(block)
                        progress.add(len(block))
        except Exception as error:
            raise self._failed("write", error) from error


def _digests(manifest: dict[str, Any]) -> dict[str, str]:
    """Returns each file's SHA-256, by the file's name."""
    return {str(k): str(v) for k, v in manifest["files"].items()}
