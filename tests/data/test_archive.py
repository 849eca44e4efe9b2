"""Files of a corpus come from the user or a host, and are verified before use."""

import http.server
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.data import miniatures
from tests.support.processes import LIMIT_SECONDS
from tests.support.refusal import refused
from txl_jax.data import archive as archives
from txl_jax.data.archive import fetch
from txl_jax.data.byte_ranges import checksum
from txl_jax.data.catalog import Archive


def get(archive: Archive, data_dir: Path) -> dict[str, Path]:
    downloads, scratch = data_dir / "downloads", data_dir / "scratch"
    return fetch(archive, "wikitext2", downloads, scratch)


@pytest.fixture
def wikitext(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Archive:
    """The miniature of WikiText-2, whose archive is in the manual folder."""
    return miniatures.install("wikitext2", tmp_path, monkeypatch).archives[0]


def manual(data_dir: Path, name: str = "wikitext-2-v1.zip") -> Path:
    return data_dir / "downloads" / "manual" / name


def test_a_local_archive_is_verified(wikitext: Archive, tmp_path: Path) -> None:
    unpacked = get(wikitext, tmp_path)
    for path, target in unpacked.items():
        assert target == tmp_path / "scratch" / path
        assert target.read_bytes() == miniatures.text(path)
    assert set(target.parent.iterdir()) == set(unpacked.values()), "only the members"
    manual(tmp_path).write_bytes(manual(tmp_path).read_bytes()[:-1])
    actual = checksum(manual(tmp_path))
    with refused(f"{manual(tmp_path)} .*SHA-256 is {actual} .* {wikitext.sha256}"):
        get(wikitext, tmp_path)


@pytest.mark.parametrize("folder", ["wikitext-2", "wikitext2"])
def test_unpacked_files_are_verified(
    wikitext: Archive, tmp_path: Path, folder: str
) -> None:
    manual(tmp_path).unlink()
    place = manual(tmp_path, folder)
    place.mkdir()
    for member in wikitext.members:
        content = miniatures.text(member.path)
        (place / Path(member.path).name).write_bytes(content)
    assert set(get(wikitext, tmp_path).values()) == set(place.iterdir())
    valid = wikitext.members[1]
    (place / "wiki.valid.tokens").write_bytes(b"x")
    with refused(f"wiki.valid.tokens is .* a different file: .*{valid.digest}"):
        get(wikitext, tmp_path)
    (place / "wiki.train.tokens").unlink()
    # No host has it, so a download would give another message.
    with refused("some files of corpus 'wikitext2' and lacks wikitext-2/wiki.train"):
        get(wikitext, tmp_path)


def test_checksum_of_a_git_object(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"hello\n")
    expected = "ce013625030ba8dba906f756967f9e9ca394464a"  # of git hash-object
    assert checksum(tmp_path / "a", "git") == expected


class Host(http.server.BaseHTTPRequestHandler):
    """Serves `data` at every path; `script` lists the faults of its responses."""

    url: str
    data: bytes
    script: list[str]
    ranges: list[str]

    def do_GET(self) -> None:
        """Responds with the file, a part of it, another file or an error."""
        first = self.headers.get("Range", "bytes=0-")
        self.ranges.append(first)
        fault = self.script.pop(0) if self.script else ""
        if fault.isdigit():
            self.send_error(int(fault))
            return
        data = b"x" * len(self.data) if fault == "other" else self.data
        data = data * 2 if fault == "long" else data
        start = 0 if fault == "whole" else int(first[len("bytes=") : -1])
        self.send_response(206 if start else 200)
        self.send_header("Content-Length", str(len(data) - start))
        self.end_headers()
        stop = (start + len(data)) // 2 if fault == "cut" else len(data)
        self.wfile.write(data[start:stop])

    def log_message(self, *_: object) -> None:
        """Keeps the terminal quiet."""


@pytest.fixture
def host() -> Iterator[type[Host]]:
    Host.script, Host.ranges = [], []
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Host) as server:
        Host.url = f"http://127.0.0.1:{server.server_port}/"
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield Host
        server.shutdown()
        thread.join()


@pytest.fixture
def hosted(wikitext: Archive, host: type[Host], tmp_path: Path) -> Archive:
    """The miniature, which only the host has."""
    host.data = manual(tmp_path).read_bytes()
    manual(tmp_path).unlink()
    return replace(wikitext, urls=(host.url,))


@pytest.fixture(autouse=True)
def small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Downloads in small chunks, without pauses."""
    monkeypatch.setattr(archives, "time", SimpleNamespace(sleep=lambda _: None))
    monkeypatch.setattr(archives, "TIMEOUTS", (LIMIT_SECONDS, LIMIT_SECONDS))
    monkeypatch.setattr(archives, "CHUNK_BYTES", 64)


@pytest.mark.parametrize(
    "script, requests",
    [
        ([], 1),
        (["503", "500"], 3),
        (["cut", "cut", "cut"], 4),  # continues where the connection ended
        (["cut", "whole"], 2),  # from the start, where the host ignores the range
        (["cut", "other"], 3),  # a wrong rest is deleted and fetched again
    ],
)
def test_download_is_retried_and_resumed(
    hosted: Archive, host: type[Host], tmp_path: Path, script: list[str], requests: int
) -> None:
    host.script = list(script)
    for path, target in get(hosted, tmp_path).items():
        assert target.read_bytes() == miniatures.text(path)
    assert len(host.ranges) == requests
    names = {path.name for path in (tmp_path / "downloads").iterdir()}
    assert names == {"manual", "wikitext-2-v1.zip"}
    if script[:2] == ["cut", "cut"]:
        assert len(set(host.ranges)) == requests, "each starts where the last ended"
    get(hosted, tmp_path)
    assert len(host.ranges) == requests  # the download is kept
    (tmp_path / "downloads" / "wikitext-2-v1.zip").write_bytes(b"damaged")
    get(hosted, tmp_path)
    assert len(host.ranges) == requests + 1


def test_next_host_is_tried(hosted: Archive, host: type[Host], tmp_path: Path) -> None:
    urls = "http://127.0.0.1:1/a", f"{host.url}gone", f"{host.url}other", host.url
    host.script = ["404", "other"]
    assert len(get(replace(hosted, urls=urls), tmp_path)) == 3
    assert len(host.ranges) == 3


@pytest.mark.parametrize(
    "fault, message",
    [
        ("404", "HTTP status 404"),
        ("other", "its SHA-256 is"),
        ("long", "its SHA-256 is"),
        ("", "no-such-host.invalid"),
    ],
)
def test_failed_download_names_the_manual_folder(
    hosted: Archive, host: type[Host], tmp_path: Path, fault: str, message: str
) -> None:
    host.script = [fault] * 99
    url = host.url if fault else "http://no-such-host.invalid/a.zip"
    folder = manual(tmp_path).parent
    fix = f"put wikitext-2-v1.zip in {folder}, or its files in {folder / 'wikitext2'}"
    with refused(f"{message}.*{fix}, and run again"):
        get(replace(hosted, urls=(url,)), tmp_path)
    assert len(host.ranges) == (4 if fault else 0), "attempts"
    assert not list((tmp_path / "downloads").glob("*.zip*"))
