"""Archives of published corpora, from the user's folder or a host.

Files are verified before they are used, and only listed members are unpacked.
Downloads from the first host that responds are retried and resumed.
"""

import shutil
import tarfile
import time
import zipfile
from collections.abc import Sequence
from pathlib import Path

from txl_jax.data.byte_ranges import checksum, reading
from txl_jax.data.catalog import Archive, Member
from txl_jax.errors import UserError
from txl_jax.report.log import say
from txl_jax.report.progress import Progress, waiting

# TFDS's downloader retries for minutes without a network and never times out.
TIMEOUTS = (5, 20)  # seconds to connect, seconds between two bytes
ATTEMPTS = 4  # at all hosts without a new byte, after pauses of 0, 0.5, 1 and 2 s
CHUNK_BYTES = 1 << 18  # an incomplete chunk is transferred again


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
        verify(path, archive.sha256)
    elif unpacked := _find_unpacked(archive, corpus, manual):
        bare = sum(not member.digest for member in archive.members)
        trust = f", {bare} of them without a published checksum" if bare else ""
        say(f"data: using the files of {corpus} in {manual}{trust}")
        for member in archive.members:
            verify(unpacked[member.path], member.digest)
        return unpacked
    else:
        path = downloads / archive.name
        if not path.exists() or checksum(path) != archive.sha256:
            files = f", or its files in {manual / corpus}," if archive.packed else ""
            fix = f"put {archive.name} in {manual}{files} and run again"
            path = _download(archive, downloads, fix)
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
            f"{missing[0]}: put all of them in {manual / corpus}, or {archive.name} in "
            f"{manual}"
        )
    return paths


def verify(path: Path, digest: str) -> None:
    """Raises UserError unless a file has the published checksum, if there is one."""
    algorithm, _, expected = digest.rpartition(":")
    with reading(path):
        actual = checksum(path, algorithm or "sha256") if digest else ""
    if actual != expected:
        raise UserError(
            f"{path} is truncated or a different file: its {algorithm or 'SHA-256'} is "
            f"{actual} instead of {expected}; get the file again"
        )


def _download(archive: Archive, folder: Path, fix: str) -> Path:
    """Downloads a file into a folder and returns its path.

    The file appears under its name only when it is complete and verified. Raises
    UserError, which ends with `fix`, if every host fails.
    """
    import requests  # importing it takes 0.1 s

    folder.mkdir(parents=True, exist_ok=True)
    part = folder / f"{archive.name}.part"
    reasons: dict[str, str] = {}
    most = attempt = 0
    say(f"data: downloading {archive.name}, {archive.size:,} bytes")
    while attempt < ATTEMPTS:
        time.sleep(2 ** (attempt - 2) if attempt else 0)
        for url in archive.urls:
            try:
                _try(archive, url, part)
                return part.rename(folder / archive.name)
            except requests.RequestException as error:
                reasons[url] = _cause(error)
        size = part.stat().st_size if part.exists() else 0
        attempt = 0 if size > most else attempt + 1
        most = max(most, size)
    tried = "; ".join(f"{url}: {reason}" for url, reason in reasons.items())
    raise UserError(f"cannot download {archive.name} ({tried}): {fix}")


def _try(archive: Archive, url: str, part: Path) -> None:
    """Fills `part` from one URL, continuing an earlier attempt, and verifies it."""
    import requests

    have = part.stat().st_size if part.exists() else 0
    headers = {"User-Agent": "txl_jax", "Accept-Encoding": "identity"}
    if 0 < have < archive.size:
        headers["Range"] = f"bytes={have}-"
    with requests.get(url, stream=True, timeout=TIMEOUTS, headers=headers) as response:
        if response.status_code not in (200, 206):
            raise requests.RequestException(f"HTTP status {response.status_code}")
        size = have if response.status_code == 206 else 0
        progress = Progress(f"data: {archive.name}", archive.size, size, in_bytes=True)
        with part.open("ab" if size else "wb") as file:
            for block in response.iter_content(CHUNK_BYTES):
                size += file.write(block)
                progress.add(len(block))
                if size > archive.size:
                    break
    if size < archive.size:
        raise requests.RequestException(
            f"ended after {size:,} of {archive.size:,} bytes"
        )
    if (actual := checksum(part)) != archive.sha256:
        part.unlink()
        raise requests.RequestException(
            f"its SHA-256 is {actual} instead of {archive.sha256}"
        )


def _cause(error: BaseException) -> str:
    """Returns the cause of an error that requests has wrapped."""
    while (inner := error.__cause__ or error.__context__) is not None:
        error = inner
    reason = error.strerror if isinstance(error, OSError) else ""
    return " ".join((reason or str(error) or type(error).__name__).split())


def _unpack(path: Path, members: Sequence[Member], folder: Path) -> dict[str, Path]:
    """Unpacks the members of a verified archive into a folder, and nothing else."""
    targets = {member.path: folder / member.path for member in members}
    with waiting(f"data: unpacking {path.name}"):
        if path.suffix == ".zip":
            with zipfile.ZipFile(path) as archive:
                archive.extractall(folder, targets)
            return targets
        with tarfile.open(path, "r|gz") as stream:
            for entry in filter(tarfile.TarInfo.isreg, stream):
                target = targets.get(entry.name.removeprefix("./"))
                if target and (content := stream.extractfile(entry)):
                    target.parent.mkdir(parents=True, exist_ok=True)
                    with target.open("wb") as out:
                        shutil.copyfileobj(content, out, 1 << 20)
    return targets
