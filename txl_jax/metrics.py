"""Conversions between the units of results, and parameter counts."""

import math
from typing import Any

import jax


def perplexity(nll_nats: float) -> float:
    """Returns exp of a mean negative log-likelihood; inf where exp would overflow."""
    return math.exp(nll_nats) if nll_nats < 700 else math.inf


def bits(nll_nats: float) -> float:
    """Converts nats to bits: bits per character if every token is a character."""
    return nll_nats / math.log(2)


def parameter_count(params: Any) -> int:
    """Returns the number of scalars in a pytree of arrays or shapes."""
    return sum(leaf.size for leaf in jax.tree.leaves(params))
