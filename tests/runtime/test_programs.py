"""How programs are compiled, and where they are kept between starts."""

import queue
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache

from tests.support.processes import LIMIT_SECONDS
from txl_jax.runtime import distributed, programs
from txl_jax.runtime.programs import Program

NAMES = ("enable_compilation_cache", "compilation_cache_dir")
BOUND = "compilation_cache_max_size"
LEAST_SECONDS = "persistent_cache_min_compile_time_secs"
OF_XLA = "persistent_cache_enable_xla_caches"


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Returns a new cache folder for the user, without jax's variables."""
    names = [f"jax_{name}" for name in (*NAMES, BOUND, OF_XLA, LEAST_SECONDS)]
    before = {name: jax.config.values[name] for name in names}
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    jax.config.update("jax_compilation_cache_dir", None)
    jax.config.update("jax_enable_compilation_cache", True)
    jax.config.update(f"jax_{LEAST_SECONDS}", 0.0)
    compilation_cache.reset_cache()
    yield tmp_path / "txl_jax" / "programs"
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


def used() -> tuple[bool, str | None]:
    enabled, folder = (jax.config.values[f"jax_{name}"] for name in NAMES)
    return enabled, folder


def test_the_user_cache_is_bounded_and_keeps_the_bits(home: Path) -> None:
    def compute() -> np.ndarray:
        jax.clear_caches()
        step = jax.jit(lambda x: jnp.cumsum(jnp.sin(x) @ jnp.cos(x).T))
        return np.asarray(step(jnp.arange(3.0**6).reshape(27, 27)))

    compiled = compute()
    compilation_cache.reset_cache()
    programs.keep()
    assert used() == (True, str(home / programs.processor()))
    assert jax.config.values[f"jax_{BOUND}"] == programs.MOST_BYTES
    kept = [compute() for _ in range(2)]  # written, then read
    files = sorted(path.suffix for path in (home / programs.processor()).iterdir())
    assert len(files) > 2 and any(home.rglob("*-cache"))
    for each in kept:
        np.testing.assert_array_equal(each, compiled)


def test_jax_variables_take_precedence(home: Path, tmp_path: Path) -> None:
    for folder in (str(tmp_path / "mine"), "gs://b/x"):
        jax.config.update("jax_compilation_cache_dir", folder)
        programs.keep()
        assert used() == (True, folder)
    assert jax.config.values[f"jax_{OF_XLA}"] == "none"  # XLA cannot write there
    assert not home.exists()


def test_an_unwritable_home(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home.parent.parent.joinpath("txl_jax").touch()
    programs.keep()
    assert used() == (True, None)


def test_a_program_is_compiled_once_for_each_shape() -> None:
    def step(total: jax.Array, scale: float, x: jax.Array) -> Any:
        return total + scale * x.sum(), x.shape[0]

    program = Program("", step, carries=True, donates=True)
    total = jnp.zeros(2)
    for length in (3, 4, 3):
        before = total
        total, found = program(total, 2.0, np.ones(length))
        assert found == length and before.is_deleted()
    assert len(program.compiled) == 2
    assert total.tolist() == [20, 20] and total.sharding == before.sharding
    # For shapes, and from their shardings alone.
    like = jax.ShapeDtypeStruct((2,), jnp.float32, sharding=total.sharding)
    lowered = program.lower(like, 2.0, jax.ShapeDtypeStruct((5,), jnp.float32))
    assert lowered.out_info[0].shape == (2,)


def test_a_long_compilation_is_announced(monkeypatch: pytest.MonkeyPatch) -> None:
    said: queue.Queue[str] = queue.Queue()
    hear = partial(said.get, timeout=LIMIT_SECONDS)
    monkeypatch.setattr(programs, "QUIET_SECONDS", 0.0)
    monkeypatch.setattr(programs.log, "info", said.put)
    slow = Program("a step", lambda x: hear() == "compiling a step" and x)
    assert slow(1.0) == 1.0


def test_programs_wait_for_all_to_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    """Devices that communicate for the first time wait 30 s for one another."""
    events: list[str] = []
    monkeypatch.setattr(distributed, "wait_for_all", lambda: events.append("wait"))
    step = Program("", lambda x: jax.debug.callback(lambda: events.append("call")))
    for _ in range(2):
        step(1.0)
    jax.effects_barrier()
    assert events == ["wait", "call", "call"]


@pytest.mark.parametrize(
    ("kinds", "flags", "recorded"),
    [
        (["NVIDIA H200"], "", True),
        (["NVIDIA H200"], "--xla_gpu_enable_command_buffer=", False),
        (["NVIDIA H200", "NVIDIA H200"], "", False),
        (["cpu"], "", False),
    ],
)
def test_loops_are_recorded_on_one_nvidia_gpu(
    kinds: list[str], flags: str, recorded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XLA_FLAGS", flags)
    devices: Any = [Mock(device_kind=kind) for kind in kinds]
    options = programs.record_loops(devices)
    assert bool(options) == recorded
    # The compiler checks each command, even on a CPU, where it ignores the list.
    jax.jit(jnp.sin).lower(1.0).compile(options)
    if options:
        with pytest.raises(jax.errors.JaxRuntimeError, match="not a valid enum value"):
            wrong: Any = {name: f"{value},NONE" for name, value in options.items()}
            jax.jit(jnp.sin).lower(1.0).compile(wrong)
