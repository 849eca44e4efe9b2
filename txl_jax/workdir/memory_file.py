"""Files of the memory after a text, from which reading can continue many times.

Each is an `array_file`, whose metadata has the checksums of its arrays and of the
parameters that it belongs to.
"""

import json
import os
from pathlib import Path
from typing import Any

import jax
import numpy as np

from txl_jax.checkpoint import array_file
from txl_jax.checkpoint.manifest import checksums, first_nonfinite, named_leaves
from txl_jax.errors import UserError, refuse
from txl_jax.model.config import ModelConfig
from txl_jax.model.memory import Memory
from txl_jax.runtime import storage
from txl_jax.workdir.load import Loaded

FORMAT = "txl_jax memory 2"  # the version that is written and read


def save_memory(path: str | Path, loaded: Loaded, memory: Memory) -> None:
    """Writes a memory of `loaded.model` to a file; raises UserError or OSError."""
    path = storage.local_path(os.fspath(path), "path")
    check_memory(memory, loaded.config.model)
    trees = {"parameters": loaded.params, "memory": memory}
    texts = {name: json.dumps(checksums(tree)) for name, tree in trees.items()}
    content = array_file.pack(memory, FORMAT, texts)
    storage.write_atomically(path, content)


def check_memory(memory: Any, config: ModelConfig) -> None:
    """Raises UserError unless it is a finite memory of a model, of any length."""
    like: Any = jax.eval_shape(lambda: Memory.empty(config, 1))
    if type(memory) is Memory:
        B, M = len(memory.filled_B), memory.mem_len
        like = jax.eval_shape(lambda: Memory.empty(config, B, M))
    trees = memory, like
    given, fitting = ({n: np.shape(x) for n, x in named_leaves(y)} for y in trees)
    refuse(
        given != fitting,
        f"memory has arrays of shapes {given}, and this model's {fitting}: give the "
        "second result of loaded.model.apply",
    )
    name = first_nonfinite(memory)
    refuse(name, f"memory: {name} is not finite: read the text again")


def load_memory(path: str | Path, loaded: Loaded) -> Any:
    """Returns the memory in a file, for `loaded.model.apply`.

    It has the length and the streams with which it was saved. Raises
    UserError if the file is damaged or belongs to other parameters.
    """
    path = storage.local_path(os.fspath(path), "path")
    parameters = json.dumps(checksums(loaded.params))
    empty = jax.eval_shape(lambda: Memory.empty(loaded.config.model, 1))
    with array_file.opened(path, FORMAT, "txl_jax.save_memory") as (texts, arrays):
        if texts["parameters"] != parameters:
            raise UserError(
                f"{path} belongs to other parameters than update {loaded.step}'s: "
                "load the model that made it, or make it again"
            )
        leaves = [arrays[name] for name, _ in named_leaves(empty)]
        memory = jax.tree.unflatten(jax.tree.structure(empty), leaves)
        if texts["memory"] != json.dumps(checksums(memory)):
            raise ValueError("wrong checksum")
    return memory
