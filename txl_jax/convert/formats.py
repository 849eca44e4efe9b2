"""The formats of other code bases, by name, and their vocabularies, for import."""

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from txl_jax.convert import huggingface, pickle, pytorch, tensorflow
from txl_jax.convert.options import ConvertConfig
from txl_jax.convert.pickle import Object, Value
from txl_jax.convert.pytorch import arrays
from txl_jax.data import vocab as vocabulary
from txl_jax.data.byte_ranges import require_regular
from txl_jax.data.encode import CONVENTIONS
from txl_jax.data.options import FROM_CORPUS, DataConfig
from txl_jax.data.vocab import ByteVocab, CharVocab, Vocab
from txl_jax.data.word import Lines, WordVocab
from txl_jax.errors import UserError, prefixed, require_one_of
from txl_jax.model import config as models
from txl_jax.model.config import ModelConfig
from txl_jax.model.modules import Params
from txl_jax.report.log import say
from txl_jax.runtime.storage import DAMAGE

Stated = pytorch.Fields  # fields of the model that the user states
RELEASE = "txl_jax"  # the format of `convert.release`
MEMORY_FIELDS = ("mem_len", "clamp_len", "same_length")
STATED_FIELDS = (*MEMORY_FIELDS, "cutoffs", "pre_lnorm")


class ImportedModel(NamedTuple):
    """An imported model; params are numpy arrays."""

    model: ModelConfig
    params: Params
    vocab: Vocab
    step: int
    files: list[Path]


def read_huggingface(source: str, data: DataConfig, _: Stated) -> ImportedModel:
    """Reads a folder of Hugging Face's transfo-xl."""
    folder = Path(source)
    model, params = huggingface.from_pretrained(folder)
    vocab, file = _find_vocab(data, folder)
    read = [folder / huggingface.CONFIG, huggingface.weight_file(folder)]
    return ImportedModel(model, params, vocab, 1, [*read, file])


def read_pytorch(source: str, data: DataConfig, stated: Stated) -> ImportedModel:
    """Reads a model.pt or a state dict of the paper's PyTorch code."""
    path = Path(source)
    path = path / "model.pt" if path.is_dir() else path
    state = arrays(pickle.read_pickle(path), path)
    with prefixed(path):
        model, params = pytorch.from_state_dict(state, **stated)
    vocab, file = _find_vocab(data, path.parent)
    return ImportedModel(model, params, vocab, 1, [path, file])


def read_tensorflow(source: str, data: DataConfig, stated: Stated) -> ImportedModel:
    """Reads a checkpoint of the paper's TensorFlow code: a folder or a prefix."""
    lengths = {name: stated[name] for name in MEMORY_FIELDS if name in stated}
    model, params, step = tensorflow.read_checkpoint(source, **lengths)
    prefix = tensorflow.find_prefix(source)
    # Released models have their vocabulary in data/, next to model/.
    vocab, file = _find_vocab(data, prefix.parent, prefix.parent.parent / "data")
    read = sorted(prefix.parent.glob(f"{prefix.name}.*"))
    return ImportedModel(model, params, vocab, step, [*read, file])


def read_nvidia(source: str, data: DataConfig, _: Stated) -> ImportedModel:
    """Reads a checkpoint of NVIDIA's code, which contains its vocabulary."""
    path = Path(source)
    path = path / "checkpoint_best.pt" if path.is_dir() else path
    saved = pickle.read_pickle(path)
    try:
        state = {
            # The names of the paper's code.
            re.sub(r"_(bias|weight)e?s(\.\d+)$", r"\2.\1", name): array
            for name, array in arrays(saved["model_state"], path).items()
            # Duplicates of the embedding's projections.
            if not name.removeprefix("module.").startswith("crit.shared_out_projs.")
        }
        with prefixed(path):
            fields = saved["model_config"]
            model, params = pytorch.from_fields(state, fields, models.nvidia)
        step = int(saved.get("train_step", 1))
    except DAMAGE as error:
        raise UserError(
            f"{path} is not a checkpoint of NVIDIA's code: {error!r}"
        ) from error
    if not data.vocab_path:
        vocab = vocab_from_pickle(saved.get("vocab"), path, data)
        return ImportedModel(model, params, vocab, step, [path])
    vocab, file = _find_vocab(data)
    return ImportedModel(model, params, vocab, step, [path, file])


FORMATS: dict[str, Callable[[str, DataConfig, Stated], ImportedModel]] = {
    "huggingface": read_huggingface,
    "pytorch": read_pytorch,
    "nvidia": read_nvidia,
    "tensorflow": read_tensorflow,
}


def check(config: ConvertConfig) -> None:
    """Raises UserError unless --format is known and --source exists."""
    require_one_of(config.format, [RELEASE, *FORMATS], "--format")
    index = f"{config.source}.index"  # if the source is a prefix of TensorFlow's files
    if not os.path.exists(config.source) and not os.path.exists(index):
        raise UserError(
            f"--source={config.source!r} does not exist: give --source=PATH, the file "
            "or folder to import"
        )
    require_regular(Path(config.source), "--source")


def read_model(
    config: ConvertConfig, data: DataConfig, stated: Stated
) -> ImportedModel:
    """Returns the model that --format and --source select; raises UserError.

    data describes the vocabulary; without a vocab_path, it is beside the weights.
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


# Files of the vocabulary beside a model of the paper's code or Hugging Face's, in order
# of preference.
VOCAB_FILES = (
    *("vocab.json", "tokenizer.json", "vocab.pkl", "vocab.bin", "vocab.txt"),
    *("cache.pt", "cache.pkl"),
)


def _find_vocab(data: DataConfig, *folders: Path) -> tuple[Vocab, Path]:
    """Returns the vocabulary of a model, and its file."""
    paths = [folder / name for folder in folders for name in VOCAB_FILES]
    stated = Path(data.vocab_path) if data.vocab_path else None
    if path := stated or next(filter(Path.is_file, paths), None):
        return read_vocab(path, data), path
    raise UserError(
        f"{folders[0]} has no vocabulary ({', '.join(VOCAB_FILES)}): give one with "
        "--config.data.vocab_path"
    )


# The marks of lines in the published vocabularies.
MARKS = (Lines(), Lines(eos="<S>", bos="<S>"), Lines(eos="</S>"))
BYTES = {str(byte) for byte in range(256)}
ANY = DataConfig()  # accepts any kind of vocabulary
PICKLES = (".pkl", ".bin", ".pt")
DEPTH = 4  # enough for a vocabulary in a corpus in a checkpoint


def from_words(
    words: list[str], lower_case: bool = False, data: DataConfig = ANY
) -> Vocab:
    """Returns the vocabulary of words in the order of their ids.

    Unless data.vocab states its kind, the words may be characters, as in the paper's
    code: decimal byte values for enwik8, and characters with _ for space for text8.
    """
    kind, is_bytes = data.vocab, bool(words) and BYTES.issuperset(words)
    is_letters = bool(words) and all(len(word) == 1 for word in words)
    is_text8 = is_letters and "_" in words and " " not in words
    if kind == FROM_CORPUS:
        kind = "char" if is_bytes or is_text8 else "word"
    if kind == "char" and is_letters and (is_text8 or data.vocab == kind):
        return CharVocab("".join(words).replace("_", " " if is_text8 else "_"))
    if kind == "char" and is_bytes:
        return CharVocab("".join(chr(int(word)) for word in words), of_bytes=True)
    if kind == "byte" and words == list(map(str, range(256))):
        return ByteVocab()
    if kind != "word" or not words:
        raise UserError(
            f"the vocabulary has {len(words)} words, which are not "
            f"data.vocab={kind!r}: leave data.vocab out, or set data.vocab='word'"
        )
    guessed = (marks for marks in MARKS if marks.eos in words)
    marks = next(guessed, Lines(""))  # without marks, ends of lines are white space
    if data.convention in CONVENTIONS:
        marks = CONVENTIONS[data.convention].lines
    return WordVocab(words, marks._replace(lower_case=lower_case))


def read_vocab(path: Path, data: DataConfig = ANY) -> Vocab:
    """Reads a vocabulary of any code base, as the options of the data describe it.

    The file is a pickled vocabulary or corpus, such as cache.pt, vocab.pkl and
    vocab.bin; a text file with one word per line; or any file that data.vocab_path
    supports.
    """
    if path.suffix in PICKLES:
        return vocab_from_pickle(pickle.read_pickle(path), path, data)
    return vocabulary.read_file(path, lambda words: from_words(words, data=data))


def vocab_from_pickle(value: Value, path: Path, data: DataConfig = ANY) -> Vocab:
    """Returns the vocabulary in a value of `read_pickle`, the content of `path`."""
    for _ in range(DEPTH):
        fields = value.state if isinstance(value, Object) else value
        if not isinstance(fields, dict):
            break
        # A tokenizer that was loaded and saved again lacks the list.
        words = _in_order(fields.get("sym2idx")) or fields.get("idx2sym")
        if isinstance(words, list) and all(isinstance(word, str) for word in words):
            with prefixed(path):
                return from_words(words, fields.get("lower_case") is True, data)
        value = fields.get("vocab")
    raise UserError(f"{path} contains no vocabulary: idx2sym is missing")


def _in_order(ids: Value) -> list[str] | None:
    """Returns the words of {word: id}; None unless the ids count from 0."""
    numbers = ids.values() if isinstance(ids, dict) else [None]
    if {x for x in numbers if type(x) is int} != {*range(len(numbers))}:
        return None
    return sorted(ids, key=ids.__getitem__)
