"""Sources: the text of each corpus, on this machine or to be fetched."""

import os
import platform
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from txl_jax.data import files
from txl_jax.data.byte_ranges import Splits, blocks, checksum, locate, verify_file
from txl_jax.data.catalog import CORPORA, Corpus
from txl_jax.data.number import open_numbers
from txl_jax.data.options import DataConfig
from txl_jax.errors import UserError, nearest

# The corpora that a field is for.
FIELDS = {"dtype": ("tokens",)} | dict.fromkeys(
    ("path", "document_end"), ("text", "tokens")
)
INFO = "dataset_info.json"  # in the folder of a TFDS dataset


class SplitReader(NamedTuple):
    """The bytes of each split and, if known, the file and byte of an offset in it."""

    read: Callable[[str], Iterator[bytes]]
    locate: Callable[[str, int], tuple[str, int]] | None = None


@dataclass(frozen=True)
class Source:
    """A corpus that is on this machine or can be fetched."""

    corpus: Corpus
    edition: str  # distinguishes states of the corpus; "" if there is only one
    # Fetches and unpacks files; the folder must exist while the text is read.
    open: Callable[[Path], SplitReader]

    @property
    def name(self) -> str:
        """The name of the corpus's folder."""
        return "-".join(filter(None, (self.corpus.name, self.edition)))


def find_source(config: DataConfig, data_dir: Path) -> Source:
    """Returns the source of a corpus; reads it only for the hash of the user's files.

    `data_dir` contains downloads and TFDS datasets.
    """
    name, _, dataset = config.corpus.partition(":")
    _check_fields(config, name)
    corpus, path, end = CORPORA[name], config.path, config.document_end

    def open_published(scratch: Path) -> SplitReader:
        from txl_jax.data.builder import open_corpus  # importing TFDS takes a second

        return SplitReader(open_corpus(corpus, data_dir, scratch))

    def open_tfds(_: Path) -> SplitReader:
        from txl_jax.data.builder import open_dataset

        return SplitReader(open_dataset(folder))

    if name == "stdlib":
        version = platform.python_version()
        return Source(corpus, version, lambda _: _of_ranges(files.split_stdlib()))
    if name == "text":
        return Source(
            corpus,
            files.text_edition(path, end),
            lambda scratch: _of_ranges(files.split_text(path, scratch, end)),
        )
    if name == "tokens":
        edition = files.text_edition(path, f"{end} {config.dtype}")
        return Source(
            corpus,
            edition,
            lambda _: SplitReader(open_numbers(path, end, config.dtype)),
        )
    if name == "tfds":
        folder = _find_dataset(dataset, data_dir)
        plain = os.path.relpath(folder, data_dir).replace("/", "-")
        return Source(corpus, f"{plain}-{checksum(folder / INFO)[:8]}", open_tfds)
    return Source(corpus, "", open_published)


def _check_fields(config: DataConfig, name: str) -> None:
    """Raises UserError for an unknown corpus, and for fields of other corpora."""
    if name not in CORPORA or (":" in config.corpus) != (name == "tfds"):
        known = [f"{x}:NAME" if x == "tfds" else x for x in CORPORA]
        raise UserError(
            f"data.corpus={config.corpus!r} is unknown{nearest(config.corpus, known)}; "
            f"known are: {', '.join(known)}"
        )
    for field, names in FIELDS.items():
        if (value := getattr(config, field)) and name not in names:
            raise UserError(
                f"data.{field}={value!r} is for data.corpus={names[0]!r}, not "
                f"{config.corpus!r}: leave it empty, or set data.corpus={names[0]!r}"
            )


def _of_ranges(splits: Splits) -> SplitReader:
    return SplitReader(
        lambda split: blocks(splits[split]),
        lambda split, offset: locate(splits[split], offset),
    )


def _find_dataset(name: str, data_dir: Path) -> Path:
    """Returns the folder of a TFDS dataset below `data_dir`.

    `name` is `name` or `name/config`, with `:version` or without.
    """
    path, _, version = name.partition(":")
    # TFDS prepares in a folder "incomplete.<random>_<version>" beside the finished one.
    pattern = f"**/{version or '[0-9]*'}/{INFO}"
    infos = sorted((data_dir / path).glob(pattern)) if path else []
    if len(infos) != 1:
        names = ", ".join(os.path.relpath(file.parent, data_dir) for file in infos)
        raise UserError(
            f"data.corpus='tfds:{name}' names {names or 'no dataset'} in {data_dir}: "
            "give one as tfds:<name>/<config>:<version>, prepared by TFDS with "
            "file_format='array_record', or set data.data_dir to its folder"
        )
    return infos[0].parent


def vocab_file(corpus: Corpus, data_dir: Path) -> Path | None:
    """Returns the corpus's published vocabulary if it is in the manual folder."""
    path = data_dir / "downloads" / "manual" / corpus.types.path
    if not corpus.types.path or not path.exists():
        return None
    verify_file(path, corpus.types.digest)
    return path
