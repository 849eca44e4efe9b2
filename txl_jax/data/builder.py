"""The TFDS builder: the bytes of a corpus, in order, in ArrayRecord files.

Importing this module imports TFDS, which takes about a second, but not TensorFlow;
`tokens` imports it only to prepare a corpus.
"""

import contextlib
import io
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
import tensorflow_datasets as tfds
from absl import logging

from txl_jax.data import byte_ranges, corpora
from txl_jax.data.byte_ranges import ByteRanges
from txl_jax.data.dataset import refusing_damage
from txl_jax.errors import UserError
from txl_jax.report.progress import Progress
from txl_jax.runtime.storage import one_line

BLOCK_BYTES = 1 << 20  # one example; reading single lines was 700 times slower
SHARD_BYTES = 64 << 20  # one file on disk

Example = tuple[int, dict[str, np.ndarray]]


class CorpusBuilder(tfds.core.ShardBasedBuilder):
    """All corpora, one config each: `txl_jax/<corpus>-<edition>`.

    TFDS's other builders need TensorFlow from 1000 MiB on. The examples of a split are
    not shuffled: concatenated, they are its bytes.
    """

    name = "txl_jax"
    splits: byte_ranges.Splits  # to store

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
        total = sum(map(byte_ranges.size, self.splits.values()))
        progress = Progress("data: storing", total, in_bytes=True)
        return {
            split: [
                partial(_examples, ranges, start, progress)
                for start in range(0, byte_ranges.size(ranges), SHARD_BYTES)
            ]
            for split, ranges in self.splits.items()
        }


def _examples(ranges: ByteRanges, start: int, progress: Progress) -> Iterator[Example]:
    shard = byte_ranges.cut(ranges, start, start + SHARD_BYTES)
    for number, block in enumerate(byte_ranges.blocks(shard, BLOCK_BYTES)):
        key = start + number * BLOCK_BYTES
        yield key, {"bytes": np.frombuffer(block, np.uint8)}
        progress.add(len(block))


def prepare(source: corpora.Source, data_dir: Path) -> CorpusBuilder:
    """Fetches, unpacks and stores a corpus below `data_dir`, unless that was done.

    The folder appears complete or not at all. The caller holds a lock: two processes
    must not prepare one corpus at once.
    """
    corpus = source.corpus
    config = tfds.core.BuilderConfig(
        name=source.config,
        version=tfds.core.Version(corpus.version),
        description=f"{corpus.name}. Licence: {corpus.licence}.",
    )
    folder = data_dir / CorpusBuilder.name / source.config / corpus.version
    with _quiet():
        with refusing_damage(folder):
            # TFDS's only format that is exact and does not need TensorFlow.
            builder = CorpusBuilder(
                data_dir=data_dir, config=config, file_format="array_record"
            )
        # Left by a killed preparation; TFDS does not remove it.
        for leftover in folder.parent.glob("incomplete.*"):
            shutil.rmtree(leftover)
        if folder.exists():
            return builder
        scratch = folder.parent / "incomplete.unpacked"
        try:
            builder.splits = source.unpack(scratch)
            builder.download_and_prepare()
        except RuntimeError as error:  # ArrayRecord's error for a full disk
            raise UserError(
                f"cannot write {folder} ({one_line(error)}): make room or set "
                "data.data_dir to another folder"
            ) from error
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
    return builder


def read(builder: CorpusBuilder, split: str) -> Iterator[bytes]:
    """Yields the blocks of a split in order; raises UserError if they are damaged."""
    with refusing_damage(builder.data_path):
        with _quiet():
            source = builder.as_data_source(split)
        for index in range(len(source)):
            yield source[index]["bytes"].tobytes()


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Suppresses TFDS's output.

    TFDS prints to stdout, whose last line is a run's result, and warns on stderr about
    configs that its class does not list.
    """
    verbosity = logging.get_verbosity()
    logging.set_verbosity(logging.ERROR)
    tfds.disable_progress_bar()
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            yield
    finally:
        logging.set_verbosity(verbosity)
