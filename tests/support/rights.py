"""Files and folders that nobody may use for a while, not even root."""

import contextlib
import os
import sys
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

NOBODY = 65534


@contextlib.contextmanager
def public_folder() -> Iterator[Path]:
    """Makes a folder that any user of the machine may read."""
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        yield Path(folder)


@contextlib.contextmanager
def without_rights(*paths: Path) -> Iterator[None]:
    """Takes away all rights to files, and the right to write to folders.

    Root, who needs no rights, becomes the user nobody meanwhile, in all threads.
    """
    packages = Path(sys.prefix)
    if any(not path.stat().st_mode & 0o001 for path in (packages, *packages.parents)):
        pytest.skip(f"nobody else may look into {packages}")
    modes = {path: path.stat().st_mode for path in paths}
    for path in paths:
        path.chmod(0o555 if path.is_dir() else 0)
    root = os.geteuid() == 0
    if root:
        os.seteuid(NOBODY)
    try:
        with warnings.catch_warnings():
            # The user nobody may not write to the cache of compiled programs.
            warnings.filterwarnings("ignore", "Error writing persistent compilation")
            yield
    finally:
        if root:
            os.seteuid(0)
        for path, mode in modes.items():
            path.chmod(mode)
