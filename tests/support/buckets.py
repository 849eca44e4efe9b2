"""A stand-in for Google's storage: the same calls, in memory; it can be made to fail.

Dims: none.
"""

from collections.abc import Callable
from typing import Any

import pytest
from fsspec.implementations.memory import (  # type: ignore[import-untyped]
    MemoryFileSystem,
)
from fsspec.registry import _registry  # type: ignore[import-untyped]


def allow(call: str, path: str) -> None:
    """Lets every call pass."""


class Bucket(MemoryFileSystem):
    """A stand-in for Google's: whoever asks fsspec for "gcs" gets it.

    before(call, path) is called before each call that changes something.
    """

    protocol = "gcs"
    cachable = False
    store: dict[str, Any] = {}
    pseudo_dirs = [""]
    before: Callable[[str, str], None] = staticmethod(allow)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        kwargs.pop("finalize_on_close", None)
        super().__init__(*args, **kwargs)

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return MemoryFileSystem._strip_protocol(str(path).removeprefix("gs://"))

    def put_file(self, lpath: str, rpath: str, *args: Any, **kwargs: Any) -> None:
        """Copies a file into the bucket."""
        type(self).before("put", rpath)
        super().put_file(lpath, rpath, *args, **kwargs)

    def pipe_file(self, path: str, *args: Any, **kwargs: Any) -> None:
        """Writes an object; mode="create" refuses where there is one."""
        type(self).before("pipe", path)
        super().pipe_file(path, *args, **kwargs)

    def rm_file(self, path: str) -> None:
        """Deletes an object."""
        type(self).before("rm", path)
        super().rm_file(path)


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> type[Bucket]:
    """Is an empty one."""
    monkeypatch.setitem(_registry, "gcs", Bucket)
    monkeypatch.setattr(Bucket, "store", {})
    monkeypatch.setattr(Bucket, "pseudo_dirs", [""])
    monkeypatch.setattr(Bucket, "before", staticmethod(allow))
    return Bucket
