"""Classifies passages by the hidden states of a trained model: which module is it from?

    python -m experiments.recipes.classification --model=runs/quickstart

The passages are pieces of ten modules of the running Python's standard library. The
model stays as it is: a packaged one, or a workdir's, with the paper's memory of at
least 64 tokens. The memory carries the context from segment to segment, so a passage
may have any number of segments. A softmax regression
on the means and deviations of every layer's hidden states is trained on the first four
fifths of each module and tested on the last. The baseline reads counts of tokens.

Dims: C classes, P passages, T tokens of a passage, X features.
"""

import sys
import sysconfig
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array

import txl_jax
from experiments.figures import program
from txl_jax.data.vocab import Vocab
from txl_jax.errors import UserError
from txl_jax.model.memory.kinds import choose_kind

MODULES = (
    *("_pydecimal", "argparse", "ast", "datetime", "inspect"),
    *("subprocess", "tarfile", "threading", "turtle", "typing"),
)
PASSAGES = 50  # from each module, if it is long enough
TESTED = 5  # one passage in five is for the test: the last ones of a module
SEGMENT = 64  # tokens, at most the length of the memory
AT_ONCE = 50  # passages read side by side
UPDATES, RATE, PENALTY = 500, 1e-2, 3e-3  # for the regression


def read_passages(vocab: Vocab, length: int) -> tuple[np.ndarray, ...]:
    """Returns tokens_PT, the module of each passage, class_P, and is_test_P.

    Raises UserError if a module has too few tokens for one tested passage.
    """
    tokens, classes, tests = [], [], []
    for number, name in enumerate(MODULES):
        path = Path(sysconfig.get_paths()["stdlib"], f"{name}.py")
        data = np.concatenate([*vocab.stream([path.read_bytes()], name)])
        if (count := min(len(data) // length, PASSAGES)) < TESTED:
            raise UserError(
                f"--length={length}: {name} has {len(data)} tokens, fewer than "
                f"{TESTED} passages: at most {len(data) // TESTED // SEGMENT * SEGMENT}"
            )
        tokens.append(data[: count * length].reshape(count, length))
        classes.append(np.full(count, number))
        tests.append(np.arange(count) >= count - count // TESTED)
    return np.concatenate(tokens), np.concatenate(classes), np.concatenate(tests)


def describe(loaded: txl_jax.Loaded, tokens_PT: np.ndarray) -> np.ndarray:
    """Returns features_PX from the newest states in the memory after each segment."""

    @jax.jit
    def moments_of(params: dict, tokens_BL: Array, memory: txl_jax.Memory) -> tuple:
        found: Any = loaded.model.apply({"params": params}, tokens_BL, memory)
        hidden_BLD, memory = found
        h_NBLD = jnp.concatenate([memory.h_NBMD[:, :, -SEGMENT:], hidden_BLD[None]])
        return h_NBLD.mean(axis=2), jnp.square(h_NBLD).mean(axis=2), memory

    features = []
    for start in range(0, len(tokens_PT), AT_ONCE):
        tokens_BT = tokens_PT[start : start + AT_ONCE].astype(np.int32)
        memory = txl_jax.Memory.empty(loaded.config.model, len(tokens_BT))
        moments = []
        for tokens_BL in np.split(tokens_BT, tokens_BT.shape[1] // SEGMENT, axis=1):
            *both, memory = moments_of(loaded.params, tokens_BL, memory)
            moments.append(both)
        mean_NBD, square_NBD = np.mean(moments, axis=0)
        std_NBD = np.sqrt(square_NBD - mean_NBD**2)
        features.append(np.concatenate([*mean_NBD, *std_NBD], axis=1))
    return np.concatenate(features)


def accuracy(features_PX: np.ndarray, class_P: np.ndarray, test_P: np.ndarray) -> float:
    """Returns the share of test passages that a softmax regression gets right."""
    train_PX = features_PX[~test_P]
    scaled_PX = (features_PX - train_PX.mean(axis=0)) / (train_PX.std(axis=0) + 1e-6)
    optimizer = optax.adam(RATE)
    weights_XC = jnp.zeros((features_PX.shape[1], len(MODULES)))

    def loss(weights_XC: Array) -> Array:
        logits_PC = scaled_PX[~test_P] @ weights_XC
        nll = optax.losses.softmax_cross_entropy_with_integer_labels
        penalty = PENALTY * jnp.square(weights_XC).sum()
        return nll(logits_PC, class_P[~test_P]).mean() + penalty

    def update(carry: tuple, _: None) -> tuple[tuple, None]:
        weights_XC, state = carry
        step, state = optimizer.update(jax.grad(loss)(weights_XC), state)
        return (optax.apply_updates(weights_XC, step), state), None

    start = weights_XC, optimizer.init(weights_XC)
    (weights_XC, _), _ = jax.lax.scan(update, start, length=UPDATES)
    guess_P = np.argmax(scaled_PX[test_P] @ np.asarray(weights_XC), axis=1)
    return float(np.mean(guess_P == class_P[test_P]))


def check_model(loaded: txl_jax.Loaded, length: int) -> None:
    """Raises UserError for another kind of memory or an unsuitable length."""
    model, kind = loaded.config.model, loaded.vocab.kind
    if length < SEGMENT or length % SEGMENT:
        raise UserError(f"--length={length} must be a positive multiple of {SEGMENT}")
    if model.mem_len < SEGMENT or choose_kind(model).field:
        raise UserError(
            "--model: the recipe reads the hidden states in the paper's memory, of at "
            f"least {SEGMENT} tokens; this model has another memory"
        )
    if kind == "number":
        raise UserError("--model: the passages are texts, and it reads numbers")


def classify(name: str, length: int) -> dict[str, Any]:
    """Returns the accuracies of both classifiers."""
    loaded = txl_jax.load(name)
    check_model(loaded, length)
    tokens_PT, class_P, test_P = read_passages(loaded.vocab, length)
    counts_PX = np.array(
        [np.bincount(x, minlength=len(loaded.vocab)) for x in tokens_PT]
    )
    return {
        "passages": len(class_P),
        "tested": int(test_P.sum()),
        "accuracy": accuracy(describe(loaded, tokens_PT), class_P, test_P),
        "accuracy_of_counts": accuracy(counts_PX, class_P, test_P),
    }


def main() -> int:
    parser = program.make_parser(__doc__)
    parser.add_argument("--model", default="shakespeare", help="a name or a workdir")
    parser.add_argument("--length", type=int, default=1024, help="a multiple of 64")
    args = parser.parse_args()
    return program.run(lambda: classify(args.model, args.length))


if __name__ == "__main__":
    sys.exit(main())
