"""The measured utilization is reported once, beside the bounds of `--mode=compile`."""

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from tests.support import tiny
from txl_jax.aot import chips
from txl_jax.cli import bound
from txl_jax.config import Config
from txl_jax.update.options import TrainConfig


def device(*coords: int, kind: str = "TPU v5 lite", **more: int) -> Any:
    return SimpleNamespace(device_kind=kind, coords=coords, **more)


def test_attached_chips_are_found() -> None:
    places = [(x, y, 0) for x in range(4) for y in range(2)]
    (found,) = {chips.attached([device(*place) for place in places])}
    assert found is not None and (found.name, found.slices) == ("v5e:4x2", 1)
    two = [device(0, 0, 0, slice_index=0), device(0, 0, 0, slice_index=1)]
    found = chips.attached(two)
    assert found is not None and (found.name, found.slices) == ("v5e:1x1", 2)
    assert chips.attached(jax.devices()) is None


@pytest.mark.parametrize(
    "readable, lengths",
    [(True, (1, 2, 2, 2)), (True, (2, 1, 2, 1, 2, 2, 2)), (False, (2, 2, 1, 2))],
)
def test_one_line_compares_the_second_of_two_full_calls(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    readable: bool,
    lengths: tuple[int, ...],
) -> None:
    """Shorter calls, which are slow here, neither count nor end the search."""

    def describe(*args: Any) -> dict[str, Any]:
        assert args[-1].text.startswith("HloModule")
        if not readable:
            raise ValueError("unreadable")
        return {
            "utilisation": {"full_overlap": 0.52, "no_overlap": 0.30},
            "step_seconds": {"full_overlap": 1.0, "no_overlap": 52 / 30},
        }

    clock = SimpleNamespace(now=10.0)
    monkeypatch.setattr(bound, "describe", describe)
    monkeypatch.setattr(bound.time, "perf_counter", lambda: clock.now)
    monkeypatch.setattr(chips, "attached", lambda _: chips.find("v5e:1x1"))
    traces = []

    @jax.jit
    def double(x: Any) -> Any:
        traces.append(1)
        return 2 * x

    config = Config(train=TrainConfig(segments_per_call=2))
    step = bound.Bound(config, tiny.one_device(), double)
    for n in lengths:
        assert step(jnp.ones(n)).sum() == 2 * n
        clock.now += 2 * 52 / 38 if n == 2 else 99.0
        step.fetched(0, [{}] * n, None)
    assert len(traces) == 2
    (line,) = capsys.readouterr().err.splitlines()
    expected = "mfu 38% measured; --mode=compile bounds it between 30% and 52%"
    unknown = "mfu cannot be compared with its bounds (ValueError('unreadable'))"
    assert line == (expected if readable else unknown)
