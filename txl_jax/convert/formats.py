"""The formats of other code bases, by name, for import."""

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from txl_jax.convert import bundle, huggingface, pickle, pytorch, tensorflow, words
from txl_jax.convert.keys import arrays
from txl_jax.convert.options import ConvertConfig
from txl_jax.data.options import DataConfig
from txl_jax.data.vocab import Vocab
from txl_jax.errors import UserError, prefixed, require_one_of
from txl_jax.model import families
from txl_jax.model.config import ModelConfig
from txl_jax.report.checksum import DAMAGE
from txl_jax.report.log import say

Stated = pytorch.Fields  # of the model; the user states them if the files lack them
OWN = "txl_jax"  # a file of `convert.release`
LENGTHS = ("mem_len", "clamp_len", "same_length")
MODEL_FIELDS = (*LENGTHS, "cutoffs", "pre_lnorm")


class Source(NamedTuple):
    """An imported model; params are numpy arrays."""

    model: ModelConfig
    params: pytorch.Params
    vocab: Vocab
    step: int
    files: list[Path]


def read_huggingface(source: str, data: DataConfig, _: Stated) -> Source:
    """Reads a folder of Hugging Face's transfo-xl."""
    folder = Path(source)
    model, params = huggingface.from_pretrained(folder)
    vocab, file = _read_vocab(data, folder)
    own = [folder / huggingface.CONFIG, huggingface.weight_file(folder)]
    return Source(model, params, vocab, 1, [*own, file])


def read_pytorch(source: str, data: DataConfig, stated: Stated) -> Source:
    """Reads a model.pt or a state dict of the paper's PyTorch code."""
    path = Path(source)
    path = path / "model.pt" if path.is_dir() else path
    state = arrays(pickle.read(path), path)
    with prefixed(path):
        model, params = pytorch.from_state_dict(state, **stated)
    vocab, file = _read_vocab(data, path.parent)
    return Source(model, params, vocab, 1, [path, file])


def read_tensorflow(source: str, data: DataConfig, stated: Stated) -> Source:
    """Reads a checkpoint of the paper's TensorFlow code: a folder or a prefix."""
    lengths = {name: stated[name] for name in LENGTHS if name in stated}
    model, params, step = tensorflow.read(source, **lengths)
    prefix = bundle.find(source)
    # The released models have their vocabulary in data/, next to model/.
    vocab, file = _read_vocab(data, prefix.parent, prefix.parent.parent / "data")
    own = sorted(prefix.parent.glob(f"{prefix.name}.*"))
    return Source(model, params, vocab, step, [*own, file])


def read_nvidia(source: str, data: DataConfig, _: Stated) -> Source:
    """Reads a checkpoint of NVIDIA's code, which contains its vocabulary."""
    path = Path(source)
    path = path / "checkpoint_best.pt" if path.is_dir() else path
    saved = pickle.read(path)
    for name in ("model_state", "model_config"):
        if not isinstance(saved, dict) or not isinstance(saved.get(name), dict):
            raise UserError(f"{path} is not a checkpoint of NVIDIA's code: no {name}")
    state = {
        # The names of the paper's code.
        re.sub(r"_(bias|weight)e?s(\.\d+)$", r"\2.\1", name): array
        for name, array in arrays(saved["model_state"], path).items()
        # Duplicates of the embedding's projections.
        if not name.removeprefix("module.").startswith("crit.shared_out_projs.")
    }
    try:
        with prefixed(path):
            fields = saved["model_config"]
            model, params = pytorch.from_fields(state, fields, families.nvidia)
    except DAMAGE as error:
        raise UserError(f"{path}: its model_config is incomplete: {error}") from error
    if data.vocab_path:
        vocab, file = _read_vocab(data)
    else:
        vocab, file = words.from_pickle(saved.get("vocab"), path, data), path
    step = saved.get("train_step")
    step = step if type(step) is int else 1
    return Source(model, params, vocab, step, [*dict.fromkeys((path, file))])


FORMATS: dict[str, Callable[[str, DataConfig, Stated], Source]] = {
    "huggingface": read_huggingface,
    "pytorch": read_pytorch,
    "nvidia": read_nvidia,
    "tensorflow": read_tensorflow,
}


def check(config: ConvertConfig) -> None:
    """Raises UserError unless --format is known and --source exists."""
    require_one_of(config.format, [OWN, *FORMATS], "--format")
    if not config.source:
        raise UserError("give --source, the file or folder to import")
    index = f"{config.source}.index"  # if the source is a prefix of TensorFlow's files
    if not os.path.exists(config.source) and not os.path.exists(index):
        raise UserError(f"--source={config.source!r} does not exist")


def read(config: ConvertConfig, data: DataConfig, stated: Stated) -> Source:
    """Returns the model that --format and --source select; raises UserError.

    data describes its vocabulary; without a vocab_path, it is beside the weights.
    """
    if config.format in ("pytorch", "tensorflow") and "mem_len" not in stated:
        raise UserError(
            f"files of format {config.format} lack mem_len: give "
            "--config.model.mem_len, as in training, and --config.model.clamp_len and "
            "--config.model.same_length if they were used"
        )
    source = FORMATS[config.format](config.source, data, stated)
    types, rows = len(source.vocab), source.model.vocab_size
    if types > rows:
        raise UserError(
            f"{source.files[-1]} has {types} words, the model only {rows}: give the "
            "model's own vocabulary with --config.data.vocab_path"
        )
    if types < rows:
        say(
            f"{source.files[-1]} has {types} words, the model {rows}: the last "
            f"{rows - types} are never read or sampled"
        )
    return source._replace(step=max(source.step, 1))


# Vocabularies that the paper's code and Hugging Face's write beside a model, in order
# of preference.
VOCAB_FILES = (
    *("vocab.json", "tokenizer.json", "vocab.pkl", "vocab.bin", "vocab.txt"),
    *("cache.pt", "cache.pkl"),
)


def _read_vocab(data: DataConfig, *folders: Path) -> tuple[Vocab, Path]:
    """Returns the vocabulary of a model, and its file."""
    paths = [folder / name for folder in folders for name in VOCAB_FILES]
    stated = Path(data.vocab_path) if data.vocab_path else None
    if path := stated or next(filter(Path.is_file, paths), None):
        return words.read(path, data), path
    raise UserError(
        f"{folders[0]} has no vocabulary ({', '.join(VOCAB_FILES)}): give one with "
        "--config.data.vocab_path"
    )
