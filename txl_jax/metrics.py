"""Conversions between the units of results."""

import math


def perplexity(nll_nats: float) -> float:
    """Returns exp of a mean negative log-likelihood; inf where exp would overflow."""
    return math.exp(nll_nats) if nll_nats < 700 else math.inf


def bits(nll_nats: float) -> float:
    """Converts nats to bits: bits per character if every token is a character."""
    return nll_nats / math.log(2)
