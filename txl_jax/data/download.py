"""Downloads: a file from the first host that has it, retried, resumed and verified.

TFDS's own downloader retries for minutes without a network and never times out; this
one gives up after seconds in which no byte arrived.

Dims: none.
"""

import hashlib
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from txl_jax.data.progress import Progress, Say
from txl_jax.errors import UserError

TIMEOUTS = (5, 20)  # seconds to connect, seconds between two bytes
PATIENCE_SECONDS = 5.0  # without a new byte, over all hosts and their retries
CHUNK_BYTES = 1 << 18  # the last, broken one of a transfer is asked for again
FIRST_PAUSE_SECONDS = 0.5  # doubled after each round of hosts


def checksum(path: Path, algorithm: str = "sha256") -> str:
    """Returns a file's digest in hex; "git" is the id that git gives to a file."""
    with path.open("rb") as file:
        if algorithm == "git":
            start = f"blob {path.stat().st_size}\0".encode()
            return hashlib.file_digest(file, lambda: hashlib.sha1(start)).hexdigest()
        return hashlib.file_digest(file, algorithm).hexdigest()


@dataclass(frozen=True)
class Remote:
    """A file as its hosts offer it, the same bytes at each."""

    name: str  # what it is called on disk
    urls: tuple[str, ...]  # in the order of trying; http after https
    sha256: str  # always known: http alone proves nothing
    size: int  # bytes


class _Broken(Exception):
    """One try failed; `for_good` when the same URL would fail again."""

    def __init__(self, reason: str, for_good: bool) -> None:
        super().__init__(reason)
        self.for_good = for_good


def download(remote: Remote, folder: Path, mend: str, say: Say) -> Path:
    """Downloads a file into a folder and returns its path there.

    It appears under its name only when whole and verified. Raises UserError, which
    ends with `mend`, when no host gives it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    part = folder / f"{remote.name}.part"
    urls, reasons = list(remote.urls), dict[str, str]()
    most, pause = 0, FIRST_PAUSE_SECONDS
    deadline = time.monotonic() + PATIENCE_SECONDS
    say(f"data: downloading {remote.name}, {remote.size:,} bytes")
    while urls:
        for url in tuple(urls):
            try:
                _try(remote, url, part, say)
            except _Broken as error:
                reasons[url] = str(error)
                if error.for_good:
                    urls.remove(url)
                if part.exists() and part.stat().st_size > most:
                    most = part.stat().st_size
                    deadline = time.monotonic() + PATIENCE_SECONDS
                    pause = FIRST_PAUSE_SECONDS
            else:
                return part.rename(folder / remote.name)
        if time.monotonic() + pause > deadline:
            break
        time.sleep(pause)
        pause *= 2
    tried = "; ".join(f"{url}: {reason}" for url, reason in reasons.items())
    raise UserError(f"cannot download {remote.name} ({tried}): {mend}")


def _try(remote: Remote, url: str, part: Path, say: Say) -> None:
    """Fills `part` from one URL, continued where an earlier try broke off."""
    import requests  # a tenth of a second that the facts about a corpus need not pay

    have = part.stat().st_size if part.exists() else 0
    if have >= remote.size:
        part.unlink()
        have = 0
    headers = {"User-Agent": "txl_jax", "Accept-Encoding": "identity"}
    if have:
        headers["Range"] = f"bytes={have}-"
    try:
        with requests.get(
            url, stream=True, timeout=TIMEOUTS, headers=headers
        ) as response:
            _fill(remote, response, part, have, say)
    except requests.RequestException as error:
        raise _Broken(_cause(error), for_good=False) from error
    if (got := checksum(part)) != remote.sha256:
        part.unlink()
        raise _Broken(
            f"its SHA-256 is {got} instead of {remote.sha256}", for_good=not have
        )


def _fill(remote: Remote, response: Any, part: Path, have: int, say: Say) -> None:
    if (status := response.status_code) not in (200, 206):
        raise _Broken(f"HTTP status {status}", for_good=400 <= status < 500)
    size = have if status == 206 else 0
    progress = Progress(say, remote.name, remote.size, size)
    with part.open("ab" if size else "wb") as file:
        for block in response.iter_content(CHUNK_BYTES):
            size += len(block)
            if size > remote.size:
                break
            file.write(block)
            progress.add(len(block))
    if size > remote.size:
        part.unlink()
        raise _Broken(f"it has more than {remote.size:,} bytes", for_good=True)
    if size < remote.size:
        raise _Broken(f"ended after {size:,} of {remote.size:,} bytes", for_good=False)


def _cause(error: BaseException) -> str:
    """Returns the last words of a chain of errors: requests wraps what happened."""
    while (inner := error.__cause__ or error.__context__) is not None:
        error = inner
    reason = error.strerror if isinstance(error, OSError) else ""
    return " ".join((reason or str(error) or type(error).__name__).split())
