"""The TFDS builder: the bytes of a corpus, in order, as ArrayRecord blocks.

Importing this module imports TFDS (about a second) and never TensorFlow; `tokens`
does it only when something has to be prepared.

Dims: none.
"""

import contextlib
import io
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow_datasets as tfds
from absl import logging

from txl_jax.data import corpora
from txl_jax.data.progress import Progress, Say, log
from txl_jax.errors import UserError

BLOCK_BYTES = 1 << 20  # one example; singly read lines were 700 times slower
SHARD_BYTES = 64 << 20  # one file on disk

Example = tuple[int, dict[str, np.ndarray]]


@dataclass(eq=False)
class CorpusConfig(tfds.core.BuilderConfig):
    """A TFDS config that knows where the bytes of its splits lie."""

    splits: dict[str, corpora.Pieces] = field(default_factory=dict)
    say: Say = log


class CorpusBuilder(tfds.core.ShardBasedBuilder):
    """Every corpus of `corpora`, one config each: `txl_jax/<corpus>-<edition>`.

    Shard-based, because TFDS's other builders need TensorFlow from 1000 MiB on.
    Unshuffled: the examples of a split, joined, are its bytes.
    """

    name = "txl_jax"

    def __init__(self, *, file_format: str = "array_record", **kwargs: Any) -> None:
        # Of TFDS's formats, only this one needs no TensorFlow and loses nothing.
        super().__init__(file_format=file_format, **kwargs)

    def _info(self) -> tfds.core.DatasetInfo:
        block = tfds.features.Tensor(
            shape=(None,), dtype=np.uint8, encoding=tfds.features.Encoding.BYTES
        )
        return tfds.core.DatasetInfo(
            builder=self,
            description=self.builder_config.description,
            features=tfds.features.FeaturesDict({"bytes": block}),
            disable_shuffling=True,
        )

    def _shard_iterators_per_split(
        self, dl_manager: tfds.download.DownloadManager
    ) -> dict[str, list[Callable[[], Iterator[Example]]]]:
        splits, say = self.builder_config.splits, self.builder_config.say
        progress = Progress(say, "storing", sum(map(corpora.size, splits.values())))
        return {
            split: [
                partial(_examples, pieces, start, progress)
                for start in range(0, corpora.size(pieces), SHARD_BYTES)
            ]
            for split, pieces in splits.items()
        }


def _examples(
    pieces: corpora.Pieces, start: int, progress: Progress
) -> Iterator[Example]:
    shard = corpora.cut(pieces, start, start + SHARD_BYTES)
    for number, block in enumerate(corpora.blocks(shard, BLOCK_BYTES)):
        key = start + number * BLOCK_BYTES
        yield key, {"bytes": np.frombuffer(block, np.uint8)}
        progress.add(len(block))


def prepare(source: corpora.Source, data_dir: Path, say: Say = log) -> CorpusBuilder:
    """Stores a corpus below `data_dir` unless it is there already.

    It is fetched and unpacked first where it has to be, and `say` hears of that and of
    what takes long. The folder appears whole or not at all. Two processes must not
    prepare one corpus at once: `tokens.prepare` holds the lock. Raises UserError for a
    corpus that cannot be fetched, an unreadable file, a full disk and stored blocks
    that are damaged.
    """
    corpus = source.corpus
    config = CorpusConfig(
        name=source.config,
        version=tfds.core.Version(corpus.version),
        description=f"{corpus.about}. Licence: {corpus.licence}.",
        say=say,
    )
    folder = data_dir / CorpusBuilder.name / source.config / corpus.version
    with _quiet():
        with _refusing_damage(folder):
            builder = CorpusBuilder(data_dir=data_dir, config=config)
        # What a killed preparation left: TFDS itself never removes it.
        for leftover in folder.parent.glob("incomplete.*"):
            shutil.rmtree(leftover)
        if not folder.exists():
            _store(source, builder, data_dir, folder)
    return builder


def _store(
    source: corpora.Source, builder: CorpusBuilder, data_dir: Path, folder: Path
) -> None:
    """Writes the blocks; what is unpacked for them lies in `scratch` meanwhile."""
    config = builder.builder_config
    scratch = folder.parent / "incomplete.unpacked"
    try:
        config.splits = corpora.unpack(source, data_dir, scratch, config.say).splits
        builder.download_and_prepare()
    except RuntimeError as error:  # what ArrayRecord raises for a full disk
        raise UserError(
            f"cannot write {folder} ({_first_line(error)}): make room or set "
            "data.data_dir to another folder"
        ) from error
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def read(builder: CorpusBuilder, split: str) -> Iterator[bytes]:
    """Yields the blocks of a split in order; raises UserError if they are damaged."""
    with _refusing_damage(builder.data_path), _quiet():
        source = builder.as_data_source(split)
    for index in range(len(source)):
        with _refusing_damage(builder.data_path):
            block = source[index]["bytes"].tobytes()
        yield block


@contextlib.contextmanager
def _refusing_damage(folder: Path) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # TFDS, protobuf and ArrayRecord raise many kinds
        raise UserError(
            f"{folder} is damaged ({_first_line(error)}): delete it and prepare again"
        ) from error


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keeps TFDS's prints, progress bars and absl lines off the terminal.

    It greets on stdout, where our last line is the result, and warns on stderr that
    our configs are not listed in its class.
    """
    verbosity = logging.get_verbosity()
    logging.set_verbosity(logging.ERROR)
    tfds.disable_progress_bar()
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            yield
    finally:
        logging.set_verbosity(verbosity)
