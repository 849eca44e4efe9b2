"""Reads token streams segment by segment with a memory (section 3.2).

All evaluators share this loop; they differ only in the output of a segment.
"""

import collections
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh

from txl_jax.evaluate.grouping import count_segments, window_tokens
from txl_jax.model.config import ModelConfig
from txl_jax.model.initializers import Params
from txl_jax.model.memory import Memory
from txl_jax.model.memory.kinds import empty_fixed_memory, lay_out
from txl_jax.model.memory.protocol import AnyMemory, MemoryLike
from txl_jax.model.segment import OneSegment, Segment
from txl_jax.model.txl import TransformerXL
from txl_jax.report.log import compile_step
from txl_jax.sharding.rules import letters, place_segments, shardings

AHEAD = 2  # calls that wait for the devices
Outputs = Any  # of a segment: a pytree of arrays
# Reads a segment, or several of segment_len tokens that `join_calls` has joined:
# (bound model, memory, segment, segment_len) -> (output, memory).
Read = Callable[[TransformerXL, Any, OneSegment, int], tuple[Outputs, Any]]
# Computes the output of one segment: (bound model, hidden_BLD, segment) -> output.
Output = Callable[[TransformerXL, Array, OneSegment], Outputs]


def from_hidden(output: Output) -> Read:
    """Decorates a function of a segment's hidden states, so that it reads segments."""

    def read(
        model: TransformerXL,
        memory: AnyMemory,
        segment: OneSegment,
        segment_len: int,
    ) -> tuple[Outputs, AnyMemory]:
        hidden_BLD, memory = model(
            segment.inputs_BL,
            memory,
            first_BL=segment.first_BL,
            length_B=segment.length_B,
            segment_len=segment_len,
        )
        return output(model, hidden_BLD, segment), memory

    return read


def last(hidden_BLD: Array, length_B: Array) -> Array:
    """Returns the hidden state of each stream's last real token, last_B1D."""
    return jnp.take_along_axis(hidden_BLD, (length_B - 1)[:, None, None], axis=1)


def join_calls(segments: Iterable[Segment], count: int) -> Iterator[Segment]:
    """Joins every `count` segments of L tokens, S = 1, into one of count x L tokens.

    A stream must not continue after padding. The last group is padded, so that all have
    one shape.
    """
    segments = iter(segments)
    while group := [*itertools.islice(segments, count)]:
        *tokens, lengths = zip(*group, strict=True)
        missing = (count - len(group)) * group[0].inputs_SBL.shape[2]
        pad = ((0, 0), (0, 0), (0, missing))
        joined = [np.pad(np.concatenate(part, axis=2), pad) for part in tokens]
        yield Segment._make([*joined, np.sum(lengths, axis=0, dtype=np.int32)])


def make_step(
    config: ModelConfig, read: Read, segment_len: int
) -> Callable[[Params, MemoryLike, Segment], tuple[Outputs, MemoryLike]]:
    """Returns step(unstacked params, memory, segments [S, ..]) -> (outputs, memory)."""
    model = TransformerXL(config)

    def step(
        params: Params, memory: MemoryLike, segments: Segment
    ) -> tuple[Outputs, MemoryLike]:
        def read_one(memory: MemoryLike, segment: OneSegment) -> Any:
            result = model.apply(
                {"params": params}, memory, segment, segment_len, method=read
            )
            return result[::-1]  # a scan returns its carry first

        return jax.lax.scan(read_one, memory, OneSegment._make(segments))[::-1]

    return step


def paced(outputs: Iterable[Outputs]) -> Iterator[Outputs]:
    """Yields outputs that are still computed, of at most AHEAD calls.

    The host prepares the next call meanwhile, but neither its bar nor the end that a
    signal asks for is far from what the devices do.
    """
    pending: collections.deque[Outputs] = collections.deque()
    for output in outputs:
        pending.append(output)
        if len(pending) > AHEAD:
            jax.block_until_ready(pending.popleft())
        yield output


class Reader:
    """Reads segments of B streams and L tokens, with a memory that starts empty.

    `segments` of them are computed together (`grouping.count_segments`; 0 = chosen).
    Without a mesh, computation follows the parameters' devices. `more` returns the
    initial value of what `read` carries beside the memory, as (memory, value). The step
    is compiled once, for the first segment. Call `unstack` outside every loop (see
    `memory.key_values`).
    """

    def __init__(
        self,
        config: ModelConfig,
        read: Read,
        batch_size: int,
        tgt_len: int,
        mesh: Mesh | None = None,
        more: Callable[[], Any] | None = None,
        segments: int = 1,
        documents: bool = False,
    ) -> None:
        B, L = batch_size, tgt_len
        S = count_segments(config, segments, B, L, mesh, documents)
        W = window_tokens(config, S, B, L, mesh)

        # Whether a call is split over mesh.segments; the step then reads parameters
        # that are stacked.
        self.in_pieces = S > 1 and mesh is not None and mesh.shape["segments"] > 1

        def empty(params: Params) -> Any:
            memory: Any = Memory.empty(config, B)
            if not self.in_pieces:
                memory = empty_fixed_memory(config, params, B, S * L, W)
            memory = (memory, more()) if more else memory
            if mesh is None:
                return memory
            places = shardings(mesh, letters(memory))
            return jax.lax.with_sharding_constraint(memory, places)

        self.mesh, self.config = mesh, config
        self.batch_size, self.tgt_len = B, L
        self.segments = S  # of a call
        # Only hidden states pass from device to device.
        apart = functools.partial(lay_out, config)
        self.unstack = jax.jit((lambda params: params) if self.in_pieces else apart)
        # Unused parameters are kept, so that the memory is on their devices.
        self.empty = jax.jit(empty, keep_unused=True)
        self.step = make_step(config, read, L)
        self.program: jax.stages.Compiled | None = None

    def lower(
        self, params: Params, memory: Any, segment: Segment
    ) -> jax.stages.Lowered:
        """Lowers the step for unstacked parameters; a memory keeps its shardings."""
        places = jax.tree.map(lambda x: x.sharding, memory)
        # Donating the memory saves nothing: it moves by a segment, out of place.
        step = jax.jit(self.step, out_shardings=(None, places))
        return step.lower(params, memory, segment)

    def prepare(self, params: Params, segments: Iterable[Segment]) -> None:
        """Compiles what `read` runs for these parameters and segments."""
        if self.program is None:
            fixed = self.unstack(params)
            (first,) = itertools.islice(self._calls(segments), 1)
            self._compile(fixed, self.empty(fixed), first)

    def read(self, params: Params, segments: Iterable[Segment]) -> Iterator[Outputs]:
        """Yields `outputs` for the model's own, stacked parameters."""
        return self.outputs(self.unstack(params), segments)

    def outputs(
        self,
        params: Params,
        segments: Iterable[Segment],
        leave: Callable[[Any], object] | None = None,
    ) -> Iterator[Outputs]:
        """Yields the outputs [1, ..] of every call.

        At the end, `leave` gets the memory. `params` are unstacked. Segments of host
        arrays hold this process's streams. Outputs stay on the device.
        """
        memory = self.empty(params)

        def compute() -> Iterator[Outputs]:
            nonlocal memory
            for segment in self._calls(segments):
                program = self.program or self._compile(params, memory, segment)
                output, memory = program(params, memory, segment)
                yield output

        yield from paced(compute())
        if leave is not None:
            leave(memory)

    def _calls(self, segments: Iterable[Segment]) -> Iterator[Segment]:
        for segment in join_calls(segments, self.segments):
            yield place_segments(self.mesh, segment) if self.mesh else segment

    def _compile(
        self, params: Params, memory: Any, segment: Segment
    ) -> jax.stages.Compiled:
        name = "the evaluation step"
        self.program = compile_step(name, self, params, memory, segment)
        return self.program
