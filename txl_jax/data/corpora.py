"""Sources: the text of each corpus on this machine, as byte ranges per split.

Published corpora are fetched and unpacked. `builder` stores the bytes of a source and
`tokens` encodes them.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from txl_jax.data import archive, dataset, files
from txl_jax.data.byte_ranges import ByteRanges, cut_at, size, whole
from txl_jax.data.catalog import CORPORA, TFDS_PREFIX, Corpus
from txl_jax.data.copying import Task
from txl_jax.data.options import SPLITS
from txl_jax.errors import UserError, nearest


@dataclass(frozen=True)
class Source:
    """A corpus on this machine; `splits` is empty if `unpack` is needed."""

    corpus: Corpus
    edition: str  # distinguishes states of the corpus; "" if there is only one
    splits: dict[str, ByteRanges]
    path: Path = Path()  # the user's text, or the folder of a TFDS dataset
    task: Task = Task()  # of corpus "copying"

    @property
    def config(self) -> str:
        """The name of the TFDS config and of its folder."""
        return "-".join(filter(None, (self.corpus.name, self.edition)))

    @property
    def bytes(self) -> int:
        """The size of the text; 0 if it is unknown before unpacking."""
        if self.splits:
            return sum(map(size, self.splits.values()))
        sizes = [member.size for member in self.corpus.members]
        return sum(sizes) if all(sizes) else 0


def find(
    name: str, path: str = "", data_dir: Path = Path(), task: Task | None = None
) -> Source:
    """Returns the source of a corpus, without reading it.

    `data_dir` contains TFDS datasets, and `task` is for corpus "copying". Raises
    UserError for an unknown corpus, for a path that is missing, empty, unreadable or
    not applicable, and for a split that is too small.
    """
    kind = "tfds" if name.startswith(TFDS_PREFIX) else name
    if kind not in CORPORA or name == "tfds":
        known = [corpus.replace("tfds", "tfds:<name>") for corpus in CORPORA]
        raise UserError(
            f"data.corpus={name!r} is unknown{nearest(name, known)}; known are: "
            f"{', '.join(known)}"
        )
    corpus = CORPORA[kind]
    if path and kind != "text":
        raise UserError(
            f"data.path={path!r} is for data.corpus='text', not {name!r}: leave it "
            "empty, or set data.corpus='text'"
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
    edition, splits = "", dict[str, ByteRanges]()
    if kind == "stdlib":
        edition, splits = files.find_stdlib()
    elif kind == "text":
        edition, splits = files.find_text(path)
    return _check_size(Source(corpus, edition, splits, Path(path)))


def unpack(
    source: Source, data_dir: Path, scratch: Path, say: Callable[[str], None]
) -> Source:
    """Returns a source with its splits, fetched and unpacked if they were not.

    Files are unpacked into `scratch`, which must exist until the text is copied.
    Raises UserError for a file that cannot be fetched, read or verified.
    """
    corpus = source.corpus
    if source.splits:
        return source
    scratch.mkdir(parents=True)
    if corpus.archives:
        paths: dict[str, Path] = {}
        for part in corpus.archives:
            paths |= archive.fetch(
                part, corpus.name, data_dir / "downloads", scratch, say
            )
        splits = _arrange(corpus, paths)
    elif corpus.name == "copying":
        splits = source.task.unpack(scratch)
    elif corpus.name == "tfds":
        splits = dataset.unpack(source.path, scratch, say)
    else:
        splits = files.unpack_text(str(source.path), scratch)
    return _check_size(Source(corpus, source.edition, splits, source.path))


def vocab_file(corpus: Corpus, data_dir: Path) -> Path | None:
    """Returns the corpus's published vocabulary if it is in the manual folder.

    Raises UserError if that file does not match its checksum.
    """
    if not corpus.types.path:
        return None
    path = data_dir / "downloads" / "manual" / corpus.types.path
    if not path.exists():
        return None
    archive.verify(path, corpus.types.digest, corpus.types.size)
    return path


def _arrange(corpus: Corpus, paths: dict[str, Path]) -> dict[str, ByteRanges]:
    """Returns the splits of unpacked members."""
    splits = {
        split: tuple(
            whole(paths[member.path])
            for member in corpus.members
            if split in member.splits
        )
        for split in SPLITS
    }
    return cut_at(splits["train"], corpus.bounds) if corpus.bounds else splits


def _check_size(source: Source) -> Source:
    """Returns the source; raises UserError if a split is too small to be scored."""
    where = f" at {str(source.path)!r}" if source.path.parts else ""
    for split, ranges in source.splits.items():
        if size(ranges) < 2:
            raise UserError(
                f"corpus {source.corpus.name!r}{where} is too small: its {split} split "
                f"has {size(ranges)} bytes and needs at least 2; add text"
            )
    return source
