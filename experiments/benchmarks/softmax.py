"""Compares the adaptive softmax with a full softmax; prints one JSON line.

    python -m experiments.benchmarks.softmax

The benchmark times the loss and gradient of 2,048 tokens with 410 features over the
267,735 words of WikiText-103, distributed by Zipf's law. The full softmax stores the
scores of all words, which takes about 8 GB.
"""

import argparse
import sys
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from experiments.benchmarks import gradients, quiet, record, subject
from txl_jax.kernels.cluster import Table
from txl_jax.kernels.softmax import Softmax, adaptive_nll


def make_params(
    args: argparse.Namespace,
) -> tuple[Softmax, Array, Array, tuple[int, ...]]:
    """Returns random parameters, hidden states, targets, and the cutoffs."""
    config = subject.shrink(subject.WIKITEXT) if args.tiny else subject.WIKITEXT
    V, D, G = config.vocab_size, config.d_model, len(config.cutoffs)
    keys = jax.random.split(jax.random.key(0), 3)
    params = Softmax(
        (Table(0.02 * jax.random.normal(keys[0], (V, D)), jnp.zeros(V)),),
        (None,) * (G + 1),
        Table(0.02 * jax.random.normal(keys[1], (G, D)), jnp.zeros(G)),
    )
    hidden_BLD = jax.random.normal(keys[2], (1, args.tokens, D))
    target_BL = jnp.asarray(subject.zipf_text(V, args.tokens))[None]
    return params, hidden_BLD, target_BL, config.cutoffs


def dense_nll(params: Softmax, hidden_BLD: Array, target_BL: Array) -> Array:
    """Returns -log p(target) of one softmax over all words, nll_BL."""
    (weight_VD, bias_V), *_ = params.tables
    logits_BLV = jnp.einsum("BLD,VD->BLV", hidden_BLD, weight_VD) + bias_V
    log_probs_BLV = jax.nn.log_softmax(logits_BLV)
    return -jnp.take_along_axis(log_probs_BLV, target_BL[..., None], axis=-1)[..., 0]


def measure(args: argparse.Namespace, watch: quiet.Watch) -> dict[str, Any]:
    """Times the value and gradient of both."""
    params, hidden_BLD, target_BL, cutoffs = make_params(args)

    def adaptive(params: Softmax, hidden_BLD: Array) -> Array:
        return adaptive_nll(params, hidden_BLD, target_BL, cutoffs).sum()

    def dense(params: Softmax, hidden_BLD: Array) -> Array:
        return dense_nll(params, hidden_BLD, target_BL).sum()

    losses = {"adaptive": adaptive, "dense": dense}
    name = f"{args.tokens} tokens, {len(params.tables[0].bias_V)} words"
    arguments = params, hidden_BLD
    case = gradients.compare(name, args.tokens, losses, arguments, args, watch)
    return {"cases": [case]}


def main(argv: list[str] | None = None) -> int:
    parser = record.make_parser(__doc__)
    parser.add_argument("--tokens", type=record.positive, default=2048)
    return record.run("softmax", parser, measure, argv)


if __name__ == "__main__":
    sys.exit(main())
