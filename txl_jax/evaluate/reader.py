"""Reads token streams segment by segment with a memory (section 3.2).

All evaluators share this loop; they differ only in the output of a segment.

Dims: S segments in a call, B streams, L segment, D model.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh

from txl_jax.data.streams import Segment
from txl_jax.model.config import ModelConfig
from txl_jax.model.decoder import Decoder, unstack
from txl_jax.model.key_values import KeyValueMemory
from txl_jax.model.memory import Memory
from txl_jax.model.txl import TransformerXL
from txl_jax.report.progress import report_compilation
from txl_jax.sharding import letters, place_segments, shardings

Traced = Any  # a single Segment [B, ..] inside a jitted function
# Reads one segment: (bound model, memory, segment) -> (memory, output).
Read = Callable[[TransformerXL, KeyValueMemory, Traced], tuple[KeyValueMemory, Any]]


def hidden(
    model: TransformerXL, memory: KeyValueMemory, segment: Traced
) -> tuple[KeyValueMemory, Array]:
    """Returns (memory, hidden_BLD) of one segment."""
    hidden_BLD, memory = model(
        segment.inputs_SBL,
        memory,
        first_BL=segment.first_SBL,
        length_B=segment.length_SB,
    )
    return memory, hidden_BLD


def nll(
    model: TransformerXL, memory: KeyValueMemory, segment: Traced
) -> tuple[KeyValueMemory, Array]:
    """Returns (memory, nll_BL in nats of all tokens) of one segment."""
    memory, hidden_BLD = hidden(model, memory, segment)
    return memory, model.embedding.nll(hidden_BLD, segment.targets_SBL)


def last(hidden_BLD: Array, length_B: Array) -> Array:
    """Returns the hidden state of each stream's last real token, last_B1D."""
    return jnp.take_along_axis(hidden_BLD, (length_B - 1)[:, None, None], axis=1)


def make_segment(
    inputs_BL: np.ndarray, targets_BL: np.ndarray, length: int = 0
) -> Segment:
    """Returns one segment [S = 1, B, L] without document boundaries.

    length: the number of real tokens, 0 = all.
    """
    B, L = inputs_BL.shape
    weights_BL = np.broadcast_to(np.arange(L) < (length or L), (B, L))
    return Segment(
        inputs_BL[None],
        targets_BL[None],
        weights_BL[None].astype(np.float32),
        np.zeros((1, B, L), bool),
        np.full((1, B), length or L, np.int32),
    )


def empty_memory(
    config: ModelConfig, params: Any, batch_size: int, tgt_len: int
) -> KeyValueMemory:
    """Returns the memory of a cold start; `params` are unstacked."""
    memory = Memory.empty(config, batch_size)
    return KeyValueMemory.of(config, params, memory, tgt_len)


def make_step(
    config: ModelConfig, read: Read
) -> Callable[[Any, KeyValueMemory, Segment], tuple[KeyValueMemory, Any]]:
    """Returns step(params, memory, segments [S, ..]) -> (memory, outputs [S, ..]).

    `params` are unstacked.
    """
    model = Decoder(config)

    def step(
        params: Any, memory: KeyValueMemory, segments: Segment
    ) -> tuple[KeyValueMemory, Any]:
        def read_one(memory: KeyValueMemory, segment: Segment) -> Any:
            return model.apply({"params": params}, memory, segment, method=read)

        return jax.lax.scan(read_one, memory, segments)

    return step


class Reader:
    """Reads segments of B streams and L tokens, with a memory that starts empty.

    Without a mesh, computation follows the parameters' devices. `unstack`, `empty` and
    `step` are jitted once. Call `unstack` outside every loop (see `decoder.unstack`).
    """

    def __init__(
        self,
        config: ModelConfig,
        read: Read,
        batch_size: int,
        tgt_len: int,
        mesh: Mesh | None = None,
        name: str = "the evaluation step",
    ) -> None:
        def empty(params: Any) -> KeyValueMemory:
            memory = empty_memory(config, params, batch_size, tgt_len)
            if mesh is None:
                return memory
            places = shardings(mesh, letters(memory))
            return jax.lax.with_sharding_constraint(memory, places)

        self.mesh = mesh
        self.unstack = jax.jit(unstack)
        self.empty = jax.jit(empty)
        # Donating the memory saves nothing: it moves by a segment, out of place.
        self.step = jax.jit(make_step(config, read))
        self._step = report_compilation(name, self.step)

    def outputs(self, params: Any, segments: Iterable[Segment]) -> Iterator[Any]:
        """Yields the outputs [S, ..] of every call, starting from an empty memory.

        `params` are unstacked. Segments of host arrays hold this process's streams.
        Outputs stay on the device, so that the host prepares the next segment
        meanwhile.
        """
        memory = self.empty(params)
        for segment in segments:
            if self.mesh is not None:
                segment = place_segments(self.mesh, segment)
            memory, output = self._step(params, memory, segment)
            yield output
