"""Stores published corpora with TFDS, and reads the text of TFDS datasets.

A published corpus is downloaded, verified, unpacked and stored in ArrayRecord files.
Importing this module imports TFDS, which takes about a second, but not TensorFlow; only
the preparation of a corpus imports it.
"""

import contextlib
import errno
import io
import logging
import shutil
import tarfile
import zipfile
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import requests
import tensorflow_datasets as tfds
from absl import logging as absl_logging
from google.protobuf import json_format
from tensorflow_datasets.core.download import downloader
from tensorflow_datasets.core.download.download_manager import NonMatchingChecksumError
from tensorflow_datasets.core.utils import tqdm_utils

from txl_jax.data.byte_ranges import (
    ByteRanges,
    Splits,
    blocks,
    cut,
    cut_at,
    size,
    verify_file,
    whole,
)
from txl_jax.data.catalog import Archive, Corpus, Member
from txl_jax.data.options import AGAIN, SPLIT_NAMES, SPLITS
from txl_jax.errors import UserError
from txl_jax.report.log import say, waiting
from txl_jax.report.progress import Progress
from txl_jax.runtime.explain import one_line
from txl_jax.runtime.storage import refusing_damage

EXAMPLE_BYTES = 1 << 20  # one example; reading single lines was 700 times slower
SHARD_BYTES = 64 << 20  # one file on disk
READ_BYTES = 1 << 20  # at once; reading single short texts was 30 times slower
TFDS_ERRORS = RuntimeError, json_format.Error  # raised by ArrayRecord and TFDS
RETRIES = 4  # TFDS's ten retries wait 204 s without a network

Example = tuple[int, dict[str, np.ndarray]]


class CorpusBuilder(tfds.core.ShardBasedBuilder):
    """All published corpora, one config each: `txl_jax/<corpus>`.

    TFDS's other builders need TensorFlow from 1000 MiB on. The examples of a split are
    not shuffled: concatenated, they are the split's bytes.
    """

    name = "txl_jax"
    corpus: Corpus  # to store
    scratch: Path  # to unpack it in

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

    @property
    def url_infos(self) -> dict[str, tfds.download.checksums.UrlInfo]:
        """The size and checksum of each download, which TFDS verifies."""
        return {
            url: tfds.download.checksums.UrlInfo(
                size=archive.size, checksum=archive.sha256, filename=None
            )
            for archive in self.corpus.archives
            for url in archive.urls
        }

    def _shard_iterators_per_split(
        self, dl_manager: tfds.download.DownloadManager
    ) -> dict[str, list[Callable[[], Iterator[Example]]]]:
        manual = Path(self.data_dir_root) / "downloads" / "manual"
        splits = find_splits(self.corpus, dl_manager, manual, self.scratch)
        total = sum(map(size, splits.values()))
        progress = Progress("data: storing", total, unit="bytes")
        return {
            split: [
                partial(_examples, ranges, start, progress)
                for start in range(0, size(ranges), SHARD_BYTES)
            ]
            for split, ranges in splits.items()
        }


def _examples(ranges: ByteRanges, start: int, progress: Progress) -> Iterator[Example]:
    shard = cut(ranges, start, start + SHARD_BYTES)
    for number, block in enumerate(blocks(shard, EXAMPLE_BYTES)):
        key = start + number * EXAMPLE_BYTES
        yield key, {"bytes": np.frombuffer(block, np.uint8)}
        progress.update(len(block))


def open_corpus(
    corpus: Corpus, data_dir: Path, scratch: Path
) -> Callable[[str], Iterator[bytes]]:
    """Returns a function that reads a split of a published corpus.

    The corpus is stored below `data_dir` if it was not; its folder appears complete or
    not at all. The caller holds a lock: two processes must not store it at once.
    """
    config = tfds.core.BuilderConfig(
        name=corpus.name,
        version=tfds.core.Version(corpus.version),
        description=f"{corpus.name}. Licence: {corpus.licence}.",
    )
    folder = data_dir / CorpusBuilder.name / corpus.name / corpus.version
    with _quiet():
        with refusing_damage(folder, AGAIN, *TFDS_ERRORS):
            # The only format of TFDS that is exact and does not need TensorFlow.
            builder = CorpusBuilder(
                data_dir=data_dir, config=config, file_format="array_record"
            )
        builder.corpus, builder.scratch = corpus, scratch
        if not folder.exists():
            try:
                builder.download_and_prepare()
            except RuntimeError as error:  # ArrayRecord's error for a full disk
                raise OSError(errno.ENOSPC, one_line(error), str(folder)) from error
    return lambda split: (x.tobytes() for x in _read(builder, split, "bytes"))


def open_dataset(folder: Path) -> Callable[[str], Iterator[bytes]]:
    """Returns a function that reads a split of a TFDS dataset, text by text.

    A newline follows each text that does not end with one.
    """
    with refusing_damage(folder, AGAIN, *TFDS_ERRORS):
        builder = tfds.builder_from_directory(folder)
        info = builder.info
    ours = {SPLIT_NAMES[name]: name for name in info.splits if name in SPLIT_NAMES}
    names = sorted(
        name
        for name, feature in info.features.items()
        if isinstance(feature, tfds.features.Text)
    )
    feature = "text" if "text" in names else ", ".join(names)
    stored = info.file_format.value
    if stored != "array_record" or {*ours} != {*SPLITS} or feature not in names:
        raise UserError(
            f"{folder} is stored as {stored} and has the splits "
            f"{', '.join(info.splits)} and the text features {', '.join(names)}: use a "
            "dataset with train, validation and test and the feature text, prepared by "
            "TFDS with file_format='array_record', or give its text as "
            "data.corpus='text'"
        )

    def texts(split: str) -> Iterator[bytes]:
        for text in _read(builder, ours[split], feature):
            yield text if text.endswith(b"\n") else text + b"\n"

    return texts


def _read(builder: tfds.core.DatasetBuilder, split: str, feature: str) -> Iterator[Any]:
    """Yields a feature of a split in order; raises UserError if it is damaged."""
    with refusing_damage(builder.data_path, AGAIN, *TFDS_ERRORS):
        info = builder.info.splits[split]
        with _quiet():
            source = builder.as_data_source(split)
        step = max(READ_BYTES // (info.num_bytes // max(info.num_examples, 1) + 1), 1)
        for start in range(0, len(source), step):
            indices = list(range(start, min(start + step, len(source))))
            for example in source.__getitems__(indices):
                yield example[feature]


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Suppresses TFDS's output, and limits its attempts to download.

    TFDS prints to stdout, whose last line is a run's result, and warns on stderr about
    configs that its class does not list.
    """
    logger = logging.getLogger("urllib3")  # which reports each attempt
    verbosity, level = absl_logging.get_verbosity(), logger.level
    retries = downloader.MAX_RETRIES
    shows_bars = tqdm_utils._active
    absl_logging.set_verbosity(absl_logging.ERROR)
    logger.setLevel(logging.ERROR)
    downloader.MAX_RETRIES = RETRIES
    tfds.display_progress_bar(False)
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            yield
    finally:
        absl_logging.set_verbosity(verbosity)
        logger.setLevel(level)
        downloader.MAX_RETRIES = retries
        tfds.display_progress_bar(shows_bars)


def find_splits(
    corpus: Corpus,
    downloads: tfds.download.DownloadManager,
    manual: Path,
    scratch: Path,
) -> Splits:
    """Returns the splits of a published corpus, from verified files.

    Archives are unpacked in `scratch`. The sources, in this order, are an archive in
    the folder `manual`, its unpacked files there, and TFDS's downloads.
    """
    paths: dict[str, Path] = {}
    for archive in corpus.archives:
        path = manual / archive.name
        if archive.packed and path.exists():
            say(f"data: using {path}")
            verify_file(path, archive.sha256)
        elif unpacked := _find_unpacked(archive, corpus.name, manual):
            paths |= unpacked
            continue
        else:
            path = _download(archive, corpus.name, downloads, manual)
        if archive.packed:
            paths |= _unpack(path, archive.members, scratch)
        else:
            paths[archive.name] = path
    if corpus.bounds:
        return cut_at([whole(path) for path in paths.values()], corpus.bounds)
    members = [member for archive in corpus.archives for member in archive.members]
    return {
        split: tuple(whole(paths[m.path]) for m in members if split in m.splits)
        for split in SPLITS
    }


def _find_unpacked(archive: Archive, corpus: str, manual: Path) -> dict[str, Path]:
    """Returns the verified members in the manual folder: all of them or none."""
    paths = {
        member.path: place
        for member in archive.members
        for place in (manual / corpus / Path(member.path).name, manual / member.path)
        if place.is_file()
    }
    if len(paths) < len(archive.members):
        return {}
    say(f"data: using the files of {corpus} in {manual}")
    for member in archive.members:
        verify_file(paths[member.path], member.digest)
    return paths


def _download(
    archive: Archive,
    corpus: str,
    downloads: tfds.download.DownloadManager,
    manual: Path,
) -> Path:
    """Returns the verified download from the first host that has it; TFDS keeps it."""
    reasons = []
    for url in archive.urls:
        name = tfds.download.resource.get_dl_fname(url)
        for leftover in manual.parent.rglob(f"{name}.tmp.*"):  # from a killed download
            shutil.rmtree(leftover)
        try:
            with waiting(f"data: downloading {url}, {archive.size:,} bytes"):
                path = Path(downloads.download(url))
            # TFDS does not check its earlier downloads.
            verify_file(path, archive.sha256)
            return path
        except (
            requests.RequestException,
            tfds.download.DownloadError,
            NonMatchingChecksumError,
        ) as error:
            reasons.append(f"{url}: {one_line(error)}")
    files = f", or its files in {manual / corpus}," if archive.packed else ""
    raise UserError(
        f"cannot download {archive.name} ({'; '.join(reasons)}): put {archive.name} in "
        f"{manual}{files} and run again"
    )


def _unpack(path: Path, members: Sequence[Member], folder: Path) -> dict[str, Path]:
    """Unpacks the members of a verified archive into a folder, and nothing else."""
    targets = {member.path: folder / member.path for member in members}
    with waiting(f"data: unpacking {path.name}"):
        if zipfile.is_zipfile(path):  # TFDS renames downloads
            with zipfile.ZipFile(path) as zipped:
                zipped.extractall(folder, targets)
            return targets
        with tarfile.open(path, "r|gz") as archive:
            for entry in archive:
                target = targets.get(entry.name.removeprefix("./"))
                if target and (content := archive.extractfile(entry)):
                    target.parent.mkdir(parents=True, exist_ok=True)
                    with target.open("wb") as file:
                        shutil.copyfileobj(content, file)
    return targets
