"""Downloads from the first host that responds, retried, resumed and verified.

TFDS's downloader retries for minutes without a network and never times out; this one
gives up after a few seconds in which no byte has arrived.
"""

import hashlib
import time
from pathlib import Path
from typing import Any

from txl_jax.data.catalog import Archive
from txl_jax.errors import UserError
from txl_jax.report.log import say
from txl_jax.report.progress import Progress

TIMEOUTS = (5, 20)  # seconds to connect, seconds between two bytes
PATIENCE_SECONDS = 5.0  # without a new byte, over all hosts and retries
CHUNK_BYTES = 1 << 18  # an incomplete chunk is transferred again
FIRST_PAUSE_SECONDS = 0.5  # doubled after each round of hosts


def checksum(path: Path, algorithm: str = "sha256") -> str:
    """Returns a file's checksum in hexadecimal; "git" is the hash of a git object."""
    with path.open("rb") as file:
        if algorithm == "git":
            start = f"blob {path.stat().st_size}\0".encode()
            return hashlib.file_digest(file, lambda: hashlib.sha1(start)).hexdigest()
        return hashlib.file_digest(file, algorithm).hexdigest()


class _Broken(Exception):
    """A failed attempt; `permanent` if a retry of the URL would fail too."""

    def __init__(self, reason: str, permanent: bool) -> None:
        super().__init__(reason)
        self.permanent = permanent


def download(archive: Archive, folder: Path, fix: str) -> Path:
    """Downloads a file into a folder and returns its path.

    The file appears under its name only when it is complete and verified. Raises
    UserError, which ends with `fix`, if every host fails.
    """
    folder.mkdir(parents=True, exist_ok=True)
    part = folder / f"{archive.name}.part"
    urls, reasons = list(archive.urls), dict[str, str]()
    most, pause = 0, FIRST_PAUSE_SECONDS
    deadline = time.monotonic() + PATIENCE_SECONDS
    say(f"data: downloading {archive.name}, {archive.size:,} bytes")
    while urls:
        for url in tuple(urls):
            try:
                _try(archive, url, part)
            except _Broken as error:
                reasons[url] = str(error)
                if error.permanent:
                    urls.remove(url)
                if part.exists() and part.stat().st_size > most:
                    most = part.stat().st_size
                    deadline = time.monotonic() + PATIENCE_SECONDS
                    pause = FIRST_PAUSE_SECONDS
            else:
                return part.rename(folder / archive.name)
        if time.monotonic() + pause > deadline:
            break
        time.sleep(pause)
        pause *= 2
    tried = "; ".join(f"{url}: {reason}" for url, reason in reasons.items())
    raise UserError(f"cannot download {archive.name} ({tried}): {fix}")


def _try(archive: Archive, url: str, part: Path) -> None:
    """Fills `part` from one URL, continuing an earlier attempt."""
    import requests  # importing it takes 0.1 s

    have = part.stat().st_size if part.exists() else 0
    if have >= archive.size:
        part.unlink()
        have = 0
    headers = {"User-Agent": "txl_jax", "Accept-Encoding": "identity"}
    if have:
        headers["Range"] = f"bytes={have}-"
    try:
        with requests.get(
            url, stream=True, timeout=TIMEOUTS, headers=headers
        ) as response:
            _fill(archive, response, part, have)
    except requests.RequestException as error:
        raise _Broken(_cause(error), permanent=False) from error
    if (actual := checksum(part)) != archive.sha256:
        part.unlink()
        raise _Broken(
            f"its SHA-256 is {actual} instead of {archive.sha256}", permanent=not have
        )


def _fill(archive: Archive, response: Any, part: Path, have: int) -> None:
    if (status := response.status_code) not in (200, 206):
        raise _Broken(f"HTTP status {status}", permanent=400 <= status < 500)
    size = have if status == 206 else 0
    progress = Progress(f"data: {archive.name}", archive.size, size, in_bytes=True)
    with part.open("ab" if size else "wb") as file:
        for block in response.iter_content(CHUNK_BYTES):
            size += len(block)
            if size > archive.size:
                break
            file.write(block)
            progress.add(len(block))
    if size > archive.size:
        part.unlink()
        raise _Broken(f"it has more than {archive.size:,} bytes", permanent=True)
    if size < archive.size:
        raise _Broken(
            f"ended after {size:,} of {archive.size:,} bytes", permanent=False
        )


def _cause(error: BaseException) -> str:
    """Returns the cause of an error that requests has wrapped."""
    while (inner := error.__cause__ or error.__context__) is not None:
        error = inner
    reason = error.strerror if isinstance(error, OSError) else ""
    return " ".join((reason or str(error) or type(error).__name__).split())
