"""The TPU compiler accepts the kernels for every chip, in little memory.

It needs libtpu, not a TPU. Each compilation is a process of its own, because libtpu
reads the environment once and would disturb the other tests' jax.
"""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]
PROGRAM = "experiments.benchmarks.tpu_estimate"

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None,
    reason="libtpu, the TPU compiler, is not installed (pip install libtpu)",
)

# B x H x A x L x M, for training and, last, for evaluation
SHAPES = "22x8x64x512x512,16x16x64x384x384,8x8x128x768x768,1x16x64x4096x4096,"
SHAPES += "60x10x41x150x150,10x10x41x64x640"


def estimate(**flags: Any) -> list[dict[str, Any]]:
    """Returns the rows of the program, without the kernels' schedules."""
    flags = {"kernels": "tpu", "schedule": 0} | flags
    command = [sys.executable, "-m", PROGRAM]
    command += [f"--{k}={v}" for k, v in flags.items()]
    path = os.pathsep.join([str(ROOT), *sys.path])
    environment = os.environ | {"PYTHONPATH": path}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert not done.returncode, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def check(row: dict[str, Any]) -> None:
    assert "error" not in row, row
    assert row["temporary_mib"] <= 2 * row["input_mib"]
    B, H, A, L, M = row["shape"]
    operands = B * H * 128 * -(-A // 16) * 16 * -(-(L + M) // 128)
    assert row["largest"] <= operands < B * H * L * (L + M)


def test_compiles_for_v5e_without_an_array_of_queries_by_keys() -> None:
    (row,) = estimate(shapes="1x2x64x4096x4096")
    check(row)
    assert row["largest"] < 4096 * 8192


@pytest.mark.long
@pytest.mark.parametrize(("dtype", "dropout"), [("bfloat16", 0.1), ("float32", 0.0)])
@pytest.mark.parametrize("chip", ["v5e", "v5p", "v6e"])
def test_compiles_for_every_chip(chip: str, dtype: str, dropout: float) -> None:
    rows = estimate(chips=chip, dropout=dropout, dtype=dtype, shapes=SHAPES)
    assert len(rows) == 6
    for row in rows:
        check(row)


@pytest.mark.long
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("position", ["rotary", "alibi", "shaw_biased"])
def test_compiles_for_every_position_scheme(position: str, dtype: str) -> None:
    for row in estimate(
        chips="v5p,v5e", shapes="10x10x41x64x640", position=position, dtype=dtype
    ):
        check(row)


@pytest.mark.long
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_compiles_with_a_stated_precision_of_products(
    dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`kernels.check` states it."""
    monkeypatch.setenv("JAX_DEFAULT_MATMUL_PRECISION", "highest")
    (row,) = estimate(shapes="2x2x64x136x200", dtype=dtype)
    assert "error" not in row, row


@pytest.mark.long
def test_a_step_fits_where_the_einsum_does_not() -> None:
    fused, einsum = estimate(shapes="1x16x64x8192x8192", kernels="tpu,xla")
    check(fused)
    assert "out of memory" in einsum["error"]
