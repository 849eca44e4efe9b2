"""Archives of published corpora, from the user's folder or a host.

Files are verified before they are used, and only listed members are unpacked.
"""

import gzip
import lzma
import stat
import tarfile
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO

from txl_jax.data.byte_ranges import unreadable
from txl_jax.data.catalog import Archive, Member
from txl_jax.data.download import checksum, download
from txl_jax.errors import UserError
from txl_jax.report.log import say
from txl_jax.report.progress import Progress

# Text is compressed 2 to 4 times: an archive that expands much more is refused. The
# minimum is for small archives.
MAX_EXPANSION = 20
LEAST_LIMIT = 1 << 20


def fetch(
    archive: Archive, corpus: str, downloads: Path, scratch: Path
) -> dict[str, Path]:
    """Returns the verified file of each member, by its path in the archive.

    The sources, in this order, are the archive in `<downloads>/manual`, its unpacked
    files there, an earlier download and the network. Archives are unpacked in
    `scratch`. Raises UserError for a file that is missing, damaged or a different one.
    """
    manual = downloads / "manual"
    if archive.packed and (path := manual / archive.name).exists():
        say(f"data: using {path}")
        verify(path, archive.sha256, archive.size)
        return unpack(path, archive.members, scratch)
    if unpacked := _find_unpacked(archive, corpus, manual):
        bare = sum(not member.digest for member in archive.members)
        trust = f", {bare} of them without a published checksum" if bare else ""
        say(f"data: using the files of {corpus} in {manual}{trust}")
        for member in archive.members:
            verify(unpacked[member.path], member.digest, member.size)
        return unpacked
    kept = downloads / archive.name
    if not kept.exists() or checksum(kept) != archive.sha256:
        names = archive.name
        if archive.packed and len(archive.members) <= 3:
            inside = ", ".join(member.path for member in archive.members)
            names += f" (or the files in it: {inside})"
        fix = f"put {names} in {manual} and run again"
        kept = download(archive, downloads, fix)
    if not archive.packed:
        return {member.path: kept for member in archive.members}
    return unpack(kept, archive.members, scratch)


def _find_unpacked(archive: Archive, corpus: str, manual: Path) -> dict[str, Path]:
    """Returns the members in the manual folder: all of them or none."""
    paths: dict[str, Path] = {}
    for member in archive.members:
        for place in (manual / corpus / Path(member.path).name, manual / member.path):
            if place.is_file():
                paths[member.path] = place
    missing = [member.path for member in archive.members if member.path not in paths]
    if not paths or not missing:
        return paths
    more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
    raise UserError(
        f"{manual} lacks {', '.join(missing[:3])}{more} of corpus {corpus!r} beside "
        f"{next(iter(paths.values()))}: put them there, or {archive.name}"
    )


def verify(path: Path, digest: str, size: int) -> None:
    """Raises UserError unless a file has the published size and checksum."""
    algorithm, _, expected = digest.rpartition(":")
    algorithm = algorithm or "sha256"
    try:
        bytes_read = path.stat().st_size
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


def unpack(path: Path, members: Sequence[Member], folder: Path) -> dict[str, Path]:
    """Unpacks the members of an archive into a folder and verifies them.

    Only regular files with the name of a member are written, so no link and no other
    path. Raises UserError for an archive that is damaged, lacks a member or has members
    of more than MAX_EXPANSION times its size.
    """
    wanted = {member.path: member for member in members}
    left = limit = max(path.stat().st_size * MAX_EXPANSION, LEAST_LIMIT)
    progress = Progress(f"data: unpacking {path.name}", in_bytes=True)
    unpacked: dict[str, Path] = {}
    try:
        for entry, file in _files(path):
            name = entry.removeprefix("./")
            if name not in wanted or name in unpacked:
                continue
            unpacked[name] = folder / name
            unpacked[name].parent.mkdir(parents=True, exist_ok=True)
            with unpacked[name].open("wb") as out:
                while block := file.read(min(left + 1, 1 << 20)):
                    left -= len(block)
                    if left < 0:
                        raise _refused(path, f"unpacks to more than {limit:,} bytes")
                    out.write(block)
                    progress.add(len(block))
            verify(unpacked[name], wanted[name].digest, wanted[name].size)
    except _DAMAGE as error:
        raise _refused(path, f"is damaged ({error})") from error
    if missing := [name for name in wanted if name not in unpacked]:
        raise _refused(path, f"lacks {', '.join(missing[:3])}")
    return unpacked


_DAMAGE = (
    zipfile.BadZipFile,
    tarfile.TarError,
    gzip.BadGzipFile,
    EOFError,
    zlib.error,
    lzma.LZMAError,
    RuntimeError,  # a zip with a password or an unknown compression
)


def _files(path: Path) -> Iterator[tuple[str, IO[bytes]]]:
    """Yields the name and content of each regular file; read it before the next one."""
    if path.suffix == ".zip":
        with zipfile.ZipFile(path) as archive:
            for info in archive.infolist():
                if stat.S_IFMT(info.external_attr >> 16) in (0, stat.S_IFREG):
                    with archive.open(info) as file:
                        yield info.filename, file
    else:
        with tarfile.open(path, "r|gz") as stream:
            for entry in stream:
                content = stream.extractfile(entry) if entry.isreg() else None
                if content:
                    yield entry.name, content


def _refused(path: Path, reason: str) -> UserError:
    return UserError(f"{path} {reason}: get the archive again from its publisher")
