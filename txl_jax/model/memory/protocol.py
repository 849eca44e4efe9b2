"""The interface of a memory: of a kind, of all layers, and of one layer's attention."""

import abc
from typing import Any, NamedTuple, Protocol, TypeVar

from jax import Array

from txl_jax.kernels.operands import Kernel, Operands
from txl_jax.model.config import ModelConfig
from txl_jax.model.initializers import Params

# The arrays that a layer's memory keeps of a segment; `append` takes all layers'.
Kept = Any


class LayerMemory(Protocol):
    """The memory of one layer."""

    def before(self, h_BLD: Array) -> tuple[Array, int] | None:
        """Returns (h_BMD, n_constant) or None.

        h_BMD: hidden states to project together with the layer's input, of which the
        n_constant oldest get no gradient.
        """

    def attend(
        self, own: Operands, h_BKD: Array, x_BKD: Array, kernel: Kernel
    ) -> tuple[Array, Kept]:
        """Returns (o_BLHA, what `CallMemory.append` takes) of a segment.

        own: the queries of the segment, the keys and values of h_BKD. A memory that
        holds keys and values adds them, and their position terms. h_BKD are the states
        `before` the segment, if any, and the layer's input; x_BKD are the same as they
        are projected, normalized with pre_lnorm. `kernel` takes keys in the order of
        time, not yet rotated; a memory in another order has its own kernel.
        """


class Call(NamedTuple):
    """The segment of L tokens that a call reads; see `TransformerXL.__call__`."""

    L: int
    first_BL: Array | None
    length_B: Array | None


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


AnyMemory = TypeVar("AnyMemory", bound=MemoryLike)


class Kind(abc.ABC):
    """A kind of memory, for the models of a config (`kinds.choose_kind`).

    A call of the model runs these hooks, in this order:

        begin     (memory, first_BL) -> same          a document starts
        open      memory -> CallMemory                the call reads

    `CallMemory.append` then makes the next memory.
    """

    field = ""  # the field of ModelConfig that selects this kind; "" = the paper's
    # Whether a document gets the same results wherever in a segment it starts.
    restarts = True

    def __init__(self, config: ModelConfig) -> None:
        self.config = config

    @property
    def setting(self) -> str:
        """The field and its value, for messages."""
        return f"model.{self.field} = {getattr(self.config, self.field)}"

    @abc.abstractmethod
    def empty(self, batch_size: int) -> MemoryLike:
        """Returns the initial memory of a training."""

    @abc.abstractmethod
    def empty_fixed(
        self, params: Params, batch_size: int, tgt_len: int, window_len: int = 0
    ) -> MemoryLike:
        """Returns the initial memory for calls of tgt_len tokens with fixed parameters.

        `params` are laid out by `calls.fixed_model`. window_len: see `KeyValues`.
        """

    @abc.abstractmethod
    def one_token(self, params: Params, memory: Any) -> MemoryLike:
        """Returns a memory of any number of tokens for calls of one token.

        `params` are laid out by `calls.fixed_model`.
        """

    def begin(
        self, memory: AnyMemory, first_BL: Array | None
    ) -> tuple[AnyMemory, Array | None]:
        """Returns (memory, first_BL), changed where a segment starts a document."""
        return memory, first_BL

    def open(self, memory: Any, call: Call) -> CallMemory:
        """Returns the memory as a call reads it."""
        return memory
