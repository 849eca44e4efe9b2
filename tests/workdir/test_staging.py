"""Damaged files of arrays are made again."""

import zipfile
from pathlib import Path

import numpy as np
import pytest

from txl_jax.workdir.staging import read_arrays


def test_arrays_of_a_claimed_size_are_made_again(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    with zipfile.ZipFile(path := tmp_path / "x.npz", "w") as archive:
        with archive.open("a.npy", "w") as file:
            header = {"descr": "<i8", "fortran_order": False, "shape": (2**58,)}
            np.lib.format.write_array_header_1_0(file, header)
    assert read_arrays(path) == {}
    assert "x.npz is damaged" in capsys.readouterr().err
