"""State dicts of other code bases, whose arrays are taken once, by shape."""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from txl_jax.convert.pickle import Object, Value
from txl_jax.errors import UserError
from txl_jax.report.checksum import DAMAGE

State = dict[str, np.ndarray]  # a state dict

FREQUENCIES = "pos_emb.inv_freq"  # computed, not trained
FLOATS = ("float16", "bfloat16", "float32", "float64")


class Keys:
    """A state dict from which each array must be taken exactly once.

    The methods take names of the paper's PyTorch code; `rename` returns the state's own
    name, which errors contain.
    """

    def __init__(
        self, state: Mapping[str, np.ndarray], rename: Callable[[str], str] = str
    ) -> None:
        if state and all(name.startswith("module.") for name in state):
            # DataParallel adds this prefix.
            state = {name.removeprefix("module."): x for name, x in state.items()}
        self.remaining = {name: x for name, x in state.items() if name != FREQUENCIES}
        self.rename = rename

    def __contains__(self, name: str) -> bool:
        return self.rename(name) in self.remaining

    def count(self, pattern: str) -> int:
        """Returns how many of pattern.format(0), pattern.format(1), ... exist."""
        numbered = map(pattern.format, itertools.count())
        return sum(1 for _ in itertools.takewhile(self.__contains__, numbered))

    def rank(self, name: str) -> int:
        """Returns the number of dimensions of an array, or 0 if it is missing."""
        return len(self.remaining[self.rename(name)].shape) if name in self else 0

    def shape(self, name: str, *dims: int | str) -> tuple[int, ...]:
        """Returns the shape of an array; a letter stands for any positive size."""
        expected = str(dims).replace("'", "")
        name = self.rename(name)
        if name not in self.remaining:
            raise UserError(f"{name}, of shape {expected}, is missing")
        shape = self.remaining[name].shape
        fits = [n == dim or (n and isinstance(dim, str)) for n, dim in zip(shape, dims)]  # noqa: B905
        if len(shape) != len(dims) or not all(fits):
            raise UserError(f"{name} has shape {shape}, not {expected}")
        return shape

    def take(self, name: str, *dims: int | str) -> np.ndarray:
        """Removes an array of the shape `dims` and returns it in float32."""
        self.shape(name, *dims)
        array = self.remaining.pop(self.rename(name))
        if array.dtype.name not in FLOATS:
            raise UserError(
                f"{self.rename(name)} has values of type {array.dtype}, "
                f"not one of {', '.join(FLOATS)}: save it as one of these"
            )
        return np.ascontiguousarray(array, np.float32)

    def close(self) -> None:
        """Raises UserError unless every array has been taken."""
        for name, array in self.remaining.items():
            raise UserError(
                f"{name[:80]}, of shape {array.shape}, is not part of the model"
            )


def infer_div_val(widths: Sequence[int]) -> int:
    """Returns the divisor by which the width falls from each cluster to the next."""
    for divisor in range(2, widths[0] + 1):
        if all(widths[0] // divisor**i == width for i, width in enumerate(widths)):
            return divisor
    raise UserError(f"no div_val gives the embedding's tables their widths {widths}")


def arrays(value: Value, path: Path) -> State:
    """Returns the arrays of an unpickled state dict or module, by name.

    Other values are dropped.
    """
    try:
        items = _flatten(value) if isinstance(value, Object) else value.items()
        result = {
            name: x
            for name, x in items
            if isinstance(name, str) and isinstance(x, np.ndarray)
        }
    except DAMAGE:
        result = {}
    if not result:
        raise UserError(f"{path} contains neither a state dict nor a module")
    return result


def _flatten(module: Object, prefix: str = "") -> Iterator[tuple[str, Value]]:
    """Yields the parameters and buffers of a pickled module and its submodules."""
    for field in ("_parameters", "_buffers"):
        for name, value in module.state.get(field, {}).items():
            yield f"{prefix}{name}", value
    for name, part in module.state.get("_modules", {}).items():
        yield from _flatten(part, f"{prefix}{name}.")
