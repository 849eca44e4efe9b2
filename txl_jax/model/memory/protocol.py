"""The interface of a memory: for all layers, and for one layer's attention."""

from typing import Any, Protocol, Self, TypeVar

from jax import Array

from txl_jax.kernels.operands import Kernel, Operands

# What the memory of a layer keeps of a segment; `append` takes that of all layers.
Kept = Any


class LayerMemory(Protocol):
    """The memory of one layer."""

    def before(self, h_BLD: Array) -> tuple[Array, int] | None:
        """Returns (h_BMD, n) or None.

        h_BMD: hidden states to project together with the layer's input, of which the n
        oldest get no gradient.
        """

    def attend(self, own: Operands, h_BKD: Array, kernel: Kernel) -> tuple[Array, Kept]:
        """Returns (o_BLHA, what `MemoryLike.append` takes) of a segment.

        own: keys and values are those of h_BKD, queries those of the segment. A memory
        that holds keys and values adds them, and their position terms. h_BKD are the
        states `before` the segment, if any, and the layer's input. `kernel` takes keys
        in the order of time, not yet rotated; a memory in another order has a kernel of
        its own.
        """


class CallMemory(Protocol):
    """The memory of all layers, as a call reads it."""

    @property
    def layers(self) -> Any:
        """A LayerMemory stacked over the layers, or a tuple of one for each."""

    def append(self, kept: Kept, length_B: Array | None, first_BL: Array | None) -> Any:
        """Returns the memory after a segment, a MemoryLike.

        Each stream keeps its M newest real tokens. The first length_B[b] tokens of
        stream b are real (default: all); padding never enters the memory. Tokens before
        the last document start (first_BL) keep their slots but become invisible.
        """


class MemoryLike(Protocol):
    """The memory of all layers between calls, a pytree."""

    @property
    def mem_len(self) -> int:
        """The length M."""

    @property
    def filled_B(self) -> Array:
        """The number of visible slots, the newest ones (int32).

        It counts up from a cold start or from the last document boundary.
        """

    def append(
        self, kept: Kept, length_B: Array | None, first_BL: Array | None
    ) -> Self:
        """Returns the memory after a segment, of the same kind; see `CallMemory`."""


AnyMemory = TypeVar("AnyMemory", bound=MemoryLike)
