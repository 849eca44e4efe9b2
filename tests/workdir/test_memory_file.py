"""A memory in a file: reading continues as if it had never stopped.

Dims: as in `txl_jax`.
"""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import pytest

import txl_jax
from tests.support import tiny
from tests.support.refusal import refused
from txl_jax.model.config import ModelConfig
from txl_jax.model.memory.kinds import choose_kind

TOKENS_BL = tiny.make_tokens(2, 12)
RETRIEVAL = {"retrieval_len": 20, "retrieval_top_k": 3}


def make_loaded(model: ModelConfig) -> Any:
    config = SimpleNamespace(model=model)
    return tiny.loaded(tiny.make_params(model))._replace(config=config)


@pytest.mark.parametrize(
    "kind", [{}, tiny.COMPRESSED, tiny.TOKENS, RETRIEVAL, tiny.FAST]
)
def test_reading_goes_on(kind: dict[str, Any], tmp_path: Path) -> None:
    """Every bit of a memory of two streams is kept."""
    loaded = make_loaded(model := tiny.config(**kind))
    memory = choose_kind(model).empty(2)
    _, memory = tiny.apply(model, loaded.params, TOKENS_BL[:, :8], memory)
    txl_jax.save_memory(tmp_path / "memory", loaded, memory)
    again = txl_jax.load_memory(tmp_path / "memory", loaded)
    tiny.assert_equal(again, memory)
    results = [
        tiny.apply(model, loaded.params, TOKENS_BL[:, 8:], each)
        for each in (again, memory)
    ]
    tiny.assert_equal(*results)


def test_a_file_of_something_else_is_refused(tmp_path: Path) -> None:
    loaded, file = make_loaded(tiny.CONFIG), tmp_path / "memory"
    memory = choose_kind(tiny.CONFIG).empty(1)
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
    with refused("cannot write .*none/memory"):
        txl_jax.save_memory(tmp_path / "none" / "memory", loaded, memory)
