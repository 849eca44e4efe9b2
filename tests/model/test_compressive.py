"""The compressive memory matches its transcription, and the paper's where it must.

Dims: S segments; Z compressed slots, C states of a block.
"""

from typing import Any

import jax
import numpy as np
import pytest

from tests.support import tiny
from tests.support.reference_compressive import Stream
from txl_jax.model.config import ModelConfig
from txl_jax.model.memory import Memory
from txl_jax.model.memory.compressive import CompressiveMemory
from txl_jax.model.segment import OneSegment, Segment
from txl_jax.model.txl import TransformerXL
from txl_jax.update.options import TrainConfig
from txl_jax.update.step import nll_sum, sum_gradients

B, L, S, Z, C = 3, 5, 5, 3, 2
COMPRESSED: dict[str, Any] = {"mem_len": 4, **tiny.COMPRESSED}
CONV = tiny.config(**COMPRESSED, compression="conv", pre_lnorm=True, **tiny.MODERN)
CONFIGS = [
    tiny.config(**COMPRESSED),
    tiny.config(**COMPRESSED | {"compression_rate": 3}, compression="max"),
    CONV,
]


def make_segments(config: ModelConfig) -> tuple[Any, Any, Any]:
    """Returns tokens, starts of documents and numbers of real tokens, [S, B, ..].

    The first stream has no document and no padding.
    """
    rng = np.random.default_rng(3)
    first_SBL = rng.random((S, B, L)) < 0.08
    length_SB = rng.integers(0, L + 1, (S, B)).astype(np.int32)
    first_SBL[:, 0], length_SB[:, 0] = False, L
    return tiny.make_tokens(B * S, L).reshape(S, B, L), first_SBL, length_SB


@pytest.mark.parametrize(
    "config",
    [
        *CONFIGS,
        pytest.param(
            tiny.config(**COMPRESSED, kernel="chunked", dtype="bfloat16"),
            marks=pytest.mark.long,
        ),
    ],
    ids=lambda config: f"{config.compression} {config.kernel} {config.dtype}",
)
def test_segments_match_the_transcription(config: ModelConfig) -> None:
    """There are documents, padding, and blocks that a segment leaves incomplete."""
    params = tiny.make_params(config)
    streams = [Stream(params, config) for _ in range(B)]
    memory = CompressiveMemory.empty(config, B)
    tolerance = 2 * tiny.BFLOAT16 if config.dtype == "bfloat16" else tiny.FLOAT32
    errors: list[list[float]] = [[] for _ in range(B)]
    for tokens_BL, first_BL, length_B in zip(*make_segments(config), strict=True):
        hidden_BLD, memory = tiny.apply(
            config, params, tokens_BL, memory, first_BL=first_BL, length_B=length_B
        )
        for b, (stream, length) in enumerate(zip(streams, length_B, strict=True)):
            if length:
                read = stream.read(tokens_BL[b, :length], first_BL[b, :length])
                tiny.assert_close(hidden_BLD[b, :length], read[0], tolerance)
                if config.compression == "conv":
                    tiny.assert_close(memory.error_B[b], read[1], tolerance)
                    errors[b].append(read[1])
            layers = stream.visible
            assert memory.filled_B[b] == len(layers[0])
            tiny.assert_close(
                memory.h_NBMD[:, b, memory.mem_len - len(layers[0]) :],
                np.array(layers),
                tolerance,
            )
    if config.compression == "conv":
        assert min(errors[0][2:]) > 0 and max(errors[2]) > 0


def test_with_rate_1_it_is_a_longer_memory() -> None:
    config = tiny.config(mem_len=4, compressed_len=3, compression_rate=1)
    params, longer = tiny.make_params(config), tiny.config(mem_len=7)
    memory, expected = CompressiveMemory.empty(config, B), Memory.empty(longer, B)
    for tokens_BL, first_BL, length_B in zip(*make_segments(config), strict=True):
        more = {"first_BL": first_BL, "length_B": length_B}
        hidden_BLD, memory = tiny.apply(config, params, tokens_BL, memory, **more)
        expected_BLD, expected = tiny.apply(longer, params, tokens_BL, expected, **more)
        real_BL1 = (np.arange(L) < length_B[:, None])[..., None]
        tiny.assert_close(hidden_BLD * real_BL1, expected_BLD * real_BL1)
        np.testing.assert_array_equal(memory.filled_B, expected.filled_B)


def test_nothing_before_a_document_is_read() -> None:
    """One slot mixes the end of one document with the start of the next."""
    params, after, start = tiny.make_params(CONV), [], 2
    for seed in (0, 1):
        memory, pieces = CompressiveMemory.empty(CONV, 1), []
        for s, tokens_BL in enumerate(tiny.make_tokens(6, L)[:, None]):
            first_BL = np.zeros((1, L), bool)
            if s < 2:  # another text before the document
                tokens_BL = tiny.make_tokens(1, L, 10 * seed + s)
            elif s == 2:
                first_BL[0, start] = True
                tokens_BL[0, :start] = tiny.make_tokens(1, start, seed + 30)
            hidden_BLD, memory = tiny.apply(
                CONV, params, tokens_BL, memory, first_BL=first_BL
            )
            if s >= 2:
                pieces.append(np.asarray(hidden_BLD[0, start if s == 2 else 0 :]))
        after.append(np.concatenate(pieces))
    np.testing.assert_array_equal(after[0], after[1])


def test_the_compression_learns_from_its_error_alone() -> None:
    """Finite differences give its gradient; other parameters have the nll's."""
    params = tiny.make_params(CONV)
    tokens_SBL = tiny.make_tokens(4 * B, L).reshape(4, B, L)
    memory = CompressiveMemory.empty(CONV, B)
    streams = [Stream(params, CONV) for _ in range(B)]
    for tokens_BL in tokens_SBL[:3]:
        _, memory = tiny.apply(CONV, params, tokens_BL, memory)
        for stream, tokens_L in zip(streams, tokens_BL, strict=True):
            stream.read(tokens_L, np.zeros(L, bool))
    segments = Segment(
        inputs_SBL=tokens_SBL[3:],
        targets_SBL=tokens_SBL[3:],
        weights_SBL=np.ones((1, B, L), np.float32),
        first_SBL=np.zeros((1, B, L), bool),
        length_SB=np.full((1, B), L, np.int32),
    )
    segment = jax.tree.map(lambda x: x[0], OneSegment._make(segments))
    model, key = TransformerXL(CONV), jax.random.key(0)
    train = TrainConfig(batch_size=B, tgt_len=L, num_steps=1)

    @jax.jit
    def gradients(params: Any) -> tuple[Any, Any]:
        of_nll = jax.grad(lambda p: nll_sum(model, p, memory, segment, key)[0])(params)
        sums, _ = sum_gradients(model, params, memory, segments, key, train)
        return of_nll, sums.grads

    of_nll, of_loss = gradients(params)
    assert not of_nll["layers"]["compression"]["conv"].any()
    conv_NCDD = np.asarray(of_loss["layers"].pop("compression")["conv"])
    of_nll["layers"].pop("compression")
    tiny.assert_close(of_loss, of_nll)

    def error(n: int, index: Any, step: float) -> float:
        total = 0.0
        for stream, tokens_L in zip(streams, tokens_SBL[3], strict=True):
            states, slots = ([x[:] for x in y] for y in (stream.states, stream.slots))
            weight = stream.params["layers"]["compression"]["conv"]
            weight[n][index] += step
            total += L * stream.read(tokens_L, np.zeros(L, bool))[1]
            weight[n][index] -= step
            stream.states, stream.slots = states, slots
        return total

    for n in range(tiny.N):
        steepest = np.unravel_index(np.abs(conv_NCDD[n]).argmax(), (C, tiny.D, tiny.D))
        for index in (steepest, (1, 2, 3), (0, 5, 1)):
            slope = (error(n, index, 1e-5) - error(n, index, -1e-5)) / 2e-5
            bound = tiny.FLOAT32 * np.abs(conv_NCDD).max()
            assert abs(conv_NCDD[n][index] - slope) < bound, (n, index)
