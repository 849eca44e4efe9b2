"""Fine-tunes a trained model to classify texts: which package is a function from?

    pip install 'txl_jax[recipes]'
    python -m txl_jax.experiments.recipes.classification [--layers=2] \\
        --model=runs/quickstart

The texts are the functions of six packages in the running Python's standard library,
or the files of your own classes: --path=FOLDER, with one folder of texts for each. All
functions of a file are in one part, so that the test has files that training has not
seen; later copies of a text are left out.

Three classifiers see the same parts: logistic regression on TF-IDF of words, the same
on the means and deviations of the frozen model's hidden states, and the model
fine-tuned together with that regression. The penalties of the first two, and the rate
and the epoch of the third are chosen on the validation part. Functions are cut, texts
of --path are not; those longer than a segment are read through the memory.

Dims: B texts of a batch, T tokens of a text, S segments of L tokens, D model, C
classes, P texts of a part, X features, N layers.
"""

import argparse
import ast
import collections
import dataclasses
import functools
import importlib.util
import sys
import sysconfig
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array

import txl_jax
from txl_jax.data import files
from txl_jax.data.streams import OFF
from txl_jax.errors import BadNumbers, UserError, refuse
from txl_jax.evaluate.options import EvalConfig
from txl_jax.model.memory import Memory
from txl_jax.model.positions import SCHEMES
from txl_jax.report import provenance
from txl_jax.report.log import say
from txl_jax.report.progress import Progress
from txl_jax.runtime.storage import local_path

from ..figures import program

PACKAGES = "asyncio", "email", "importlib", "multiprocessing", "unittest", "xml"
SHORTEST, LONGEST = 200, 400  # characters of a function; longer ones are cut
# Share of a class's texts, and their largest number.
PARTS = {"train": (0.5, 120), "validation": (0.2, 30), "test": (0.3, 60)}
SEGMENT, BATCH = 128, 16
RATES, EPOCHS, PATIENCE = (3e-4, 1e-3), 8, 5
PENALTIES = 0.01, 0.1, 1.0, 10.0, 100.0  # scikit-learn's C, the inverse of a penalty


class Texts(NamedTuple):
    """Texts and the numbers of their classes."""

    texts: list[str]
    class_P: np.ndarray


def find_functions(code: str) -> Iterator[str]:
    """Yields a module's functions and methods of SHORTEST characters or more, cut."""
    lines = code.split("\n")
    bodies: list[list[ast.stmt]] = [ast.parse(code).body]
    while bodies:
        for node in bodies.pop():
            if isinstance(node, ast.ClassDef):
                bodies.append(node.body)
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                source = "\n".join(lines[node.lineno - 1 : node.end_lineno]).strip()
                if len(source) >= SHORTEST:
                    yield source[:LONGEST]


def read_classes(path: str) -> dict[str, list[list[str]]]:
    """Returns the texts of every file of every class."""
    if not path:
        library, classes = Path(sysconfig.get_paths()["stdlib"]), {}
        for name in PACKAGES:
            modules = sorted((library / name).rglob("*.py"))
            classes[name] = [[*find_functions(x.read_text("utf-8"))] for x in modules]
        return classes
    folders = sorted(local_path(path, "--path").iterdir())
    return {
        folder.name: [[read_text(x)] for x in files.text_files(str(folder), "--path")]
        for folder in folders
        if folder.is_dir() and not folder.name.startswith(".")
    }


def read_text(file: Path) -> str:
    """Returns a file's text; raises UserError if it is not text in UTF-8."""
    content = b"".join(files.read_blocks(file))
    try:
        return content.decode().strip()
    except UnicodeDecodeError as error:
        raise UserError(f"{file} is not UTF-8: convert it, or move it away") from error


def split(classes: dict[str, list[list[str]]], seed: int) -> dict[str, Texts]:
    """Returns the parts; raises UserError if a class has no text in one of them."""
    random, seen = np.random.default_rng(seed), set[str]()
    refuse(len(classes) < 2, "--path: give a folder with a folder for each class")
    parts: dict[str, list[tuple[str, int]]] = {name: [] for name in PARTS}
    for number, (name, sources) in enumerate(classes.items()):
        shuffled = [sources[n] for n in random.permutation(len(sources))]
        sizes = np.array([len(texts) for texts in shuffled])
        middles = (np.cumsum(sizes) - sizes / 2) / max(sizes.sum(), 1)
        high = 0.0
        for part, (share, limit) in PARTS.items():
            low, high = high, high + share
            inside = np.flatnonzero((low <= middles) & (middles < high))
            texts = [text for n in inside for text in shuffled[n] if text]
            distinct = dict.fromkeys(texts)
            texts = [text for text in distinct if text not in seen]
            seen.update(texts)
            random.shuffle(texts)
            seen_before = "has only texts of earlier classes or parts"
            reason = seen_before if distinct else "is empty"
            line = f"class {name} is too small: its {part} part {reason}"
            refuse(not texts, f"{line}; give it more texts of its own")
            parts[part] += [(text, number) for text in texts[:limit]]
    return {
        name: Texts(
            [text for text, _ in part], np.array([number for _, number in part])
        )
        for name, part in parts.items()
    }


def regress(features: dict[str, Any], parts: dict[str, Texts]) -> tuple[Any, float]:
    """Returns (logistic regression, accuracy on the test)."""
    from sklearn.linear_model import LogisticRegression

    def fit(penalty: float) -> Any:
        regression = LogisticRegression(C=penalty, max_iter=1000)
        return regression.fit(features["train"], parts["train"].class_P)

    def score(regression: Any, part: str) -> float:
        return float(regression.score(features[part], parts[part].class_P))

    best = max(map(fit, PENALTIES), key=lambda each: score(each, "validation"))
    return best, score(best, "test")


def count_words(parts: dict[str, Texts]) -> dict[str, Any]:
    """Returns TF-IDF of words and of pairs of words, known from training."""
    from sklearn.feature_extraction.text import TfidfVectorizer

    pattern = r"[^\W_]+"  # splits identifiers at underscores
    vectorizer = TfidfVectorizer(
        ngram_range=(1, 2), token_pattern=pattern, sublinear_tf=True
    )
    vectorizer.fit(parts["train"].texts)
    return {name: vectorizer.transform(part.texts) for name, part in parts.items()}


def average(loaded: txl_jax.Loaded, part: Texts) -> np.ndarray:
    """Returns means and deviations of each text's hidden states, features_PX."""
    states = txl_jax.hidden_states(loaded, part.texts)
    return np.stack([np.append(h_TD.mean(axis=0), h_TD.std(axis=0)) for h_TD in states])


Params = Any  # {"model": .., "weights_XC": .., "bias_C": ..}


class Batch(NamedTuple):
    """Texts side by side; a batch is filled with empty texts of weight 0."""

    tokens_SBL: np.ndarray
    length_SB: np.ndarray
    class_B: np.ndarray
    weight_B: np.ndarray


def make_batches(
    loaded: txl_jax.Loaded, part: Texts, random: np.random.Generator | None = None
) -> Iterator[Batch]:
    """Yields a part in batches of similar lengths, in random order or by length.

    The number of segments is a power of two, so that few shapes are compiled.
    """
    tokens = [loaded.vocab.encode(text) for text in part.texts]
    near = (lambda T: T) if random is None else lambda T: T * random.uniform(0.8, 1.25)
    order = np.argsort([near(len(text_T)) for text_T in tokens])
    starts = np.arange(0, len(order), BATCH)
    for start in starts if random is None else random.permutation(starts):
        chosen = order[start : start + BATCH]
        segments = -(-max(len(tokens[n]) for n in chosen) // SEGMENT)
        S = 1 << (segments - 1).bit_length()
        tokens_BT = np.zeros((BATCH, S * SEGMENT), np.int32)
        length_B, class_B, weight_B = np.zeros((3, BATCH), np.int32)
        for b, n in enumerate(chosen):
            length_B[b], class_B[b], weight_B[b] = len(tokens[n]), part.class_P[n], 1
            tokens_BT[b, : length_B[b]] = tokens[n]
        length_SB = np.clip(length_B - SEGMENT * np.arange(S)[:, None], 0, SEGMENT)
        tokens_SBL = tokens_BT.reshape(BATCH, S, SEGMENT).swapaxes(0, 1)
        yield Batch(tokens_SBL, length_SB, class_B, weight_B)


def sum_losses(
    model: txl_jax.TransformerXL, params: Params, batch: Batch, key: Array | None
) -> tuple[Array, Array]:
    """Returns sums over a batch: the cross-entropy and the correct answers.

    Without a key there is no dropout.
    """

    def read(carry: tuple, segment: tuple) -> tuple[tuple, None]:
        (memory, sums_2BD), (tokens_BL, length_B, n) = carry, segment
        rngs = None if key is None else {"dropout": jax.random.fold_in(key, n)}
        output: Any = model.apply(
            {"params": params["model"]}, tokens_BL, memory, length_B=length_B, rngs=rngs
        )
        hidden_BLD, memory = output
        is_real_BL = jnp.arange(SEGMENT) < length_B[:, None]
        x_BLD = hidden_BLD.astype(jnp.float32) * is_real_BL[..., None]
        sums_2BD += jnp.stack([x_BLD.sum(axis=1), jnp.square(x_BLD).sum(axis=1)])
        return (memory, sums_2BD), None

    config = model.config
    empty = Memory.empty(config, BATCH), jnp.zeros((2, BATCH, config.d_model))
    numbers = jnp.arange(len(batch.length_SB))
    (_, sums_2BD), _ = jax.lax.scan(
        read, empty, (batch.tokens_SBL, batch.length_SB, numbers)
    )
    length_B = jnp.maximum(batch.length_SB.sum(axis=0), 1)
    mean_BD, square_BD = sums_2BD / length_B[:, None]
    std_BD = jnp.sqrt(jnp.maximum(square_BD - mean_BD**2, 1e-6))
    features_BX = jnp.concatenate([mean_BD, std_BD], axis=1)
    logits_BC = features_BX @ params["weights_XC"] + params["bias_C"]
    nll = optax.losses.softmax_cross_entropy_with_integer_labels
    is_right_B = logits_BC.argmax(axis=1) == batch.class_B
    loss = jnp.sum(nll(logits_BC, batch.class_B) * batch.weight_B)
    return loss, jnp.sum(is_right_B * batch.weight_B)


def choose_trained(params: Params, layers: int, biases: Collection[str] = ()) -> Params:
    """Returns 1 for what is trained: everything, or the top layers and the head.

    biases: names of arrays outside the layers, which may have a part for each layer.
    """

    def choose(path: tuple, x: Array) -> np.ndarray:
        if path[0].key != "model" or not layers:
            return np.ones(())
        if path[1].key != "layers" and not (path[1].key in biases and x.ndim == 3):
            return np.zeros(())
        return (np.arange(len(x)) >= len(x) - layers).reshape(-1, *[1] * (x.ndim - 1))

    return jax.tree_util.tree_map_with_path(choose, params)


def fine_tune(
    loaded: txl_jax.Loaded,
    head: Any,
    parts: dict[str, Texts],
    *,
    layers: int,
    rate: float,
    seed: int,
) -> dict[str, Any]:
    """Returns the accuracies, and the epoch whose parameters they have.

    head: the logistic regression to start from. Training ends when the accuracy on the
    validation part, or with equal accuracy its loss, has not improved for PATIENCE
    epochs.
    """
    table_CX = np.column_stack([head.coef_, head.intercept_]).astype(np.float32)
    if len(table_CX) == 1:  # the logit of the second of two classes
        table_CX = np.vstack([0 * table_CX, table_CX])
    best: Params = {"model": loaded.params}
    best |= {"weights_XC": table_CX[:, :-1].T, "bias_C": table_CX[:, -1]}
    model = loaded.model
    trained = choose_trained(best, layers, SCHEMES[model.config.position].biases)
    steps = EPOCHS * -(-len(parts["train"].texts) // BATCH)
    schedule = optax.warmup_cosine_decay_schedule(0, rate, steps // 10, steps)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(schedule))

    @jax.jit
    def update(params: Params, state: Any, batch: Batch, key: Array) -> tuple:
        def loss(params: Params) -> Array:
            return sum_losses(model, params, batch, key)[0] / BATCH

        grads = jax.tree.map(jnp.multiply, jax.grad(loss)(params), trained)
        step, state = optimizer.update(grads, state)
        return optax.apply_updates(params, step), state

    measure = jax.jit(functools.partial(sum_losses, model, key=None))

    def evaluate(params: Params, part: str) -> tuple[float, float]:
        """Returns (accuracy, -loss in nats), of which more is better."""
        batches = make_batches(loaded, parts[part])
        sums = [measure(params, batch=batch) for batch in batches]
        loss, right = np.sum(jax.device_get(sums), axis=0) / len(parts[part].texts)
        if not np.isfinite(loss):
            raise BadNumbers("the loss is not finite: lower --rates")
        return float(right), -float(loss)

    params, state, random = best, optimizer.init(best), np.random.default_rng(seed)
    highest, best_epoch, updates = evaluate(params, "validation"), 0, 0
    with Progress("fine-tuning", steps, unit="updates") as bar:
        for epoch in range(1, EPOCHS + 1):
            for batch in make_batches(loaded, parts["train"], random):
                key = jax.random.fold_in(jax.random.key(seed), updates)
                params, state = update(params, state, batch, key)
                updates += 1
                bar(updates)
            now = evaluate(params, "validation")
            say(f"epoch {epoch}: validation {-now[1]:.3f} nats, {now[0]:.1%}")
            if now > highest:
                best, highest, best_epoch = params, now, epoch
            elif epoch - best_epoch >= PATIENCE:
                break
    result = {"rate": rate, "best_epoch": best_epoch, "validation": highest}
    return {**result, "fine_tuned": evaluate(best, "test")[0]}


def classify(
    model_name: str, path: str, layers: int, rates: list[float], seeds: int
) -> dict[str, Any]:
    """Returns the accuracies of the classifiers and the texts of each seed's parts."""
    loaded = txl_jax.load(model_name)
    kind, model = loaded.vocab.kind, loaded.config.model
    refuse(kind == "number", "--model: it reads numbers, and the classes have texts")
    refuse(not 0 <= layers <= model.n_layer, f"--layers: the model has {model.n_layer}")
    refuse(not min(rates) > 0, f"--rates: {min(rates)} must be above 0")
    # The frozen model reads as the fine-tuned one does.
    same = {
        name: getattr(model, name) for name in ("mem_len", "clamp_len", "same_length")
    }
    config = dataclasses.replace(
        loaded.config, eval=EvalConfig(tgt_len=SEGMENT, **same)
    )
    loaded = loaded._replace(config=config, ids=loaded.ids._replace(eval_reset=OFF))
    classes = read_classes(path)
    missing = importlib.util.find_spec("sklearn") is None
    refuse(missing, "the recipe needs scikit-learn: pip install scikit-learn")
    rows: dict[str, list[Any]] = collections.defaultdict(list)
    for seed in range(1, seeds + 1):
        parts = split(classes, seed)
        for name, part in parts.items():
            tokens = sum(len(loaded.vocab.encode(text)) for text in part.texts)
            say(f"seed {seed}: {name}, {len(part.texts):,} texts, {tokens:,} tokens")
        rows["tfidf"].append(regress(count_words(parts), parts)[1])
        features = {name: average(loaded, part) for name, part in parts.items()}
        head, accuracy = regress(features, parts)
        rows["frozen"].append(accuracy)
        say(f"seed {seed}: TF-IDF {rows['tfidf'][-1]:.1%}, frozen {accuracy:.1%}")
        tune = functools.partial(fine_tune, loaded, head, parts, layers=layers)
        trials = [tune(rate=rate, seed=seed) for rate in rates]
        tuned = max(trials, key=lambda trial: trial["validation"])
        for name in "rate", "best_epoch", "fine_tuned":
            rows[name].append(tuned[name])
        say(f"seed {seed}: fine-tuned {tuned['fine_tuned']:.1%}")
        for name, part in parts.items():
            rows[f"{name}_texts"].append(len(part.texts))
        counts_C = np.bincount(parts["test"].class_P)
        rows["largest_class"].append(float(counts_C.max() / counts_C.sum()))
    return {
        "model": model_name,
        "classes": [*classes],
        "layers": layers or "all",
        "rates": rates,
        **rows,
        "provenance": provenance.describe_result(),
    }


def main(argv: list[str] | None = None) -> int:
    parser = program.make_parser(__doc__)
    add = functools.partial(parser.add_argument, metavar="X")
    add("--model", default="shakespeare", help="a name or a workdir (%(default)s)")
    text = "a folder with a folder of texts for each class (the standard library)"
    add("--path", default="", help=text)
    text = "the number of top layers to train; 0 = all (%(default)s)"
    add("--layers", type=int, default=0, help=text)
    text = "rates to choose from (%(default)s)"
    add("--rates", type=float, nargs="+", default=[*RATES], help=text)
    add("--seeds", type=program.count, default=3, help="splits (%(default)s)")

    def measure(args: argparse.Namespace) -> dict[str, Any]:
        return classify(args.model, args.path, args.layers, args.rates, args.seeds)

    return program.run(parser, measure, argv)


if __name__ == "__main__":
    sys.exit(main())
