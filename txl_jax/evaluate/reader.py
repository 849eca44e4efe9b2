"""Reads token streams segment by segment with a memory (section 3.2).

All evaluators share this loop; they differ only in the output of a segment.
"""

import collections
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
from txl_jax.model.fixed import FixedTransformerXL, lay_out
from txl_jax.model.key_values import KeyValueMemory
from txl_jax.model.modules import Params
from txl_jax.model.segment import OneSegment, Segment, only
from txl_jax.runtime.programs import Program
from txl_jax.sharding.rules import letters, place_segments, shardings

AHEAD = 2  # calls that wait for the devices
Outputs = Any  # a pytree of arrays
# Reads a segment, or several joined segments of segment_len tokens (`join_calls`):
# (model, memory, segment, segment_len) -> (outputs, memory).
ReadSegment = Callable[[FixedTransformerXL, Any, OneSegment, int], tuple[Outputs, Any]]
# Computes the output of one segment: (model, hidden_BLD, segment) -> output.
Output = Callable[[FixedTransformerXL, Array, OneSegment], Outputs]


def from_hidden(output: Output) -> ReadSegment:
    """Decorates a function of a segment's hidden states, so that it reads segments."""

    def read_segment(
        model: FixedTransformerXL,
        memory: KeyValueMemory,
        segment: OneSegment,
        segment_len: int,
    ) -> tuple[Outputs, KeyValueMemory]:
        hidden_BLD, memory = model(
            segment.inputs_BL,
            memory,
            first_BL=segment.first_BL,
            length_B=segment.length_B,
            segment_len=segment_len,
        )
        return output(model, hidden_BLD, segment), memory

    return read_segment


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


def run_calls(
    program: Program, carry: Any, fixed: Any, segments: Iterable[Segment]
) -> Iterator[tuple[Any, Outputs]]:
    """Yields (carry, outputs) for every call of a program (carry, fixed, segments).

    The outputs are host arrays; the carry is the newest call's, which may be AHEAD
    calls later. No more calls wait: the host prepares the next ones meanwhile, but its
    progress bar and its response to signals stay close to the devices' work.
    """
    pending: collections.deque[Outputs] = collections.deque()
    for segment in segments:
        carry, outputs = program(carry, fixed, segment)
        pending.append(outputs)
        if len(pending) > AHEAD:
            yield carry, jax.device_get(pending.popleft())
    for outputs in pending:
        yield carry, jax.device_get(outputs)


class Reader:
    """Reads segments of B streams and L tokens, with a memory that starts empty.

    n_segments are computed together (`grouping.count_segments`; 0 = chosen). `extra`
    returns the initial value of what `read_segment` carries beside the memory, as
    (memory, value). Call `lay_out` once, outside every loop.
    """

    def __init__(
        self,
        config: ModelConfig,
        read_segment: ReadSegment,
        batch_size: int,
        tgt_len: int,
        mesh: Mesh | None = None,
        extra: Callable[[], Any] | None = None,
        n_segments: int = 1,
    ) -> None:
        B, L = batch_size, tgt_len
        S = count_segments(config, n_segments, B, L, mesh)
        W = window_tokens(config, S, B, L, mesh)
        self.config, self.tgt_len, self.mesh = config, L, mesh
        self.n_segments = S

        def empty(params: Params) -> Any:
            empty = KeyValueMemory.empty(config, params, B, S * L, window_len=W)
            memory = (empty, extra()) if extra else empty
            if mesh is None:
                return memory
            places = shardings(mesh, letters(memory))
            return jax.lax.with_sharding_constraint(memory, places)

        def step(memory: Any, params: Params, segments: Segment) -> tuple[Any, Outputs]:
            model = FixedTransformerXL(config, params)
            outputs, memory = read_segment(model, memory, only(segments), L)
            return memory, outputs

        self.lay_out = jax.jit(lay_out)
        # Unused parameters are kept, so that the memory is on their devices.
        self.empty = jax.jit(empty, keep_unused=True)
        # Donating the memory saves nothing: it moves by a segment, out of place.
        self.step = Program("the evaluation step", step, carries=True)

    def prepare(self, params: Params, segments: Iterable[Segment]) -> None:
        """Compiles the program of `read` for these parameters and segments."""
        params = self.lay_out(params)
        self.step.compile(self.empty(params), params, next(self.place(segments)))

    def read(self, params: Params, segments: Iterable[Segment]) -> Iterator[Outputs]:
        """Yields the outputs of every call, for stacked parameters."""
        return self.outputs(self.lay_out(params), segments)

    def outputs(self, params: Params, segments: Iterable[Segment]) -> Iterator[Outputs]:
        """Yields the outputs of every call, for parameters laid out."""
        calls = self.run(self.empty(params), params, segments)
        return (outputs for _, outputs in calls)

    def run(
        self, memory: Any, params: Params, segments: Iterable[Segment]
    ) -> Iterator[tuple[Any, Outputs]]:
        """Yields (memory, outputs) of every call, for parameters laid out."""
        return run_calls(self.step, memory, params, self.place(segments))

    def place(self, segments: Iterable[Segment]) -> Iterator[Segment]:
        """Joins the segments of each call; without a mesh, they stay on the host.

        Computation then follows the devices of the memory.
        """
        for joined in join_calls(segments, self.n_segments):
            yield place_segments(self.mesh, joined) if self.mesh else joined
