"""Dynamic evaluation of a run, which collects statistics once, and with a cache."""

import dataclasses
from typing import Any

import jax
import pytest

from tests.support import tiny
from tests.support.trained import Home, home, own_home
from txl_jax.cli.evaluate_split import evaluate_model
from txl_jax.workdir.load import Loaded, load

FIXTURES = home, own_home
DYNAMIC: dict[str, Any] = {"dynamic": "rms", "dynamic_lr": 0.1, "dynamic_segments": 6}


@pytest.fixture
def loaded(home: Home) -> Loaded:
    loaded, mesh = load(home.run), tiny.one_device()
    params = jax.device_put(jax.device_get(loaded.params), mesh.devices.item())
    return loaded._replace(mesh=mesh, params=params)


def score(loaded: Loaded, home: Home, **fields: Any) -> dict[str, Any]:
    """Returns the result of --mode=evaluate with these fields of `eval`."""
    options = dataclasses.replace(
        loaded.config.eval, streams=1, max_tokens=40, **fields
    )
    config = dataclasses.replace(loaded.config, eval=options)
    return evaluate_model(loaded._replace(config=config), home.run)


def test_statistics_are_kept_in_the_workdir(
    own_home: Home, loaded: Loaded, capfd: pytest.CaptureFixture[str]
) -> None:
    path = own_home.run / "dynamic.npz"
    first = score(loaded, own_home, **DYNAMIC)
    assert f"the statistics of 6 gradients are in {path}" in capfd.readouterr().err
    kept = path.read_bytes()
    static = score(loaded, own_home)
    assert first["nll"] != static["nll"] and "dynamic" not in static

    assert score(loaded, own_home, **DYNAMIC)["nll"] == first["nll"]
    assert "statistics" not in capfd.readouterr().err and path.read_bytes() == kept
    path.write_bytes(kept[: len(kept) // 2])
    assert score(loaded, own_home, **DYNAMIC)["nll"] == first["nll"]
    assert f"{path} is damaged (" in capfd.readouterr().err


def test_rates_are_swept_and_those_that_diverge_left_out(
    home: Home, loaded: Loaded, capfd: pytest.CaptureFixture[str]
) -> None:
    fields = DYNAMIC | {"sweep": "dynamic_lr=0.1,0.01,1e30"}
    result = score(loaded, home, **fields)
    assert "1e+30       diverges, and is left out" in capfd.readouterr().err
    rows = [row["dynamic_lr"] for row in result["rows"]]
    assert (rows, result["init"]) == ([0.0, 0.01, 0.1], 0.0)
    static = score(loaded, home)["nll"]
    assert result["rows"][0]["nll"] == pytest.approx(static, rel=tiny.FLOAT32)
    assert (home.run / "sweep_dynamic_lr.png").exists()


def test_one_stream_is_not_split(home: Home) -> None:
    done = home.read("evaluate", "--streams=1", "--dynamic=sgd", "--dynamic_lr=1")
    assert done.status == 2 and "eval.streams = 1 is not divisible" in done.err


def test_the_share_of_a_cache_is_swept(home: Home) -> None:
    options = "--cache_len=20", "--cache_theta=0.05", "--max_tokens=300"
    result = home.read("evaluate", *options, "--sweep=cache_weight=0.1").result
    without, mixed = (row["nll"] for row in result["rows"])
    static = home.read("evaluate", "--max_tokens=300").result
    assert without == pytest.approx(static["nll"], rel=1e-6) != mixed
    assert (result["cache_len"], result["cache_theta"]) == (20, 0.05)
    assert "cache_len" not in static
