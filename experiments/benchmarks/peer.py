"""The peer: Hugging Face's TransfoXLLMHeadModel of the same sizes.

    pip install torch transformers==4.35.2

In later releases of transformers the model fails or is missing. The peer shifts its
targets internally, so of L tokens it scores L - 1; this project scores all L.

The peer runs in a separate process, so that neither side's threads wait for the
other's and memory is counted separately.

Dims: B streams, L segment, T tokens.
"""

import importlib.metadata
import importlib.util
import logging
import multiprocessing
import resource
import warnings
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import jax
import numpy as np

from txl_jax.model.config import ModelConfig

VERSION = "4.35.2"  # the release of transformers


def describe() -> str:
    """Returns the name of the peer, or "not .." and the reason."""
    if not all(map(importlib.util.find_spec, ("torch", "transformers"))):
        return "not installed"
    here = importlib.metadata.version("transformers")
    if here != VERSION:
        return f"not installed: transformers {here} is not {VERSION}"
    if (backend := jax.default_backend()) != "cpu":
        return f"not compared: the peer runs on the CPU, JAX on {backend}"
    return f"transformers {here} TransfoXLLMHeadModel"


def is_available() -> bool:
    """Returns whether the peer can be compared on this machine."""
    return not describe().startswith("not ")


class Peer:
    """A `Model` in a separate process."""

    def __init__(self, config: ModelConfig):
        spawn = multiprocessing.get_context("spawn")
        self.process = ProcessPoolExecutor(1, spawn, _make, (config,))

    def call(self, method: str, *args: Any) -> Any:
        """Calls a method of the model, and waits for its result."""
        return self.process.submit(_call, method, *args).result()


_model: Any = None  # set in the peer's process


def _make(config: ModelConfig) -> None:
    global _model
    _model = Model(config)


def _call(method: str, *args: Any) -> Any:
    return getattr(_model, method)(*args)


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


class Model:
    """The peer's model with random weights, and its memory."""

    def __init__(self, config: ModelConfig):
        import torch

        warnings.filterwarnings("ignore", category=FutureWarning, module="transformers")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a deprecation warning
            from transformers import TransfoXLConfig, TransfoXLLMHeadModel

            logging.getLogger("transformers").setLevel(logging.ERROR)
            self.before = _peak_bytes()
            peer_config = TransfoXLConfig(
                vocab_size=config.vocab_size,
                cutoffs=list(config.cutoffs),
                d_model=config.d_model,
                d_embed=config.embed_size,
                n_head=config.n_head,
                d_head=config.d_head,
                d_inner=config.d_inner,
                div_val=config.div_val,
                n_layer=config.n_layer,
                mem_len=config.mem_len,
                clamp_len=config.clamp_len or -1,
                same_length=config.same_length,
                untie_r=config.untie_r,
                proj_share_all_but_first=any(config.tie_projs),
                dropout=config.dropout,
                dropatt=config.dropatt,
            )
            self.model = TransfoXLLMHeadModel(peer_config).eval()
        self.torch = torch
        self.is_short = config.dtype == "bfloat16"  # in training
        self.memory: Any = None
        self.token = torch.zeros(1, 1, dtype=torch.long)

    def bytes_above(self) -> int:
        """Returns the peak memory beyond what training must keep.

        Training must keep the parameters, Adam's two moments and one gradient.
        """
        parameters = sum(each.nbytes for each in self.model.parameters())
        return _peak_bytes() - self.before - 4 * parameters

    def _place(self, tokens: np.ndarray) -> Any:
        return self.torch.from_numpy(tokens.astype(np.int64))

    def evaluate(self, tokens: np.ndarray, tgt_len: int) -> float:
        """Returns the mean nll in nats of a text, tokens_T or streams tokens_BT.

        Every stream begins from a cold start.
        """
        memory: Any = None
        total: Any = 0.0
        tokens_BT = self._place(np.atleast_2d(tokens))
        with self.torch.inference_mode():
            for first in range(0, tokens_BT.shape[1], tgt_len):
                part_BL = tokens_BT[:, first : first + tgt_len]
                result = self.model(part_BL, mems=memory, labels=part_BL)
                memory, total = result.mems, total + result.losses.sum()
        return float(total) / tokens.size

    def generate(self, count: int, top_k: int) -> None:
        """Samples `count` tokens one at a time, continuing from its memory."""
        torch = self.torch
        with torch.inference_mode():
            for _ in range(count):
                result = self.model(self.token, mems=self.memory)
                self.memory = result.mems
                logits, token = result.prediction_scores[0, -1].topk(top_k)
                chosen = torch.multinomial(logits.softmax(dim=-1), 1)
                self.token = token[chosen][None]

    def make_optimizer(self, lr: float, clip: float) -> None:
        """Creates the Adam optimizer for `train`, and enables dropout."""
        self.model.train()
        self.optimizer = self.torch.optim.Adam(self.model.parameters(), lr=lr)
        self.clip = clip

    def train(self, tokens_BL: np.ndarray) -> float:
        """Runs one update on a segment, with its memory; returns the mean nll."""
        torch = self.torch
        tokens = self._place(tokens_BL)
        self.optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=self.is_short):
            result = self.model.transformer(tokens, mems=self.memory)
        self.memory = result.mems
        # Its softmax fails with autocast: two types meet in an assignment.
        loss = self.model.crit(result.last_hidden_state.float(), tokens).mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
        self.optimizer.step()
        return loss.item()
