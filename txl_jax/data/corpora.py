"""Sources: the text of each corpus on this machine, as byte ranges per split."""

import platform
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from txl_jax.data import archive, dataset, files
from txl_jax.data.byte_ranges import Splits, cut_at, size, whole
from txl_jax.data.catalog import CORPORA, Corpus
from txl_jax.data.number import split_numbers
from txl_jax.data.options import SPLITS
from txl_jax.errors import UserError, nearest


@dataclass(frozen=True)
class Source:
    """A corpus on this machine, or one that can be fetched."""

    corpus: Corpus
    edition: str  # distinguishes states of the corpus; "" if there is only one
    split: Callable[[Path], Splits]  # writes unpacked files into a folder

    @property
    def config(self) -> str:
        """The name of the TFDS config."""
        return "-".join(filter(None, (self.corpus.name, self.edition)))

    def unpack(self, scratch: Path) -> Splits:
        """Returns the splits, fetched and unpacked if they were not.

        Files are unpacked into `scratch`, which must exist until the text is copied.
        Raises UserError for a split that is too small to be scored.
        """
        scratch.mkdir(parents=True)
        splits = self.split(scratch)
        for split, ranges in splits.items():
            if size(ranges) < 2:
                raise UserError(
                    f"corpus {self.corpus.name!r} is too small: its {split} split has "
                    f"{size(ranges)} bytes and needs at least 2; add text"
                )
        return splits


def find(
    name: str,
    path: str = "",
    data_dir: Path = Path(),
    document_end: str = "",
    dtype: str = "",
) -> Source:
    """Returns the source of a corpus, without reading it.

    `data_dir` contains downloads and TFDS datasets.
    """
    kind, colon, argument = name.partition(":")
    if kind not in CORPORA or bool(colon) != (kind == "tfds"):
        known = [f"{x}:NAME" if x == "tfds" else x for x in CORPORA]
        raise UserError(
            f"data.corpus={name!r} is unknown{nearest(name, known)}; known are: "
            f"{', '.join(known)}"
        )
    corpus = CORPORA[kind]
    local = ("text", "tokens")
    for field, value, kinds in (
        ("path", path, local),
        ("document_end", document_end, local),
        ("dtype", dtype, ("tokens",)),
    ):
        if value and kind not in kinds:
            raise UserError(
                f"data.{field}={value!r} is for data.corpus={kinds[0]!r}, not "
                f"{name!r}: leave it empty, or set data.corpus={kinds[0]!r}"
            )
    if kind == "tokens":
        edition = files.text_edition(path, f"{document_end} {dtype}")
        split = partial(split_numbers, path, document_end=document_end, dtype=dtype)
        return Source(corpus, edition, split)
    if kind == "text":
        edition = files.text_edition(path, document_end)
        split = partial(files.split_text, path, document_end=document_end)
        return Source(corpus, edition, split)
    if kind == "stdlib":
        edition = platform.python_version()
        return Source(corpus, edition, lambda _: files.split_stdlib())
    if kind == "tfds":
        edition, folder = dataset.find(argument, data_dir)
        return Source(corpus, edition, partial(dataset.unpack, folder))
    return Source(corpus, "", partial(_fetch, corpus, data_dir / "downloads"))


def _fetch(corpus: Corpus, downloads: Path, scratch: Path) -> Splits:
    paths: dict[str, Path] = {}
    for part in corpus.archives:
        paths |= archive.fetch(part, corpus.name, downloads, scratch)
    if corpus.bounds:
        return cut_at([whole(path) for path in paths.values()], corpus.bounds)
    members = [member for part in corpus.archives for member in part.members]
    return {
        split: tuple(whole(paths[m.path]) for m in members if split in m.splits)
        for split in SPLITS
    }


def vocab_file(corpus: Corpus, data_dir: Path) -> Path | None:
    """Returns the corpus's published vocabulary if it is in the manual folder."""
    path = data_dir / "downloads" / "manual" / corpus.types.path
    if not corpus.types.path or not path.exists():
        return None
    archive.verify(path, corpus.types.digest)
    return path
