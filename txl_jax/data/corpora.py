"""Sources: the text of each corpus on this machine, or where it can be fetched."""

import hashlib
import json
import platform
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from txl_jax.data import files
from txl_jax.data.byte_ranges import Splits, blocks, locate, verify
from txl_jax.data.catalog import CORPORA, Corpus
from txl_jax.data.number import open_numbers
from txl_jax.data.options import DataConfig
from txl_jax.errors import UserError, nearest

BLOCK_BYTES = 1 << 20
LOCAL = ("text", "tokens")  # the user's files
FIELDS = {"path": LOCAL, "document_end": LOCAL, "dtype": ("tokens",)}  # of some corpora
INFO = "dataset_info.json"  # of a dataset of TFDS


class Text(NamedTuple):
    """The bytes of each split, and where known the file and byte of an offset in it."""

    read: Callable[[str], Iterator[bytes]]
    locate: Callable[[str, int], tuple[str, int]] | None = None


@dataclass(frozen=True)
class Source:
    """A corpus on this machine, or one that can be fetched."""

    corpus: Corpus
    edition: str  # distinguishes states of the corpus; "" if there is only one
    # Fetches and unpacks what is needed; the folder must exist while the text is read.
    open: Callable[[Path], Text]

    @property
    def name(self) -> str:
        """The name of the corpus's folder."""
        return "-".join(filter(None, (self.corpus.name, self.edition)))


def find(config: DataConfig, data_dir: Path) -> Source:
    """Returns the source of a corpus; reads it only for the hash of the user's files.

    `data_dir` contains downloads and TFDS datasets.
    """
    kind, _, argument = config.corpus.partition(":")
    _check_fields(config, kind)
    corpus, path, end = CORPORA[kind], config.path, config.document_end
    edition, folder = "", data_dir

    def open_stdlib(_: Path) -> Text:
        return _of_ranges(files.split_stdlib())

    def open_text(scratch: Path) -> Text:
        return _of_ranges(files.split_text(path, scratch, end))

    def open_tokens(_: Path) -> Text:
        return Text(open_numbers(path, end, config.dtype))

    def open_tfds(scratch: Path) -> Text:
        from txl_jax.data import builder  # imports TFDS, which takes a second

        if kind == "tfds":
            return Text(builder.open_dataset(folder))
        return Text(builder.open_corpus(corpus, data_dir, scratch))

    if kind in LOCAL:
        state = end if kind == "text" else f"{end} {config.dtype}"
        edition = files.text_edition(path, state)
    elif kind == "stdlib":
        edition = platform.python_version()
    elif kind == "tfds":
        edition, folder = _find_dataset(argument, data_dir)
    own = {"stdlib": open_stdlib, "text": open_text, "tokens": open_tokens}
    return Source(corpus, edition, own.get(kind, open_tfds))


def _check_fields(config: DataConfig, kind: str) -> None:
    """Raises UserError for an unknown corpus, and for fields of other corpora."""
    if kind not in CORPORA or (":" in config.corpus) != (kind == "tfds"):
        known = [f"{x}:NAME" if x == "tfds" else x for x in CORPORA]
        raise UserError(
            f"data.corpus={config.corpus!r} is unknown{nearest(config.corpus, known)}; "
            f"known are: {', '.join(known)}"
        )
    for field, kinds in FIELDS.items():
        if (value := getattr(config, field)) and kind not in kinds:
            raise UserError(
                f"data.{field}={value!r} is for data.corpus={kinds[0]!r}, not "
                f"{config.corpus!r}: leave it empty, or set data.corpus={kinds[0]!r}"
            )


def _of_ranges(splits: Splits) -> Text:
    return Text(
        lambda split: blocks(splits[split], BLOCK_BYTES),
        lambda split, offset: locate(splits[split], offset),
    )


def _find_dataset(name: str, data_dir: Path) -> tuple[str, Path]:
    """Returns the edition of a TFDS dataset below `data_dir`, and its folder.

    `name` is `name` or `name/config`, with `:version` or without. Only ArrayRecord can
    be read without TensorFlow and without copying a shard into memory.
    """
    path, _, version = name.partition(":")
    root = data_dir / path
    # TFDS prepares in a folder "incomplete.<random>_<version>" beside the finished one.
    pattern = f"**/{version or '[0-9]*'}/{INFO}"
    is_inside = path and ".." not in root.parts and root.is_relative_to(data_dir)
    folders = sorted(x.parent for x in root.glob(pattern)) if is_inside else []
    if len(folders) != 1:
        names = ", ".join(str(folder.relative_to(data_dir)) for folder in folders)
        raise UserError(
            f"data.corpus='tfds:{name}' names {names or 'no dataset'} in {data_dir}: "
            "give one as tfds:<name>/<config>:<version>, prepared by TFDS with "
            "file_format='array_record', or set data.data_dir to where it is"
        )
    (folder,) = folders
    data = (folder / INFO).read_bytes()
    try:
        kind = json.loads(data).get("fileFormat", "tfrecord")
    except (ValueError, AttributeError, RecursionError) as error:
        raise UserError(
            f"{folder} is damaged ({error}): delete it and prepare again"
        ) from error
    if kind != "array_record":
        raise UserError(
            f"data.corpus='tfds:{name}' is stored as {kind} in {folder}, which cannot "
            "be read without TensorFlow: prepare it with file_format='array_record'"
        )
    digest = hashlib.sha256(data).hexdigest()
    plain = "-".join(folder.relative_to(data_dir).parts)
    return f"{plain}-{digest[:8]}", folder


def vocab_file(corpus: Corpus, data_dir: Path) -> Path | None:
    """Returns the corpus's published vocabulary if it is in the manual folder."""
    path = data_dir / "downloads" / "manual" / corpus.types.path
    if not corpus.types.path or not path.exists():
        return None
    verify(path, corpus.types.digest)
    return path
