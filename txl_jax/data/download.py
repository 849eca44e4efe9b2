"""Downloads from the first host that responds, retried, resumed and verified.

TFDS's downloader retries for minutes without a network and never times out; this one
gives up after a few seconds in which no byte has arrived.
"""

import hashlib
import time
from pathlib import Path

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


def download(archive: Archive, folder: Path, fix: str) -> Path:
    """Downloads a file into a folder and returns its path.

    The file appears under its name only when it is complete and verified. Raises
    UserError, which ends with `fix`, if every host fails.
    """
    import requests  # importing it takes 0.1 s

    folder.mkdir(parents=True, exist_ok=True)
    part = folder / f"{archive.name}.part"
    reasons: dict[str, str] = {}
    most, pause = 0, FIRST_PAUSE_SECONDS
    deadline = time.monotonic() + PATIENCE_SECONDS
    say(f"data: downloading {archive.name}, {archive.size:,} bytes")
    while True:
        for url in archive.urls:
            try:
                _try(archive, url, part)
            except requests.RequestException as error:
                reasons[url] = _cause(error)
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
