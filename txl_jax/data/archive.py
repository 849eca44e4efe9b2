"""Archives of published corpora, from the user's folder or a host.

Files are verified before they are used, and only listed members are unpacked.
"""

import shutil
import tarfile
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO

from txl_jax.data.byte_ranges import unreadable
from txl_jax.data.catalog import Archive, Member
from txl_jax.data.download import checksum, download
from txl_jax.errors import UserError
from txl_jax.report.log import say
from txl_jax.report.progress import waiting
from txl_jax.runtime.storage import regular


def fetch(
    archive: Archive, corpus: str, downloads: Path, scratch: Path
) -> dict[str, Path]:
    """Returns the verified file of each member, by its path in the archive.

    The sources, in this order, are the archive in `<downloads>/manual`, its unpacked
    files there, an earlier download and the network.
    """
    manual = downloads / "manual"
    path = manual / archive.name
    if archive.packed and path.exists():
        say(f"data: using {path}")
        verify(path, archive.sha256, archive.size)
    elif unpacked := _find_unpacked(archive, corpus, manual):
        bare = sum(not member.digest for member in archive.members)
        trust = f", {bare} of them without a published checksum" if bare else ""
        say(f"data: using the files of {corpus} in {manual}{trust}")
        for member in archive.members:
            verify(unpacked[member.path], member.digest, member.size)
        return unpacked
    else:
        path = downloads / archive.name
        if not path.exists() or checksum(path) != archive.sha256:
            files = " (or the files in it)" if archive.packed else ""
            fix = f"put {archive.name}{files} in {manual} and run again"
            path = download(archive, downloads, fix)
    if not archive.packed:
        return {member.path: path for member in archive.members}
    return _unpack(path, archive.members, scratch)


def _find_unpacked(archive: Archive, corpus: str, manual: Path) -> dict[str, Path]:
    """Returns the members in the manual folder: all of them or none."""
    paths: dict[str, Path] = {}
    for member in archive.members:
        for place in (manual / corpus / Path(member.path).name, manual / member.path):
            if place.is_file():
                paths[member.path] = place
    missing = [member.path for member in archive.members if member.path not in paths]
    if paths and missing:
        raise UserError(
            f"{manual} has only some files of corpus {corpus!r} and lacks "
            f"{missing[0]}: put all of them there, or {archive.name}"
        )
    return paths


def verify(path: Path, digest: str, size: int) -> None:
    """Raises UserError unless a file has the published size and checksum."""
    algorithm, _, expected = digest.rpartition(":")
    algorithm = algorithm or "sha256"
    try:
        bytes_read = regular(path).stat().st_size
        actual = checksum(path, algorithm) if digest else ""
    except OSError as error:
        raise unreadable(error, path) from error
    if size and bytes_read < size:
        raise UserError(
            f"{path} is truncated: it has {bytes_read:,} bytes of {size:,}; get the "
            "file again"
        )
    if actual != expected:
        raise UserError(
            f"{path} is a different file: its {algorithm.upper()} is {actual} "
            f"instead of {expected}; get the file again"
        )


def _unpack(path: Path, members: Sequence[Member], folder: Path) -> dict[str, Path]:
    """Unpacks the members of a verified archive into a folder, and nothing else."""
    targets = {member.path: folder / member.path for member in members}
    with waiting(f"data: unpacking {path.name}"):
        for entry, content in _entries(path):
            if target := targets.get(entry.removeprefix("./")):
                target.parent.mkdir(parents=True, exist_ok=True)
                with target.open("wb") as out:
                    shutil.copyfileobj(content, out, 1 << 20)
    return targets


def _entries(path: Path) -> Iterator[tuple[str, IO[bytes]]]:
    """Yields the name and content of each file; read it before the next one."""
    if path.suffix == ".zip":
        with zipfile.ZipFile(path) as archive:
            for name in archive.namelist():
                with archive.open(name) as file:
                    yield name, file
    else:
        with tarfile.open(path, "r|gz") as stream:
            for entry in stream:
                content = stream.extractfile(entry) if entry.isreg() else None
                if content:
                    yield entry.name, content
