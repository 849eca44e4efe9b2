"""The formats that models come in and go out in, by name."""

import dataclasses
import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from txl_jax.convert import (
    bundle,
    huggingface,
    nvidia,
    pickle,
    pytorch,
    tensorflow,
    words,
)
from txl_jax.data.vocab import Vocab
from txl_jax.errors import UserError, require, require_one_of
from txl_jax.model.config import ModelConfig


@dataclasses.dataclass(frozen=True)
class ConvertConfig:
    """What to import or export, and what its files do not say."""

    format: str = ""  # huggingface, nvidia, pytorch or tensorflow (the paper's code)
    source: str = ""  # import: a file or a folder
    target: str = ""  # export: a folder, to be made
    vocab: str = ""  # import: the vocabulary's file; "" = the one beside the weights
    # For pytorch and tensorflow, whose files do not say how the model was trained.
    mem_len: int = -1  # tokens remembered while training; -1 = not given
    cutoffs: tuple[int, ...] = ()  # pytorch: of clusters that share one table
    clamp_len: int = 0  # as model.clamp_len
    same_length: bool = False  # as model.same_length
    pre_lnorm: bool = False  # pytorch: as model.pre_lnorm

    def __post_init__(self) -> None:
        """Refuses impossible values, naming the field."""
        require(self, "convert", -1, "mem_len")
        require(self, "convert", 0, "clamp_len")


UNSAID = ("mem_len", "cutoffs", "clamp_len", "same_length", "pre_lnorm")


class Source(NamedTuple):
    """A model from elsewhere; params is numpy arrays, step is at least 1."""

    model: ModelConfig
    params: Any
    vocab: Vocab
    step: int
    files: list[Path]


def read_huggingface(config: ConvertConfig) -> Source:
    """Reads a folder of the port's."""
    _refuse_said(config, *UNSAID)
    folder = Path(config.source)
    model, params = huggingface.from_pretrained(folder)
    vocab = _find_vocab(config, folder)
    files = [folder / huggingface.CONFIG, *huggingface.weight_files(folder), vocab]
    return Source(model, params, words.read(vocab), 1, files)


def read_pytorch(config: ConvertConfig) -> Source:
    """Reads a model.pt or a state dict of the paper's PyTorch code."""
    _require_mem_len(config)
    path = Path(config.source)
    path = path / "model.pt" if path.is_dir() else path
    said = {name: getattr(config, name) for name in UNSAID}
    state = pickle.arrays(pickle.read(path), path)
    try:
        model, params = pytorch.from_state_dict(state, **said)
    except UserError as error:
        raise UserError(f"{path}: {error}") from error
    vocab = _find_vocab(config, path.parent)
    return Source(model, params, words.read(vocab), 1, [path, vocab])


def read_tensorflow(config: ConvertConfig) -> Source:
    """Reads a checkpoint of the paper's TensorFlow code: its folder or its prefix."""
    _require_mem_len(config)
    _refuse_said(config, "cutoffs", "pre_lnorm")
    model, params, step = tensorflow.read(
        config.source,
        mem_len=config.mem_len,
        clamp_len=config.clamp_len,
        same_length=config.same_length,
    )
    prefix = bundle.read(config.source).prefix
    # As released, the vocabulary lies in data/ beside model/.
    vocab = _find_vocab(config, prefix.parent, prefix.parent.parent / "data")
    files = sorted(prefix.parent.glob(f"{prefix.name}.*"))
    return Source(model, params, words.read(vocab), max(step, 1), [*files, vocab])


def read_nvidia(config: ConvertConfig) -> Source:
    """Reads a checkpoint, which has its vocabulary in it."""
    _refuse_said(config, *UNSAID)
    path = Path(config.source)
    saved = nvidia.read(path)
    path = path / nvidia.BEST if path.is_dir() else path
    if config.vocab:
        vocab, files = words.read(Path(config.vocab)), [path, Path(config.vocab)]
    else:
        vocab, files = words.from_pickle(saved.vocab, path), [path]
    return Source(saved.model, saved.params, vocab, max(saved.step, 1), files)


FORMATS: dict[str, Callable[[ConvertConfig], Source]] = {
    "huggingface": read_huggingface,
    "pytorch": read_pytorch,
    "nvidia": read_nvidia,
    "tensorflow": read_tensorflow,
}
TARGETS = {"huggingface": huggingface.save_pretrained}


def read(config: ConvertConfig) -> Source:
    """Returns the model that --format and --source name; raises UserError."""
    require_one_of(config.format, list(FORMATS), "--format")
    if not config.source:
        raise UserError("give --source, the file or folder to import")
    beside = f"{config.source}.index"  # of a prefix of TensorFlow's files
    if not os.path.exists(config.source) and not os.path.exists(beside):
        raise UserError(f"--source={config.source!r} does not exist")
    source = FORMATS[config.format](config)
    if len(source.vocab) > source.model.vocab_size:
        raise UserError(
            f"{source.files[-1]} has {len(source.vocab)} words, the model only "
            f"{source.model.vocab_size}: give its own vocabulary by --vocab"
        )
    return source


def sha256(path: Path) -> str:
    """Returns the digest of a file of any size."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _require_mem_len(config: ConvertConfig) -> None:
    if config.mem_len < 0:
        raise UserError(
            f"files of format {config.format} do not say mem_len: give --mem_len, as "
            "in training, and --clamp_len and --same_length where it had them"
        )


def _refuse_said(config: ConvertConfig, *names: str) -> None:
    """Refuses flags for what the files of this format show themselves."""
    for field in dataclasses.fields(config):
        if field.name in names and getattr(config, field.name) != field.default:
            raise UserError(
                f"--{field.name} has no place with --format={config.format}, whose "
                f"files show it; --config.model.{field.name} changes it"
            )


# In the order of preference: what the paper's code and the port leave beside a model.
BESIDE = (
    *("vocab.json", "tokenizer.json", "vocab.pkl", "vocab.bin", "vocab.txt"),
    *("cache.pt", "cache.pkl"),
)


def _find_vocab(config: ConvertConfig, *folders: Path) -> Path:
    if config.vocab:
        return Path(config.vocab)
    for path in (folder / name for folder in folders for name in BESIDE):
        if path.is_file():
            return path
    raise UserError(
        f"{folders[0]} has no vocabulary ({', '.join(BESIDE)}), and a model is no use "
        "without one: give its file by --vocab"
    )
