"""The nll of a split, each segment read with what came before it (section 4.1).

Dims: S segments in one call, B streams, L segment, M memory.
"""

import dataclasses
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from txl_jax import metrics
from txl_jax.checkpoint import check_which
from txl_jax.data.corpora import SPLITS
from txl_jax.data.streams import Streams
from txl_jax.errors import UserError, require, require_one_of
from txl_jax.evaluate import sweep
from txl_jax.model.config import ModelConfig
from txl_jax.model.key_values import KeyValueMemory, unstack
from txl_jax.model.memory import Memory
from txl_jax.model.txl import TransformerXL
from txl_jax.report.wait import telling_compilation
from txl_jax.sharding import host_rows, place_segments, shardings
from txl_jax.step import make_eval_step


@dataclasses.dataclass(frozen=True)
class EvalConfig:
    """How to evaluate; none of it is inherited from training."""

    split: str = "test"  # train, valid or test
    checkpoint: str = "best"  # best, latest, a step; of average (all) or 1,2 the mean
    streams: int = 8  # contiguous parts read side by side, each from a cold start
    tgt_len: int = 128  # tokens of a segment
    mem_len: int = 512  # tokens remembered
    ext_len: int = 0  # tokens read again before each segment, where mem_len is 0
    clamp_len: int = 0  # distances beyond it count as it; 0 = off
    same_length: bool = False  # every token sees the newest mem_len keys alone
    warm_start: bool = False  # first fill memories, or windows, with what precedes
    reset_memory_at: int = -1  # id of the token after which a document starts; -1 = off
    yardsticks: bool = False  # after training on bytes: n-gram models, gzip, xz
    max_tokens: int = 0  # score the first so many alone; 0 = all
    sliding_window: int = 0  # tokens read anew for each one predicted; 0 = off
    sweep: str = ""  # mode evaluate: FIELD=START:STOP:STEP or FIELD=a,b,c
    cold_start: int = 0  # mode evaluate: nll by tokens read, up to so many; 0 = off

    def __post_init__(self) -> None:
        """Refuses impossible values, naming the field."""
        require(self, "eval", 1, "streams", "tgt_len")
        require(self, "eval", 0, "mem_len", "ext_len", "clamp_len")
        require(self, "eval", 0, "max_tokens", "sliding_window", "cold_start")
        require(self, "eval", -1, "reset_memory_at")
        require_one_of(self.split, list(SPLITS), "eval.split")
        if self.ext_len and self.mem_len:
            raise UserError(
                f"eval.ext_len = {self.ext_len} with eval.mem_len = {self.mem_len} "
                "would show the same tokens twice: set one of them to 0"
            )
        check_which(self.checkpoint, "eval.checkpoint")
        self._check_kinds()

    def cut(self, tokens: np.ndarray) -> np.ndarray:
        """Returns the tokens of a split that are read: max_tokens and one."""
        return tokens[: self.max_tokens + 1] if self.max_tokens else tokens

    def _check_kinds(self) -> None:
        """Refuses two kinds of evaluation at once, and what a kind cannot have."""
        if self.sweep:
            sweep.parse(self.sweep)
        if self.cold_start and (self.sweep or self.sliding_window or self.ext_len):
            raise UserError(
                f"eval.cold_start = {self.cold_start} is of a memory that fills: leave "
                "out eval.sweep, eval.sliding_window and eval.ext_len"
            )
        cut = self.cold_start or self.sliding_window
        if cut and self.reset_memory_at >= 0:
            raise UserError(
                f"eval.reset_memory_at = {self.reset_memory_at}: eval.sliding_window "
                "and eval.cold_start cut the text regardless of documents; set it to -1"
            )


Evaluate = Callable[[Any, np.ndarray, Callable[[int, int], None]], dict[str, Any]]


def evaluation_model(config: ModelConfig, how: EvalConfig) -> ModelConfig:
    """Returns the same model with evaluation's memory; parameters fit both."""
    return dataclasses.replace(
        config,
        mem_len=how.mem_len,
        clamp_len=how.clamp_len,
        same_length=how.same_length,
    )


def make_steps(
    config: ModelConfig, how: EvalConfig, mesh: Mesh
) -> tuple[Any, Any, Any]:
    """Returns (apart, empty, eval_step), each to be compiled once.

    apart(params) has each layer's parameters by themselves; empty(params) is the memory
    to begin with; eval_step, see `make_eval_step`, returns it in the same arrays.
    """
    config = evaluation_model(config, how)
    width = how.ext_len + how.tgt_len

    def start(params: Any) -> KeyValueMemory:
        memory = KeyValueMemory.of(
            config, params, Memory.empty(config, how.streams), width
        )
        places = shardings(mesh, memory.letters())
        return jax.lax.with_sharding_constraint(memory, places)

    step = make_eval_step(TransformerXL(config, stacked=False))
    # The memory is not donated: it moves by a segment, which cannot be done in place.
    return jax.jit(unstack), jax.jit(start), jax.jit(step)


def make_evaluate(config: ModelConfig, how: EvalConfig, mesh: Mesh) -> Evaluate:
    """Returns evaluate(params, tokens, progress), compiled once for any split.

    progress(done, total) is called as segments are dispatched. The result: tokens
    scored, mean nll in nats, ppl, bpc, streams, and cold_tokens, those scored before
    their stream had read mem_len tokens, or ext_len without a memory.
    """
    rows = host_rows(mesh, how.streams, "eval.streams")
    apart, empty, eval_step = make_steps(config, how, mesh)
    eval_step = telling_compilation("the evaluation step", eval_step)

    def evaluate(
        params: Any, tokens: np.ndarray, progress: Callable[[int, int], None]
    ) -> dict[str, Any]:
        started = time.perf_counter()
        tokens = how.cut(tokens)
        full = how.mem_len or how.ext_len
        streams = Streams(
            tokens,
            how.streams,
            how.tgt_len,
            rows=rows,
            ext_len=how.ext_len,
            warm_tokens=full if how.warm_start else 0,
            reset_memory_at=how.reset_memory_at,
        )
        params = apart(params)
        memory = empty(params)
        sums = []
        for number, segment in enumerate(streams.epoch()):
            memory, nll_S = eval_step(params, memory, place_segments(mesh, segment))
            sums.append(nll_S)
            progress(number + 1, streams.segments_per_epoch)
        # Added up on the host in float64: a split's sum outgrows float32.
        nll = float(np.sum(jax.device_get(sums), dtype=np.float64))
        scored = len(tokens) - 1
        seconds = time.perf_counter() - started
        return {
            "tokens": scored,
            "nll": nll / scored,
            "ppl": metrics.perplexity(nll / scored),
            "bpc": metrics.bits(nll / scored),
            "streams": how.streams,
            "cold_tokens": streams.cold_tokens(full),
            "seconds": seconds,
            "tokens_per_second": scored / seconds,
        }

    return evaluate
