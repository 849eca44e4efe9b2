"""A memory in a file: reading continues as if it had never stopped.

Dims: as in `txl_jax`.
"""

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import txl_jax
from tests.support import tiny
from tests.support.refusal import refused
from txl_jax.model.config import ModelConfig
from txl_jax.model.memory import Memory

TOKENS_BL = tiny.make_tokens(2, 12)


def make_loaded(model: ModelConfig) -> Any:
    config = SimpleNamespace(model=model)
    return tiny.loaded(tiny.make_params(model))._replace(config=config)


KINDS: list[dict[str, Any]]
KINDS = [{}, tiny.FAST]


@pytest.mark.parametrize("mem_len", [5, 7])
@pytest.mark.parametrize("kind", KINDS)
def test_reading_goes_on(kind: dict[str, Any], mem_len: int, tmp_path: Path) -> None:
    """Every bit of a memory of two streams is kept, also of another length."""
    loaded = make_loaded(model := tiny.config(**kind))
    memory = Memory.empty(dataclasses.replace(model, mem_len=mem_len), 2)
    _, memory = tiny.apply(model, loaded.params, TOKENS_BL[:, :8], memory)
    txl_jax.save_memory(tmp_path / "memory", loaded, memory)
    again = txl_jax.load_memory(tmp_path / "memory", loaded)
    tiny.assert_equal(*map(jax.tree.leaves, (again, memory)))
    results = [
        jax.tree.leaves(tiny.apply(model, loaded.params, TOKENS_BL[:, 8:], each))
        for each in (again, memory)
    ]
    tiny.assert_equal(*results)


@pytest.mark.parametrize("kind", KINDS)
def test_only_a_memory_of_the_model_is_saved(
    kind: dict[str, Any], tmp_path: Path
) -> None:
    loaded = make_loaded(model := tiny.config(**kind))
    memory = Memory.empty(model, 2)
    deep = Memory.empty(dataclasses.replace(model, n_layer=3), 2)
    other = Memory.empty(tiny.config(**({} if kind else tiny.FAST)), 2)
    wrong: Any
    for wrong in (None, 3, (TOKENS_BL, memory), deep, other):
        with refused("memory has arrays of shapes .* this model's .*: give"):
            txl_jax.save_memory(tmp_path / "memory", loaded, wrong)

    def spoil(x: jax.Array) -> jax.Array:
        return x + jnp.nan if x.dtype == jnp.float32 else x

    with refused("memory: .* is not finite"):
        txl_jax.save_memory(tmp_path / "memory", loaded, jax.tree.map(spoil, memory))
    assert not [*tmp_path.iterdir()]


def test_a_path_may_begin_with_the_home_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded, memory = make_loaded(tiny.CONFIG), Memory.empty(tiny.CONFIG, 1)
    monkeypatch.setenv("HOME", str(tmp_path))
    txl_jax.save_memory("~/memory", loaded, memory)
    tiny.assert_equal(txl_jax.load_memory("~/memory", loaded), memory)
    with refused("path='~no.one/memory': no such user"):
        txl_jax.save_memory("~no.one/memory", loaded, memory)
    with refused(f"{tmp_path}/absent holds no run"):
        txl_jax.load("~/absent")


def test_a_file_of_something_else_is_refused(tmp_path: Path) -> None:
    loaded, file = make_loaded(tiny.CONFIG), tmp_path / "memory"
    memory = Memory.empty(tiny.CONFIG, 1)
    txl_jax.save_memory(file, loaded, memory)
    params = jax.tree.map(lambda x: x + 1e-6, loaded.params)
    with refused(f"{file} belongs to other parameters .* load the model"):
        txl_jax.load_memory(file, loaded._replace(params=params))
    data = bytearray(file.read_bytes())
    for at in (40, len(data) - 2):
        bad = tmp_path / "bad"
        bad.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
        with refused(f"{bad} is damaged|has format"):
            txl_jax.load_memory(bad, loaded)
    with pytest.raises(FileNotFoundError, match="none/memory"):
        txl_jax.save_memory(tmp_path / "none" / "memory", loaded, memory)
