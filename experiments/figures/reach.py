"""How far back an output depends on a token, on random weights: a figure.

    python -m experiments.figures.reach [--n_layer=4 --tgt_len=8 --mem_len=8]

Section 3.2's dependency length, O(N x L): one token is changed, at one distance after
the other, and an output of which not one bit changes does not depend on it. Prints one
JSON line with the formula's distances and the measured ones, and writes a PNG.
"""

import argparse
import json
from pathlib import Path

from txl_jax.evaluate import reach
from txl_jax.model.config import ModelConfig


def read_flags() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--n_layer", type=int, default=4)
    parser.add_argument("--tgt_len", type=int, default=8, help="tokens of a segment")
    parser.add_argument("--mem_len", type=int, default=8, help="tokens remembered")
    parser.add_argument("--same_length", action="store_true")
    parser.add_argument("--seeds", type=int, default=2, help="random models and texts")
    parser.add_argument("--picture", type=Path, default=Path("reach.png"))
    return parser.parse_args()


def main() -> None:
    given = read_flags()
    config = ModelConfig(
        vocab_size=16,
        n_layer=given.n_layer,
        d_model=16,
        n_head=2,
        d_head=8,
        d_inner=32,
        mem_len=given.mem_len,
        same_length=given.same_length,
    )
    change_NT = reach.reach(config, given.tgt_len, given.seeds)
    layers = range(1, given.n_layer + 1)
    formula = [reach.farthest(config, given.tgt_len, n) for n in layers]
    found = reach.measured(change_NT)
    reach.plot(change_NT, config, given.tgt_len, given.picture)
    sizes = ("n_layer", "tgt_len", "mem_len", "same_length", "seeds")
    result = {
        "program": "reach",
        **{name: getattr(given, name) for name in sizes},
        "formula_tokens": formula,
        "measured_tokens": found,
        "exact": formula == found,
        "tried_tokens": change_NT.shape[1],
        "picture": str(given.picture),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
