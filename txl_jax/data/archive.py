"""Archives: the files of a published corpus, from the user's own folder or a host.

Whatever their origin, they are verified before a byte of them is used, and unpacked
only where and as far as the facts about them say.

Dims: none.
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
from txl_jax.data.pieces import SPLITS
from txl_jax.data.progress import Progress, Say
from txl_jax.errors import UserError

# Text shrinks 2 to 4 times; what unpacks to more than this is no corpus. The floor is
# for small files.
MOST_GROWTH = 20
LEAST_LIMIT = 1 << 20


@dataclass(frozen=True)
class Member:
    """A file of a corpus, by its path in the archive."""

    path: str
    splits: tuple[str, ...] = SPLITS  # those that it is, or that are cut from it
    digest: str = ""  # "<algorithm>:<hex>"; "" where none is published
    size: int = 0  # bytes; 0 where none is published


@dataclass(frozen=True)
class Archive:
    """A file to download and what to take out of it; a plain text is its own member."""

    remote: Remote
    members: tuple[Member, ...]

    @property
    def packed(self) -> bool:
        """Whether there is anything to unpack."""
        return self.remote.name.endswith((".zip", ".tar.gz", ".tgz"))


def fetch(
    archive: Archive, corpus: str, downloads: Path, scratch: Path, say: Say
) -> dict[str, Path]:
    """Returns where each member lies, by its path in the archive; all are verified.

    Tried in this order: the archive in the manual folder `<downloads>/manual`, its
    unpacked files there, an earlier download, the network. What is unpacked goes below
    `scratch`. Raises UserError for whatever is missing, damaged or another file.
    """
    manual = downloads / "manual"
    if archive.packed and (given := manual / archive.remote.name).exists():
        say(f"data: using {given}")
        return _unpack_verified(archive, given, scratch, say)
    if found := _unpacked(archive, corpus, manual):
        bare = sum(not member.digest for member in archive.members)
        trust = f", {bare} of them without a published checksum" if bare else ""
        say(f"data: using the files of {corpus} in {manual}{trust}")
        for member in archive.members:
            verify_member(found[member.path], member)
        return found
    kept = downloads / archive.remote.name
    if not kept.exists() or checksum(kept) != archive.remote.sha256:
        names = archive.remote.name
        if archive.packed and len(archive.members) <= 3:
            unpacked = ", ".join(member.path for member in archive.members)
            names += f" (or the files in it: {unpacked})"
        kept = download(
            archive.remote, downloads, f"put {names} in {manual} and run again", say
        )
    if not archive.packed:
        return {member.path: kept for member in archive.members}
    return unpack(kept, archive.members, scratch, say)


def _unpacked(archive: Archive, corpus: str, manual: Path) -> dict[str, Path]:
    """Returns the members that lie unpacked in the manual folder: all of them or {}."""
    found = {}
    for member in archive.members:
        places = (manual / member.path, manual / corpus / Path(member.path).name)
        for place in places:
            if place.is_file():
                found[member.path] = place
                break
    missing = [member.path for member in archive.members if member.path not in found]
    if not found or not missing:
        return found
    more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
    raise UserError(
        f"{manual} lacks {', '.join(missing[:3])}{more} of corpus {corpus!r} beside "
        f"{next(iter(found.values()))}: put them there, or {archive.remote.name}"
    )


def _unpack_verified(
    archive: Archive, path: Path, scratch: Path, say: Say
) -> dict[str, Path]:
    _verify(path, f"sha256:{archive.remote.sha256}", archive.remote.size)
    return unpack(path, archive.members, scratch, say)


def verify_member(path: Path, member: Member) -> None:
    """Raises UserError unless a file is the member, as far as its facts are known."""
    _verify(path, member.digest, member.size)


def _verify(path: Path, digest: str, size: int) -> None:
    mend = "get the file again"
    try:
        actual = path.stat().st_size
        if size and actual < size:
            raise UserError(
                f"{path} is truncated: it has {actual:,} bytes of {size:,}; {mend}"
            )
        algorithm, _, expected = digest.partition(":")
        got = checksum(path, algorithm) if digest else ""
    except OSError as error:
        raise UserError(
            f"cannot read {path} ({error.strerror}): make it readable"
        ) from error
    if got != expected:
        raise UserError(
            f"{path} is another file: its {algorithm.upper()} is {got} instead of "
            f"{expected}; {mend}"
        )


def unpack(
    path: Path, members: Sequence[Member], folder: Path, say: Say
) -> dict[str, Path]:
    """Unpacks the members of an archive below a folder, each verified.

    Raises UserError, before anything is written outside the folder or beyond a
    multiple of the archive's size, for an archive that is damaged, lacks a member,
    has one as a link or twice, or names anything outside of itself.
    """
    wanted = {member.path: member for member in members}
    limit = max(path.stat().st_size * MOST_GROWTH, LEAST_LIMIT)
    progress = Progress(say, f"unpacking {path.name}", 0)
    found: dict[str, Path] = {}
    total = 0
    with contextlib.closing(_entries(path)) as entries:
        for entry in entries:
            name = _checked(path, entry.name)
            total += entry.size
            if total > limit:
                raise _refused(path, f"unpacks to more than {limit:,} bytes")
            if name not in wanted:
                continue
            if name in found or not entry.regular:
                raise _refused(path, f"has {name} twice or as no plain file")
            target = folder / name
            target.parent.mkdir(parents=True, exist_ok=True)
            with target.open("wb") as out:
                for block in _read(path, entry):
                    out.write(block)
                    progress.add(len(block))
            verify_member(target, wanted[name])
            found[name] = target
    if missing := [name for name in wanted if name not in found]:
        raise _refused(path, f"lacks {', '.join(missing[:3])}")
    return found


@dataclass(frozen=True)
class _Entry:
    name: str
    size: int  # bytes, as the archive says; reading ends there
    regular: bool  # neither a folder, a link nor a device
    open: Callable[[], IO[bytes] | None]


_DAMAGE = (
    zipfile.BadZipFile,
    tarfile.TarError,
    gzip.BadGzipFile,
    EOFError,
    zlib.error,
    lzma.LZMAError,
    RuntimeError,  # a zip that wants a password or an unknown compression
)


def _entries(path: Path) -> Generator[_Entry, None, None]:
    """Yields what an archive lists; an entry is to be read before the next one."""
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
    """Yields an entry in blocks; raises UserError if there is not all of it."""
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
    """Returns an entry's name without "./"; raises UserError for one that leads out."""
    parts = PurePosixPath(name.replace("\\", "/")).parts
    if name.startswith(("/", "\\")) or ".." in parts or ":" in "".join(parts[:1]):
        raise _refused(path, f"names a file outside of itself, {name!r}")
    return "/".join(parts)


def _refused(path: Path, why: str) -> UserError:
    return UserError(f"{path} {why}: get the archive again from where it is published")
