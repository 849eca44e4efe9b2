"""The arrays of another code base, by name: each is asked for once and in its shape."""

import itertools
from collections.abc import Mapping

import numpy as np

from txl_jax.errors import UserError

FREQUENCIES = "pos_emb.inv_freq"  # computed, not trained


class Keys:
    """A state dict, each of whose arrays is taken once and in a known shape."""

    def __init__(self, state: Mapping[str, np.ndarray]) -> None:
        if state and all(name.startswith("module.") for name in state):
            # Left by DataParallel.
            state = {name.removeprefix("module."): x for name, x in state.items()}
        self.left = {name: x for name, x in state.items() if name != FREQUENCIES}

    def __contains__(self, name: str) -> bool:
        return name in self.left

    def count(self, pattern: str) -> int:
        """Returns how many of pattern.format(0), pattern.format(1) .. there are."""
        numbered = map(pattern.format, itertools.count())
        return sum(1 for _ in itertools.takewhile(self.__contains__, numbered))

    def rank(self, name: str) -> int:
        """Returns how many dimensions an array has; 0 if there is none."""
        return self.left[name].ndim if name in self.left else 0

    def shape(self, name: str, dims: str) -> tuple[int, ...]:
        """Returns the shape of an array with one dimension per letter of `dims`."""
        if name not in self.left:
            raise UserError(
                f"the state dict has no {name}, of shape ({', '.join(dims)})"
            )
        shape = self.left[name].shape
        if len(shape) != len(dims):
            raise UserError(f"{name} has shape {shape}, not ({', '.join(dims)})")
        return shape

    def take(self, name: str, *shape: int) -> np.ndarray:
        """Returns an array in float32; raises UserError for another shape."""
        if name not in self.left:
            raise UserError(f"the state dict has no {name}, of shape {shape}")
        array = self.left.pop(name)
        if array.shape != shape:
            raise UserError(f"{name} has shape {array.shape}, not {shape}")
        return np.ascontiguousarray(array, np.float32)

    def close(self) -> None:
        """Raises UserError if anything has not been taken."""
        for name, array in self.left.items():
            raise UserError(
                f"{name[:80]} of shape {array.shape} has no place in this model"
            )
