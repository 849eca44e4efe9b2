"""A corpus's files come from the user or a host, verified, or are refused in a line."""

import http.server
import io
import os
import tarfile
import threading
import time
import zipfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.data import miniatures
from tests.support.refusal import quiet, refused
from txl_jax.data import archive, corpora, download
from txl_jax.data.archive import Archive, Member, fetch, unpack
from txl_jax.errors import UserError

# The real corpora, where somebody has them; the repository has none.
DATA = Path(os.environ.get("TXL_JAX_TEST_DATA", "no-such-folder"))


def get(given: Archive, data_dir: Path, corpus: str = "wikitext2") -> dict[str, Path]:
    return fetch(given, corpus, data_dir / "downloads", data_dir / "scratch", quiet)


def refuse(
    given: Archive, data_dir: Path, *parts: str, corpus: str = "wikitext2"
) -> None:
    with pytest.raises(UserError) as caught:
        get(given, data_dir, corpus)
    message = str(caught.value)
    assert "\n" not in message
    for part in parts:
        assert part in message


@pytest.fixture
def wikitext(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Archive:
    """Holds the miniature of WikiText-2, whose archive is in the manual folder."""
    (only,) = miniatures.install("wikitext2", tmp_path, monkeypatch).archives
    return only


def manual(data_dir: Path, name: str = "wikitext-2-v1.zip") -> Path:
    return data_dir / "downloads" / "manual" / name


def lay_out(given: Archive, folder: Path) -> None:
    for member in given.members:
        path = folder / Path(member.path).name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(miniatures.text("wikitext2", member.path))


def test_archive_of_the_user_is_verified(wikitext: Archive, tmp_path: Path) -> None:
    for path, where in get(wikitext, tmp_path).items():
        assert where == tmp_path / "scratch" / path
        assert where.read_bytes() == miniatures.text("wikitext2", path)
    data = manual(tmp_path).read_bytes()
    manual(tmp_path).write_bytes(data[:-1])
    refuse(wikitext, tmp_path, "wikitext-2-v1.zip is truncated", f"{len(data):,}")
    manual(tmp_path).write_bytes(data[:-1] + b"x")
    got = download.checksum(manual(tmp_path))
    refuse(wikitext, tmp_path, str(manual(tmp_path)), got, wikitext.remote.sha256)


@pytest.mark.parametrize("folder", ["wikitext-2", "wikitext2"])
def test_unpacked_files_are_verified(
    wikitext: Archive, tmp_path: Path, folder: str
) -> None:
    manual(tmp_path).unlink()
    place = manual(tmp_path, folder)
    lay_out(wikitext, place)
    assert set(get(wikitext, tmp_path).values()) == set(place.iterdir())
    assert not (tmp_path / "scratch").exists()
    (place / "wiki.valid.tokens").write_bytes(b"x" * wikitext.members[1].size)
    digest = wikitext.members[1].digest
    refuse(
        wikitext, tmp_path, "wiki.valid.tokens is a different file", "SHA256", digest
    )
    (place / "wiki.train.tokens").unlink()
    began = time.monotonic()
    refuse(wikitext, tmp_path, "lacks wikitext-2/wiki.train.tokens", "'wikitext2'")
    assert time.monotonic() - began < 1  # no network was tried


def test_real_files_of_wikitext(tmp_path: Path) -> None:
    if not DATA.is_dir():
        pytest.skip("TXL_JAX_TEST_DATA names no folder with the real files")
    folder = manual(tmp_path, "wikitext2")
    folder.parent.mkdir(parents=True)
    folder.symlink_to(DATA / "wikitext2")
    (real,) = corpora.CORPORA["wikitext2"].archives
    assert len(get(real, tmp_path)) == 3
    manual(tmp_path, "wikitext-103").symlink_to(DATA / "wikitext103_heldout")
    (real,) = corpora.CORPORA["wikitext103"].archives
    missing = "lacks wikitext-103/wiki.train.tokens of corpus 'wikitext103'"
    refuse(real, tmp_path, missing, corpus="wikitext103")


@pytest.mark.parametrize(
    "algorithm, expected",
    [
        ("md5", "b1946ac92492d2347c6235b4d2611184"),
        ("sha1", "f572d396fae9206628714fb2ce00f72e94f2258f"),
        ("git", "ce013625030ba8dba906f756967f9e9ca394464a"),  # git hash-object
    ],
)
def test_checksums(tmp_path: Path, algorithm: str, expected: str) -> None:
    (tmp_path / "a").write_bytes(b"hello\n")
    assert download.checksum(tmp_path / "a", algorithm) == expected


def tar(*entries: tuple[str, bytes, bytes]) -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w:gz") as file:
        for name, kind, content in entries:
            info = tarfile.TarInfo(name)
            info.type, info.linkname = kind, "/etc/passwd"
            info.size = len(content)
            file.addfile(info, io.BytesIO(content))
    return stream.getvalue()


def zipped(*entries: tuple[str, int, bytes]) -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as file:
        for name, mode, content in entries:
            info = zipfile.ZipInfo(name)
            info.external_attr = mode << 16
            file.writestr(info, content, zipfile.ZIP_DEFLATED)
    return stream.getvalue()


FILE, LINK = tarfile.REGTYPE, tarfile.SYMTYPE
GOOD = b"".join(b"%d, " % number for number in range(20_000))
BOMB = bytes(archive.LEAST_LIMIT + 1)


@pytest.mark.parametrize(
    "name, data, message",
    [
        (
            "a.tar.gz",
            tar(("../b", FILE, b"x"), ("a", FILE, b"x")),
            "outside of its folder",
        ),
        (
            "a.tar.gz",
            tar(("/b", FILE, b"x"), ("a", FILE, b"x")),
            "outside of its folder",
        ),
        ("a.tar.gz", tar(("a", LINK, b"")), "a twice or not as a regular file"),
        ("a.tar.gz", tar(("a", tarfile.LNKTYPE, b"")), "not as a regular file"),
        ("a.tar.gz", tar(("a", tarfile.DIRTYPE, b"")), "not as a regular file"),
        ("a.tar.gz", tar(("a", FILE, b"x"), ("./a", FILE, b"y")), "has a twice"),
        ("a.tar.gz", tar(("b", FILE, BOMB), ("a", FILE, b"x")), "more than 1,048,576"),
        ("a.tar.gz", tar(("b", FILE, b"x")), "lacks a"),
        ("a.tar.gz", tar(("a", FILE, GOOD))[:-3000], "is damaged"),
        ("a.tar.gz", b"no archive", "is damaged"),
        ("a.zip", zipped(("../b", 0, b"x"), ("a", 0, b"x")), "outside of its folder"),
        ("a.zip", zipped(("C:\\b", 0, b"x"), ("a", 0, b"x")), "outside of its folder"),
        ("a.zip", zipped(("a", 0o120777, b"/etc/passwd")), "not as a regular file"),
        ("a.zip", zipped(("a/", 0, b"")), "not as a regular file"),
        ("a.zip", zipped(("a", 0, BOMB)), "unpacks to more than 1,048,576 bytes"),
        ("a.zip", zipped(("b", 0, b"x")), "lacks a"),
        ("a.zip", zipped(("a", 0, GOOD))[:-10], "is damaged"),
        (
            "a.zip",
            zipped(("a", 0, GOOD))[:200] + bytes(50) + zipped(("a", 0, GOOD))[250:],
            "is damaged at a",
        ),
        ("a.zip", b"no archive", "is damaged"),
    ],
    # Not by their bytes, which have the time in them.
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_hostile_and_damaged_archives_are_refused(
    tmp_path: Path, name: str, data: bytes, message: str
) -> None:
    (tmp_path / name).write_bytes(data)
    scratch = tmp_path / "one" / "scratch"
    with refused(message) as caught:
        unpack(tmp_path / name, (Member("a"),), scratch, quiet)
    assert name in str(caught.value)
    written = {path.name for path in tmp_path.rglob("*") if path.is_file()}
    assert written <= {name, "a"}
    assert not any(path.stat().st_size > len(GOOD) for path in tmp_path.rglob("a"))


def test_member_of_an_archive_is_verified(tmp_path: Path) -> None:
    (tmp_path / "a.zip").write_bytes(zipped(("a", 0, b"hello\n"), ("b", 0, b"")))
    good = Member("a", digest="md5:b1946ac92492d2347c6235b4d2611184", size=6)
    assert unpack(tmp_path / "a.zip", (good,), tmp_path / "s", quiet)
    with refused("a is truncated: it has 6 bytes of 7"):
        bad = replace(good, size=7)
        unpack(tmp_path / "a.zip", (bad,), tmp_path / "s", quiet)
    with refused("a different file: its MD5 is b1946"):
        bad = replace(good, digest="md5:b1946ac92492d2347c6235b4d2611185")
        unpack(tmp_path / "a.zip", (bad,), tmp_path / "s", quiet)


class Host(http.server.ThreadingHTTPServer):
    """Serves `data` at every path; `script` says what becomes of each request."""

    def __init__(self, data: bytes) -> None:
        super().__init__(("127.0.0.1", 0), Answer)
        self.data = data
        self.script: list[str] = []
        self.ranges: list[str] = []

    def url(self, path: str = "") -> str:
        """Returns an address at which it answers."""
        return f"http://127.0.0.1:{self.server_port}/{path}"


class Answer(http.server.BaseHTTPRequestHandler):
    """Answers with the whole file, a part of it, another one or an error."""

    server: Host

    def do_GET(self) -> None:
        """Does what the script says next."""
        asked = self.headers.get("Range", "")
        self.server.ranges.append(asked)
        what = self.server.script.pop(0) if self.server.script else ""
        if what.isdigit():
            self.send_error(int(what))
            return
        data = b"x" * len(self.server.data) if what == "other" else self.server.data
        data = data * 2 if what == "long" else data
        start = 0
        if asked and what != "whole":
            start = int(asked.removeprefix("bytes=").removesuffix("-"))
        self.send_response(206 if start else 200)
        self.send_header("Content-Length", str(len(data) - start))
        self.end_headers()
        stop = (start + len(data)) // 2 if what == "cut" else len(data)
        self.wfile.write(data[start:stop])

    def log_message(self, *_: object) -> None:
        """Keeps the terminal quiet."""


@pytest.fixture
def host() -> Iterator[Host]:
    with Host(miniatures.packed("wikitext2")["wikitext-2-v1.zip"]) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture
def hosted(wikitext: Archive, host: Host, tmp_path: Path) -> Archive:
    """Holds the miniature, which only the host has."""
    manual(tmp_path).unlink()
    return replace(wikitext, remote=replace(wikitext.remote, urls=(host.url(),)))


@pytest.fixture(autouse=True)
def hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(download, "PATIENCE_SECONDS", 0.5)
    monkeypatch.setattr(download, "FIRST_PAUSE_SECONDS", 0.01)
    monkeypatch.setattr(download, "CHUNK_BYTES", 512)


@pytest.mark.parametrize(
    "script, requests",
    [
        ([], 1),
        (["503", "500"], 3),
        (["cut", "cut", "cut"], 4),  # goes on where it broke off
        (["cut", "whole"], 2),  # where the host does not know how, from the start
        (["cut", "other"], 3),  # a wrong rest is thrown away and begun anew
    ],
)
def test_download_is_retried_and_resumed(
    hosted: Archive, host: Host, tmp_path: Path, script: list[str], requests: int
) -> None:
    host.script = list(script)
    for path, where in get(hosted, tmp_path).items():
        assert where.read_bytes() == miniatures.text("wikitext2", path)
    assert len(host.ranges) == requests
    names = {path.name for path in (tmp_path / "downloads").iterdir()}
    assert names == {"manual", "wikitext-2-v1.zip"}
    if script[:2] == ["cut", "cut"]:
        assert all(host.ranges[1:])
    get(hosted, tmp_path)
    assert len(host.ranges) == requests  # the download is kept
    kept = tmp_path / "downloads" / "wikitext-2-v1.zip"
    kept.write_bytes(b"damaged")
    get(hosted, tmp_path)
    assert len(host.ranges) == requests + 1


def test_next_host_is_tried(hosted: Archive, host: Host, tmp_path: Path) -> None:
    urls = ("http://127.0.0.1:1/a.zip", host.url("gone"), host.url("other"), host.url())
    host.script = ["404", "other"]
    given = replace(hosted, remote=replace(hosted.remote, urls=urls))
    assert len(get(given, tmp_path)) == 3


@pytest.mark.parametrize(
    "script, message",
    [
        (["404"], "HTTP status 404"),
        (["other"], "its SHA-256 is"),
        (["long"], "it has more than"),
        (["503"] * 99, "HTTP status 503"),
    ],
)
def test_failed_download_names_the_manual_folder(
    hosted: Archive, host: Host, tmp_path: Path, script: list[str], message: str
) -> None:
    host.script = script
    folder = manual(tmp_path).parent
    refuse(hosted, tmp_path, message, "put wikitext-2-v1.zip", f"in {folder}")
    assert not list((tmp_path / "downloads").glob("*.zip*"))


def test_no_network_is_said_at_once(hosted: Archive, tmp_path: Path) -> None:
    urls = ("https://127.0.0.1:1/a.zip", "http://no-such-host.invalid/a.zip")
    given = replace(hosted, remote=replace(hosted.remote, urls=urls))
    began = time.monotonic()
    refuse(given, tmp_path, "Connection refused", "put wikitext-2-v1.zip (or the files")
    assert time.monotonic() - began < 10
