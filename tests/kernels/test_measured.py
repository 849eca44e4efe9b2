"""Measured blocks precede estimated ones, and a kernel found wrong is not selected."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import pytest

from txl_jax.kernels import dispatch, measured
from txl_jax.kernels.measured import Table, name_sizes
from txl_jax.kernels.tiles import choose_blocks
from txl_jax.kernels.tpu.blocks import choose

CHIP = "TPU v5 lite"
Save = Callable[..., Path]


@pytest.fixture
def save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Save]:
    """Returns a function that saves a table, which nothing has read yet."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user"))
    monkeypatch.setattr(measured, "PACKAGED", tmp_path / "packaged")

    def forget() -> None:
        measured.read.cache_clear()
        dispatch.right.cache_clear()

    def write(
        kind: str,
        sizes: dict[str, Any],
        checked: dict[str, str] | None = None,
        packaged: bool = False,
        as_kind: str = "",
    ) -> Path:
        folder = measured.PACKAGED if packaged else measured.user_folder()
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / measured.file_name(as_kind or kind)
        table = measured.to_json(kind, Table(sizes, checked or {}), date="2026-11-23")
        path.write_text(json.dumps(table), "utf-8")
        forget()
        return path

    forget()
    yield write
    forget()


def test_the_users_table_precedes_the_package_and_both_the_estimate(save: Save) -> None:
    both, other = (8, 512, 1024, 64, 2), (8, 128, 256, 64, 2)
    estimate = choose_blocks(*both)
    assert measured.sha256() is None
    keys = [name_sizes("chunked", *sizes) for sizes in (both, other)]
    save("cpu", dict.fromkeys(keys, [64, 512]), packaged=True)
    alone = measured.sha256()
    assert choose_blocks(*both) == (64, 512) != estimate
    save("cpu", {keys[0]: [256, 1024]})
    assert choose_blocks(*both) == (256, 1024)
    assert choose_blocks(*other) == (64, 512)
    assert alone and measured.sha256() != alone
    assert choose_blocks(9, *both[1:]) == (128, 344), "of another number of rows"
    save("cpu", {keys[0]: [1024, 1024]})
    assert choose_blocks(*both) == estimate, "more than L queries"


def test_the_tpu_kernel_takes_measured_tiles_that_fit(save: Save) -> None:
    sizes = 512, 1024, 64, 2
    estimate = choose(CHIP, *sizes)
    for tile, columns, taken in ((256, 128, True), (250, 128, False), (256, 96, False)):
        save(CHIP, {name_sizes("tpu", *sizes): [tile, columns]})
        blocks = choose(CHIP, *sizes)
        assert (blocks != estimate) == taken
        assert not taken or (blocks.tile, blocks.columns) == (tile, columns)
        assert choose("TPU v4", *sizes).tile == estimate.tile


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: path.write_text("[1]"),
        lambda path: path.write_text(path.read_text().replace("64", "32")),
        lambda path: path.write_bytes(b"\xff" + path.read_bytes()),
        lambda path: path.unlink() or path.mkdir(),
    ],
)
def test_a_damaged_table_is_reported_and_ignored(
    damage: Callable[[Path], object], save: Save, capsys: pytest.CaptureFixture[str]
) -> None:
    damage(save("cpu", {name_sizes("chunked", 1, 2): [64, 64]}))
    assert measured.read("cpu") == Table({}, {})
    (line,) = capsys.readouterr().err.splitlines()
    assert "a table of kernels is ignored" in line and measured.COMMAND in line


def test_a_foreign_table_is_ignored(
    save: Save, capsys: pytest.CaptureFixture[str]
) -> None:
    save(CHIP, {"chunked 1x2": [8, 8]}, as_kind="cpu")
    assert measured.read("cpu").sizes == {}
    assert capsys.readouterr().err.count("is ignored") == 1


def test_auto_avoids_kernels_found_wrong_and_reports_unproved_ones(
    save: Save, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def chosen(checked: dict[str, str], name: str = "tpu") -> tuple[str, str]:
        save(CHIP, {}, checked)
        kernels = {dispatch.right(name, CHIP) for _ in range(2)}
        return kernels.pop(), capsys.readouterr().err

    assert chosen({}) == ("tpu", ""), "compiled without a chip"
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    name, line = chosen({})
    assert name == "tpu" and line.count("\n") == 1
    assert "unproved" in line and "model.kernel=xla" in line
    assert chosen({"tpu": ""}) == ("tpu", "")
    name, line = chosen({"tpu": "dr is off by 0.3"})
    assert name == "xla" and line.count("\n") == 1 and "dr is off by 0.3" in line
    assert chosen({"xla": "o", "tpu": "q"})[0] == "chunked"
    assert chosen(dict.fromkeys(("xla", "chunked", "tpu"), "o"), "xla")[0] == "xla"
