"""Random bits by index, for the order of the data: SplitMix64 in numpy and Python."""

from typing import TypeVar

import numpy as np

Bits = TypeVar("Bits", int, np.ndarray)  # 64 of them; arrays are uint64
# Purposes of `draw`, with independent numbers.
ROTATION, LENGTH, SHUFFLE = 1, 2, 3


def splitmix64(z: Bits) -> Bits:
    """Returns SplitMix64's output for a state, an int or an array of uint64."""
    mask = 2**64 - 1
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & mask
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB & mask
    return z ^ (z >> 31)


def draw(seed: int, purpose: int, epoch: int, index: Bits) -> Bits:
    """Returns 64 random bits for an index, an int or an array of uint64.

    They are number `index`, from 0, of a sequence of SplitMix64 (Steele, Lea and Flood,
    2014), whose initial state is a hash of the other arguments. Integer arithmetic does
    not depend on a library's version.
    """
    state = splitmix64(splitmix64(splitmix64(seed) ^ purpose) ^ epoch)
    return splitmix64((index * 0x9E3779B97F4A7C15 + state) & (2**64 - 1))
