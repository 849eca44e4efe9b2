"""A corpus as found on this machine (the paper's section 4.1 trains on five).

It becomes ordered pieces of files per split, fetched and unpacked where need be, before
a byte of it is copied; `builder` stores those bytes and `tokens` encodes them.

Dims: none.
"""

from dataclasses import dataclass
from pathlib import Path

from txl_jax.data import archive, dataset, files
from txl_jax.data.copying import Task
from txl_jax.data.facts import CORPORA, Corpus
from txl_jax.data.pieces import (
    SPLITS,
    Piece,
    Pieces,
    blocks,
    cut,
    cut_at,
    size,
    whole,
)
from txl_jax.data.progress import Say
from txl_jax.errors import UserError, nearest

__all__ = ["CORPORA", "SPLITS", "Corpus", "Piece", "Pieces", "Source"]
__all__ += ["blocks", "cut", "find", "size", "unpack", "vocab_file"]

TFDS_PREFIX = "tfds:"


@dataclass(frozen=True)
class Source:
    """A corpus as found on this machine.

    `splits` is empty where files have still to be fetched or unpacked: `unpack` does.
    """

    corpus: Corpus
    edition: str  # tells two states of the corpus apart; "" when it has only one
    splits: dict[str, Pieces]
    path: Path = Path()  # the user's text, or the folder of a TFDS dataset
    task: Task = Task()  # of the corpus that is made here

    @property
    def config(self) -> str:
        """The name of the TFDS config and of the folder: corpus and edition."""
        return "-".join(filter(None, (self.corpus.name, self.edition)))

    @property
    def bytes(self) -> int:
        """The size of the text, 0 where it is known only after unpacking it."""
        if self.splits:
            return sum(map(size, self.splits.values()))
        sizes = [member.size for member in self.corpus.members]
        return sum(sizes) if all(sizes) else 0


def find(
    name: str, path: str = "", data_dir: Path = Path(), task: Task | None = None
) -> Source:
    """Finds a corpus, without reading it; `data_dir` is where TFDS datasets lie.

    `task` is for corpus "copying", and for no other.

    Raises UserError for an unknown corpus, for a path that is missing, not wanted,
    empty or unreadable, and for a split that is too small.
    """
    kind = "tfds" if name.startswith(TFDS_PREFIX) else name
    if kind not in CORPORA or name == "tfds":
        known = [each.replace("tfds", "tfds:<name>") for each in CORPORA]
        raise UserError(
            f"data.corpus={name!r} is unknown{nearest(name, known)}; known are: "
            f"{', '.join(known)}"
        )
    corpus = CORPORA[kind]
    if path and kind != "text":
        raise UserError(
            f"data.path={path!r} is for data.corpus='text': corpus {name!r} has no "
            "path, so set data.corpus='text' or leave data.path empty"
        )
    if kind == "text" and not path:
        raise UserError(
            f"data.corpus={name!r} needs data.path: a file, a folder or a glob"
        )
    if kind == "copying":
        task = task or Task()
        task.check()
        return Source(corpus, task.edition, {}, task=task)
    if kind == "tfds":
        edition, folder = dataset.find(name.removeprefix(TFDS_PREFIX), data_dir)
        return Source(corpus, edition, {}, folder)
    edition, splits = "", dict[str, Pieces]()
    if kind == "stdlib":
        edition, splits = files.find_stdlib()
    elif kind == "text":
        edition, splits = files.find_text(path)
    return _with_text(Source(corpus, edition, splits, Path(path)))


def unpack(source: Source, data_dir: Path, scratch: Path, say: Say) -> Source:
    """Returns a source that has its splits, fetched and unpacked where they were not.

    What is unpacked goes below `scratch`, which must stay until the text is copied.
    Raises UserError for whatever cannot be fetched, read or trusted.
    """
    corpus = source.corpus
    if source.splits:
        return source
    scratch.mkdir(parents=True)
    if corpus.archives:
        where: dict[str, Path] = {}
        for part in corpus.archives:
            where |= archive.fetch(
                part, corpus.name, data_dir / "downloads", scratch, say
            )
        splits = _lay_out(corpus, where)
    elif corpus.name == "copying":
        splits = source.task.unpack(scratch)
    elif corpus.name == "tfds":
        splits = dataset.unpack(source.path, scratch, say)
    else:
        splits = files.unpack_text(str(source.path), scratch)
    return _with_text(Source(corpus, source.edition, splits, source.path))


def vocab_file(corpus: Corpus, data_dir: Path) -> Path | None:
    """Returns the corpus's published vocabulary if it is in the manual folder.

    Raises UserError when the file there is another one.
    """
    if not corpus.types.path:
        return None
    path = data_dir / "downloads" / "manual" / corpus.types.path
    if not path.exists():
        return None
    archive.verify_member(path, corpus.types)
    return path


def _lay_out(corpus: Corpus, where: dict[str, Path]) -> dict[str, Pieces]:
    splits = {
        split: tuple(
            whole(where[member.path])
            for member in corpus.members
            if split in member.splits
        )
        for split in SPLITS
    }
    return cut_at(splits["train"], corpus.bounds) if corpus.bounds else splits


def _with_text(source: Source) -> Source:
    """Returns the source; every split has at least the two bytes that a score needs."""
    where = f" at {str(source.path)!r}" if source.path.parts else ""
    for split, pieces in source.splits.items():
        if size(pieces) < 2:
            raise UserError(
                f"corpus {source.corpus.name!r}{where} is too small: its {split} split "
                f"would have {size(pieces)} bytes and needs at least 2; give it more "
                "text"
            )
    return source
