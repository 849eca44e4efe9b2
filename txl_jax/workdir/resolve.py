"""Fits a run's config to its vocabulary, its devices and its positions."""

import contextlib
import dataclasses
import math
from typing import NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from txl_jax.config import Config, with_values
from txl_jax.convert.formats import MEMORY_FIELDS
from txl_jax.data import vocab as vocabulary
from txl_jax.data.catalog import CORPORA
from txl_jax.data.streams import OFF
from txl_jax.data.vocab import Vocab
from txl_jax.errors import UserError, prefixed
from txl_jax.evaluate.options import EvalConfig
from txl_jax.generate.options import GenerateConfig
from txl_jax.model.config import ModelConfig
from txl_jax.report.log import say
from txl_jax.sharding.mesh import make_mesh
from txl_jax.sharding.rules import RULES


class TokenIds(NamedTuple):
    """The ids of the tokens that a config names by their text; OFF = none.

    The config itself keeps the texts, which do not depend on a vocabulary. Code that
    reads tokens takes the ids.
    """

    train_reset: int = OFF  # train.reset_memory_at
    eval_reset: int = OFF  # eval.reset_memory_at
    sentence_end: int = OFF  # the end of a line, with train.order = "sentences"


LONGEST_PROMPT = 64  # tokens of the corpus
NO_TOKENS = TokenIds()  # for a config that names none


def find_ids(config: Config, vocab: Vocab) -> TokenIds:
    """Returns the ids; raises UserError for a text that is not exactly one token."""

    def id_of(field: str, text: str) -> int:
        with prefixed(field):
            return vocabulary.find_token(vocab, text) if text else OFF

    train, eval = config.train, config.eval
    return TokenIds(
        train_reset=id_of("train.reset_memory_at", train.reset_memory_at),
        eval_reset=id_of("eval.reset_memory_at", eval.reset_memory_at),
        sentence_end=id_of("train.order", "\n" * (train.order == "sentences")),
    )


def fit_vocab(config: Config, vocab: Vocab) -> Config:
    """Returns the config with the vocabulary's size; raises UserError."""
    size = config.model.vocab_size or len(vocab)
    if size < len(vocab):
        raise UserError(
            f"model.vocab_size = {size} is less than the vocabulary's {len(vocab)}; "
            "set it to 0 to take the vocabulary's"
        )
    model = dataclasses.replace(config.model, vocab_size=size)
    return dataclasses.replace(config, model=model)


def fit_prompt(config: Config, vocab: Vocab, train_tokens: np.ndarray) -> Config:
    """Replaces a prompt that the vocabulary lacks by the first line of the corpus."""
    prompt = config.generate.prompt
    with contextlib.suppress(UserError):
        if prompt.startswith("@") or vocab.encode(prompt) is not None:
            return config
    text = vocab.decode(train_tokens[:LONGEST_PROMPT], False)
    lines = (x for x in text.splitlines() if x.strip() and x[0] != "@")
    line = next(lines, default_prompt(vocab))
    say(
        f"generate.prompt = {prompt!r} is not in the vocabulary: samples continue the "
        f"first line of the corpus, {line!r}"
    )
    generate = dataclasses.replace(config.generate, prompt=line)
    return dataclasses.replace(config, generate=generate)


def imported_config(model: ModelConfig, vocab: Vocab) -> Config:
    """Returns a config that evaluates another code base's model as it was trained."""
    lengths = {name: getattr(model, name) for name in MEMORY_FIELDS}
    generate = GenerateConfig(mem_len=model.mem_len, prompt=default_prompt(vocab))
    return Config(model=model, eval=EvalConfig(**lengths), generate=generate)


def default_prompt(vocab: Vocab) -> str:
    """Returns a newline, or the first token if the vocabulary has no newline."""
    with contextlib.suppress(UserError):
        if len(vocab.encode("\n")):
            return "\n"
    return vocab.decode([0])


def find_vocab(config: Config) -> Config:
    """Sets model.vocab_size without reading the corpus."""
    data = config.data
    if config.model.vocab_size:
        return config
    corpus = CORPORA.get(data.corpus.partition(":")[0])
    changed = data.vocab_path, data.vocab_size, data.convention
    if data.vocab == "byte":
        size = 256
    elif corpus and data.vocab in ("corpus", corpus.vocab) and not any(changed):
        size = corpus.vocab_size
    else:
        raise UserError(
            f"the vocabulary size of data.corpus = {data.corpus!r} is not known before "
            "the corpus is prepared: give --config.model.vocab_size=N"
        )
    return with_values(config, {"model.vocab_size": size})


def fit_mesh(config: Config, devices: list[jax.Device] | None = None) -> Mesh:
    """Returns the mesh; raises UserError unless it divides devices and model evenly."""
    mesh = make_mesh(config.mesh, devices)
    rules, model = dict(RULES), config.model
    two_thirds = "two thirds of " if model.gated else ""
    sizes = [
        ("D", "model.d_model", model.d_model),
        ("E", "model.d_embed", model.embed_size),
        ("H", "model.n_head", model.n_head),
        ("F", f"{two_thirds}model.d_inner", model.hidden_size),
        ("V", "model.vocab_size", model.vocab_size),
    ]
    if model.div_val > 1 and model.cutoffs:
        sizes[-1] = ("V", "model.cutoffs[0]", model.cutoffs[0])
    for letter, field, size in sizes:
        axis = rules[letter]
        if size % (parts := mesh.shape[axis]):
            raise UserError(
                f"{field} = {size} is not divisible by mesh.{axis} = {parts}: "
                f"make it a multiple of {parts}, or lower mesh.{axis}"
            )
    return mesh


def warn_of_rotations(
    config: Config, section: str = "eval", max_keys: float = math.inf
) -> None:
    """Reports rotary positions beyond training's; max_keys: a limit on the keys."""
    mem_len, tgt_len = config.model.mem_len, config.train.tgt_len
    length = config.eval.ext_len + config.eval.tgt_len
    keys = min(getattr(config, section).mem_len + length, max_keys)
    if config.model.position == "rotary" and keys > mem_len + tgt_len:
        say(
            f"rotary positions were trained with {mem_len + tgt_len} keys and are read "
            f"with {keys}, where they fail: use the lengths of training, "
            f"{section}.mem_len={mem_len} eval.tgt_len={tgt_len}"
        )
