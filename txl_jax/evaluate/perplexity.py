"""The nll of a split, read segment by segment with a memory (section 4.1)."""

import time
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh

from txl_jax import metrics
from txl_jax.data.streams import OFF, Streams
from txl_jax.errors import UserError
from txl_jax.evaluate.dynamic import Adaptation
from txl_jax.evaluate.options import EvalConfig, evaluation_model
from txl_jax.evaluate.reader import Reader, from_hidden
from txl_jax.model.config import ModelConfig
from txl_jax.model.fixed import FixedTransformerXL
from txl_jax.model.modules import Params
from txl_jax.model.segment import OneSegment, Segment
from txl_jax.runtime.storage import Json
from txl_jax.sharding.rules import host_rows

ShowProgress = Callable[[int, int], None]  # (done, total), in tokens
Evaluate = Callable[[Params, np.ndarray, ShowProgress], Json]


def make_reader(model_config: ModelConfig, config: EvalConfig, mesh: Mesh) -> Reader:
    """Returns the reader of summed nlls in nats, for `Streams` of config.streams.

    The softmax is computed for the newest tgt_len tokens of a segment, not for tokens
    that are read again.
    """
    L = config.tgt_len

    @from_hidden
    def sum_nll(
        model: FixedTransformerXL, hidden_BLD: Array, segment: OneSegment
    ) -> Array:
        targets_BL, weights_BL = segment.targets_BL, segment.weights_BL
        if config.ext_len:
            place_BL = jnp.arange(L) + segment.length_B[:, None] - L
            hidden_BLD, targets_BL, weights_BL = (
                jax.vmap(lambda x, place: x[place])(x_BL, jnp.maximum(place_BL, 0))
                for x_BL in (hidden_BLD, targets_BL, weights_BL)
            )
            weights_BL *= place_BL >= 0
        nll_BL = model.embedding.nll(hidden_BLD, targets_BL)
        return jnp.sum(nll_BL * weights_BL)

    model_config = evaluation_model(model_config, config)
    B, S = config.streams, config.segments_per_step
    return Reader(model_config, sum_nll, B, config.ext_len + L, mesh, n_segments=S)


def each_segment(streams: Streams, progress: ShowProgress) -> Iterator[Segment]:
    """Yields the segments of an epoch; calls progress when the next one is read."""
    tokens, count = len(streams.tokens) - 1, streams.segments_per_epoch
    for done, segment in enumerate(streams.epoch(), 1):
        yield segment
        progress(tokens * done // count, tokens)


def make_evaluate(
    model_config: ModelConfig,
    config: EvalConfig,
    mesh: Mesh,
    reader: Reader | Adaptation | None = None,
    reset_memory_at: int = OFF,
) -> Evaluate:
    """Returns evaluate(params, tokens, progress), compiled once for any split.

    progress is called when a segment is dispatched. The result has the number of scored
    tokens, the mean nll in nats, ppl, bpc, the seconds of reading without compilation,
    the streams, and cold_tokens: the tokens scored before their stream had read mem_len
    tokens (without a memory, ext_len). reader: yields summed nlls in nats; by default
    from `make_reader`. reset_memory_at: the id of the token that the config names, as
    in `Loaded.ids`.
    """
    if config.reset_memory_at and reset_memory_at == OFF:
        raise UserError(
            f"eval.reset_memory_at = {config.reset_memory_at!r} needs the token's id"
        )
    context = config.mem_len or config.ext_len
    reader = reader or make_reader(model_config, config, mesh)
    rows = host_rows(mesh, config.streams, "eval.streams")

    def evaluate(params: Params, tokens: np.ndarray, progress: ShowProgress) -> Json:
        tokens = config.cut(tokens)
        streams = Streams(
            tokens,
            config.streams,
            config.tgt_len,
            rows=rows,
            ext_len=config.ext_len,
            warm_tokens=context if config.warm_start else 0,
            reset_memory_at=reset_memory_at,
        )
        reader.prepare(params, streams.epoch())
        started = time.perf_counter()
        sums = [*reader.read(params, each_segment(streams, progress))]
        # Summed in float64: the sum over a split exceeds float32's precision.
        scored = len(tokens) - 1
        nll = float(np.sum(sums, dtype=np.float64)) / scored
        seconds = time.perf_counter() - started
        return {
            "tokens": scored,
            "nll": nll,
            "ppl": metrics.perplexity(nll),
            "bpc": metrics.bits(nll),
            "seconds": seconds,
            "tokens_per_second": scored / seconds,
            "streams": config.streams,
            "cold_tokens": streams.cold_tokens(context),
        }

    return evaluate
