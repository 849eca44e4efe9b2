"""The units of results: nats, bits, perplexity, tokens."""

import math
from typing import Any

import jax


def perplexity(nll_nats: float) -> float:
    """Returns exp of a mean negative log-likelihood; infinite rather than an error."""
    return math.exp(nll_nats) if nll_nats < 700 else math.inf


def bits(nll_nats: float) -> float:
    """Returns nats as bits: bits per character where a token is one."""
    return nll_nats / math.log(2)


def parameter_count(params: Any) -> int:
    """Returns the number of scalars in a pytree, of arrays or of their shapes."""
    return sum(leaf.size for leaf in jax.tree.leaves(params))
