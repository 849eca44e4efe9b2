"""Arrays and JSON texts in one file of the format of safetensors.

The texts are the file's metadata. `format` names the kind of the file and its version.
Nothing in a file is executed.
"""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np
import safetensors
import safetensors.numpy

from txl_jax.checkpoint.manifest import Damaged, Tree, named_leaves
from txl_jax.data.byte_ranges import reading
from txl_jax.errors import UserError
from txl_jax.runtime.storage import refusing_damage

Texts = dict[str, str]
Arrays = dict[str, np.ndarray]


def pack(tree: Tree, format: str, texts: Texts) -> bytes:
    """Returns the content of a file with a pytree's arrays."""
    leaves = named_leaves(jax.device_get(tree))
    arrays = {name: np.ascontiguousarray(leaf) for name, leaf in leaves}
    return safetensors.numpy.save(arrays, {"format": format, **texts})


@contextlib.contextmanager
def opened(path: Path, format: str, writer: str) -> Iterator[tuple[Texts, Arrays]]:
    """Yields the texts and the arrays of a file.

    writer: the flags that write such files. Raises UserError for another file and for
    errors of damaged content, inside the `with` block too.
    """
    with reading(path):
        if not path.is_file():
            raise UserError(f"{path} is not a file: give one that {writer} wrote")
        path.open("rb").close()  # safetensors would not name the reason of an error
    fix = f"give one that {writer} wrote, or copy it again from its source"
    with refusing_damage(path, fix, Damaged, safetensors.SafetensorError):
        with safetensors.safe_open(path, framework="numpy") as file:
            texts = file.metadata() or {}
            if (found := texts.get("format", "")) != format:
                raise UserError(
                    f"{path} has format = {found!r} in its metadata, not {format!r}: "
                    f"give a file that {writer} of this version wrote"
                )
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        yield texts, arrays
