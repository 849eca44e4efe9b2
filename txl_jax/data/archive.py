"""Archives of published corpora, from the user's folder or a host.

Files are verified before they are used, and only listed members are unpacked.
"""

import contextlib
import gzip
import lzma
import stat
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath
from typing import IO

from txl_jax.data.download import Remote, checksum, download
from txl_jax.data.options import SPLITS
from txl_jax.errors import UserError

# Text is compressed 2 to 4 times: an archive that expands much more is refused. The
# minimum is for small archives.
MAX_EXPANSION = 20
LEAST_LIMIT = 1 << 20


@dataclass(frozen=True)
class Member:
    """A file of a corpus, by its path in the archive."""

    path: str
    splits: tuple[str, ...] = SPLITS  # cut from it if there are several
    digest: str = ""  # "<algorithm>:<hex>", or SHA-256; "" = not published
    size: int = 0  # bytes; 0 = not published


@dataclass(frozen=True)
class Archive:
    """A file to download and its members; an unpacked text is its own member."""

    remote: Remote
    members: tuple[Member, ...]

    @property
    def packed(self) -> bool:
        """True if the file has to be unpacked."""
        return self.remote.name.endswith((".zip", ".tar.gz", ".tgz"))


def fetch(
    archive: Archive,
    corpus: str,
    downloads: Path,
    scratch: Path,
    say: Callable[[str], None],
) -> dict[str, Path]:
    """Returns the verified file of each member, by its path in the archive.

    The sources, in this order, are the archive in `<downloads>/manual`, its unpacked
    files there, an earlier download and the network. Archives are unpacked in
    `scratch`. Raises UserError for a file that is missing, damaged or a different one.
    """
    manual = downloads / "manual"
    if archive.packed and (path := manual / archive.remote.name).exists():
        say(f"data: using {path}")
        verify(path, archive.remote.sha256, archive.remote.size)
        return unpack(path, archive.members, scratch, say)
    if unpacked := _find_unpacked(archive, corpus, manual):
        bare = sum(not member.digest for member in archive.members)
        trust = f", {bare} of them without a published checksum" if bare else ""
        say(f"data: using the files of {corpus} in {manual}{trust}")
        for member in archive.members:
            verify(unpacked[member.path], member.digest, member.size)
        return unpacked
    kept = downloads / archive.remote.name
    if not kept.exists() or checksum(kept) != archive.remote.sha256:
        names = archive.remote.name
        if archive.packed and len(archive.members) <= 3:
            inside = ", ".join(member.path for member in archive.members)
            names += f" (or the files in it: {inside})"
        kept = download(
            archive.remote, downloads, f"put {names} in {manual} and run again", say
        )
    if not archive.packed:
        return {member.path: kept for member in archive.members}
    return unpack(kept, archive.members, scratch, say)


def _find_unpacked(archive: Archive, corpus: str, manual: Path) -> dict[str, Path]:
    """Returns the members in the manual folder: all of them or none."""
    paths = {}
    for member in archive.members:
        places = (manual / member.path, manual / corpus / Path(member.path).name)
        for place in places:
            if place.is_file():
                paths[member.path] = place
                break
    missing = [member.path for member in archive.members if member.path not in paths]
    if not paths or not missing:
        return paths
    more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
    raise UserError(
        f"{manual} lacks {', '.join(missing[:3])}{more} of corpus {corpus!r} beside "
        f"{next(iter(paths.values()))}: put them there, or {archive.remote.name}"
    )


def verify(path: Path, digest: str, size: int) -> None:
    """Raises UserError unless a file has the published size and checksum."""
    try:
        actual = path.stat().st_size
        if size and actual < size:
            raise UserError(
                f"{path} is truncated: it has {actual:,} bytes of {size:,}; get the "
                "file again"
            )
        algorithm, _, expected = digest.rpartition(":")
        algorithm = algorithm or "sha256"
        actual_digest = checksum(path, algorithm) if digest else ""
    except OSError as error:
        raise UserError(
            f"cannot read {path} ({error.strerror}): make it readable"
        ) from error
    if actual_digest != expected:
        raise UserError(
            f"{path} is a different file: its {algorithm.upper()} is {actual_digest} "
            f"instead of {expected}; get the file again"
        )


def unpack(
    path: Path, members: Sequence[Member], folder: Path, say: Callable[[str], None]
) -> dict[str, Path]:
    """Unpacks the members of an archive into a folder and verifies them.

    Raises UserError for an archive that is damaged, lacks a member, has one twice or as
    a link, expands to more than MAX_EXPANSION times its size, or has a path outside of
    the folder; nothing is written there.
    """
    from txl_jax.report.progress import Progress  # imports jax

    wanted = {member.path: member for member in members}
    limit = max(path.stat().st_size * MAX_EXPANSION, LEAST_LIMIT)
    progress = Progress(f"data: unpacking {path.name}", in_bytes=True, say=say)
    unpacked: dict[str, Path] = {}
    total = 0
    with contextlib.closing(_entries(path)) as entries:
        for entry in entries:
            name = _checked(path, entry.name)
            total += entry.size
            if total > limit:
                raise _refused(path, f"unpacks to more than {limit:,} bytes")
            if name not in wanted:
                continue
            if name in unpacked or not entry.regular:
                raise _refused(path, f"has {name} twice or not as a regular file")
            target = folder / name
            target.parent.mkdir(parents=True, exist_ok=True)
            with target.open("wb") as out:
                for block in _read(path, entry):
                    out.write(block)
                    progress.add(len(block))
            verify(target, wanted[name].digest, wanted[name].size)
            unpacked[name] = target
    if missing := [name for name in wanted if name not in unpacked]:
        raise _refused(path, f"lacks {', '.join(missing[:3])}")
    return unpacked


@dataclass(frozen=True)
class _Entry:
    name: str
    size: int  # bytes that the archive declares; reading ends there
    regular: bool  # neither a folder, a link nor a device
    open: Callable[[], IO[bytes] | None]


_DAMAGE = (
    zipfile.BadZipFile,
    tarfile.TarError,
    gzip.BadGzipFile,
    EOFError,
    zlib.error,
    lzma.LZMAError,
    RuntimeError,  # a zip with a password or an unknown compression
)


def _entries(path: Path) -> Generator[_Entry, None, None]:
    """Yields the entries of an archive; read each before the next one."""
    try:
        if path.suffix == ".zip":
            yield from _zip_entries(path)
        else:
            yield from _tar_entries(path)
    except _DAMAGE as error:
        raise _refused(path, f"is damaged ({error})") from error


def _zip_entries(path: Path) -> Iterator[_Entry]:
    with zipfile.ZipFile(path) as file:
        for info in file.infolist():
            kind = stat.S_IFMT(info.external_attr >> 16)
            regular = kind in (0, stat.S_IFREG) and not info.is_dir()
            opened = partial(file.open, info)
            yield _Entry(info.filename, info.file_size, regular, opened)


def _tar_entries(path: Path) -> Iterator[_Entry]:
    with tarfile.open(path, "r:gz") as file:
        for info in file:
            opened = partial(file.extractfile, info)
            yield _Entry(info.name, info.size, info.isreg(), opened)


def _read(path: Path, entry: _Entry) -> Iterator[bytes]:
    """Yields an entry in blocks; raises UserError if it is incomplete."""
    left = entry.size
    try:
        with entry.open() or contextlib.nullcontext() as file:
            while file and (block := file.read(min(left, 1 << 20))):
                left -= len(block)
                yield block
    except _DAMAGE as error:
        raise _refused(path, f"is damaged at {entry.name} ({error})") from error
    if left:
        raise _refused(path, f"is damaged at {entry.name} ({left:,} bytes missing)")


def _checked(path: Path, name: str) -> str:
    """Returns an entry's path without "./"; raises UserError for one that escapes."""
    parts = PurePosixPath(name.replace("\\", "/")).parts
    if name.startswith(("/", "\\")) or ".." in parts or ":" in "".join(parts[:1]):
        raise _refused(path, f"has a path outside of its folder, {name!r}")
    return "/".join(parts)


def _refused(path: Path, reason: str) -> UserError:
    return UserError(f"{path} {reason}: get the archive again from its publisher")
