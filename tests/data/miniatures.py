"""Miniatures of the published corpora: their archives' layout and quirks, made up here.

A miniature has its archive's name, member names and kinds of line (blank ones, " \\n",
a missing last line end, non-ASCII, byte 10), a few KB each, the same bytes every time.
`facts` are those of the real corpus with the miniature's own checksums and sizes, to be
put in its place in `corpora.CORPORA`; `install` does that for a test.

`python -m tests.data.miniatures FOLDER` writes them all to a folder.
"""

import dataclasses
import hashlib
import io
import random
import sys
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from txl_jax.data import corpora
from txl_jax.data.archive import Archive, Member
from txl_jax.data.corpora import Corpus
from txl_jax.data.options import SPLITS

NAMES = ("enwik8", "text8", "wikitext103", "wikitext2", "lm1b", "ptb")
SIZES = {"train": 400, "valid": 40, "test": 50}  # lines

WORDS = (
    "the of and in to a was @-@ @,@ @.@ is for on as with by that from at his it were "
    "naïve Zürich – 東京 café <unk> N 1 9 km game river song year season album war"
).split()


def _words(rng: random.Random, count: int) -> str:
    weights = [1 / (rank + 1) for rank in range(len(WORDS))]
    return " ".join(rng.choices(WORDS, weights, k=count))


def _wikitext(split: str, whole: bool) -> bytes:
    """Articles as WikiText has them; the last line of `valid` has no end."""
    rng = random.Random(f"wikitext {split} {whole}")
    lines = [" \n"]
    for number in range(SIZES[split] * (2 if whole else 1) // 10):
        lines += [f" = Title {number} = \n", " \n"]
        for _ in range(5):
            lines.append(f" {_words(rng, rng.randint(3, 30))} \n")
            lines.append(rng.choice((" \n", "\n", f" = = Part {number % 7} = = \n")))
    # Words that training never sees: one in each held-out split, one in both.
    lines.append({"train": " \n", "valid": " validword heldout \n"}.get(split, " \n"))
    if split == "test":
        lines.append(" testword heldout testword \n")
    text = "".join(lines)
    return (text.rstrip(" \n") if split == "valid" else text).encode()


def _ptb(split: str) -> bytes:
    rng = random.Random(f"ptb {split}")
    ascii_words = [word.lower() for word in WORDS if word.isascii()]
    lines = (
        f" {' '.join(rng.choices([*ascii_words, 'N'], k=rng.randint(3, 30)))} \n"
        for _ in range(SIZES[split])
    )
    return "".join(lines).encode()


def _lm1b(shard: str) -> bytes:
    """Sentences; a blank line in each shard, and no line end after the last one."""
    rng = random.Random(f"lm1b {shard}")
    lines = [_words(rng, rng.randint(2, 25)) for _ in range(8)]
    lines.insert(4, "")
    end = "" if shard == "news.en-00099-of-00100" else "\n"
    return ("\n".join(lines) + end).encode()


def _enwik8() -> bytes:
    """A dump's XML, cut off in the middle of a character, as the real one may be."""
    rng = random.Random("enwik8")
    pages = [
        f"  <page>\n    <title>{_words(rng, 2)}</title>\n    <id>{number}</id>\n"
        f"      <text xml:space=\"preserve\">'''{_words(rng, 40)}'''\n\n\n"
        f"== {_words(rng, 1)} ==\n* [[{_words(rng, 2)}]] &quot;东\t&quot;</text>\n"
        "  </page>\n"
        for number in range(60)
    ]
    return ("<mediawiki>\n" + "".join(pages)).encode()[:-30] + "é".encode()[:1]


def _text8() -> bytes:
    """Letters and single spaces without a line end; it begins with a space."""
    rng = random.Random("text8")
    letters = "abcdefghijklmnopqrstuvwxyz"
    words = ("".join(rng.choices(letters, k=rng.randint(1, 9))) for _ in range(2000))
    return (" " + " ".join(words)).encode()


def text(corpus: str, member: str) -> bytes:
    """Returns what a miniature's archive holds under the name of a member."""
    name = member.rpartition("/")[2]
    if corpus in ("wikitext103", "wikitext2"):
        return _wikitext(name.split(".")[1], corpus == "wikitext103")
    by_name: dict[str, Callable[[], bytes]] = {
        "enwik8": _enwik8,
        "text8": _text8,
        "ptb": lambda: _ptb(name.split(".")[1]),
        "lm1b": lambda: _lm1b(name),
    }
    return by_name[corpus]()


def splits(corpus: str) -> dict[str, bytes]:
    """Returns the bytes that the builder must store."""
    given = _facts(corpus)
    if given.bounds:
        whole = text(corpus, corpus)
        edges = (0, *given.bounds, len(whole))
        return {
            split: whole[edges[index] : edges[index + 1]]
            for index, split in enumerate(SPLITS)
        }
    return {
        split: b"".join(
            text(corpus, member.path)
            for member in given.members
            if split in member.splits
        )
        for split in SPLITS
    }


def types() -> bytes:
    """Returns lm1b's vocabulary file: a word and its count a line, `<S>` twice."""
    lines = ["</S> 900", "<S> 900", "<UNK> 40", "<S> 0"]
    lines += [f"{word} {900 - rank}" for rank, word in enumerate(WORDS)]
    return "".join(f"{line}\n" for line in lines).encode()


def pack(archive: Archive, contents: dict[str, bytes]) -> bytes:
    """Returns a zip or tar.gz with these files, the same bytes every time."""
    stream = io.BytesIO()
    if archive.remote.name.endswith(".zip"):
        with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as file:
            for folder in sorted(
                {n.rpartition("/")[0] + "/" for n in contents} - {"/"}
            ):
                file.writestr(zipfile.ZipInfo(folder), b"")
            for name, content in contents.items():
                file.writestr(zipfile.ZipInfo(name), content, zipfile.ZIP_DEFLATED)
    else:
        with tarfile.open(fileobj=stream, mode="w:gz") as tar:
            for name, content in contents.items():
                info = tarfile.TarInfo(name)
                info.size = len(content)
                tar.addfile(info, io.BytesIO(content))
    data = bytearray(stream.getvalue())
    if data[:2] == b"\x1f\x8b":
        data[4:8] = bytes(4)  # gzip's time stamp
    return bytes(data)


def packed(corpus: str) -> dict[str, bytes]:
    """Returns the files that a host offers: archives, or PTB's three texts."""
    files = {}
    for archive in corpora.CORPORA[corpus].archives:
        contents = {m.path: text(corpus, m.path) for m in archive.members}
        if corpus == "lm1b":
            # As in the real one: all fifty held-out shards, the first not in order.
            first = next(name for name in contents if "heldout" in name)
            for shard in range(1, 50):
                name = first.replace("00000-of", f"{shard:05}-of")
                contents[name] = text(corpus, name)
            contents = {f"./{name}": contents[name] for name in reversed(contents)}
            contents["./README"] = b"not a part of the text\n"
        if archive.packed:
            files[archive.remote.name] = pack(archive, contents)
        else:
            ((_, files[archive.remote.name]),) = contents.items()
    return files


def _facts(corpus: str) -> Corpus:
    """Returns the facts without the checksums: for the members' names and bounds."""
    given = corpora.CORPORA[corpus]
    if given.bounds:
        total = len(text(corpus, corpus))
        given = dataclasses.replace(
            given, bounds=(total * 90 // 100, total * 95 // 100)
        )
    return given


def facts(corpus: str) -> Corpus:
    """Returns the facts about a miniature; no host is asked for it."""
    given, files = _facts(corpus), packed(corpus)

    def sha256(data: bytes) -> str:
        return hashlib.sha256(data).hexdigest()

    def member(real: Member) -> Member:
        data = text(corpus, real.path)
        digest = sha256(data) if real.digest else ""
        return dataclasses.replace(real, digest=digest, size=len(data))

    archives = tuple(
        Archive(
            dataclasses.replace(
                archive.remote,
                urls=(),
                sha256=sha256(files[archive.remote.name]),
                size=len(files[archive.remote.name]),
            ),
            tuple(map(member, archive.members)),
        )
        for archive in given.archives
    )
    digest = given.types.digest and sha256(types())
    return dataclasses.replace(
        given,
        archives=archives,
        types=dataclasses.replace(given.types, digest=digest),
    )


def write(corpus: str, folder: Path) -> None:
    """Writes what a host offers, and lm1b's vocabulary, to a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, data in packed(corpus).items():
        (folder / name).write_bytes(data)
    if corpora.CORPORA[corpus].types.path:
        (folder / corpora.CORPORA[corpus].types.path).write_bytes(types())


def install(corpus: str, data_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Corpus:
    """Puts a miniature in the manual folder and its facts in the real one's place."""
    write(corpus, data_dir / "downloads" / "manual")
    monkeypatch.setitem(corpora.CORPORA, corpus, given := facts(corpus))
    return given


if __name__ == "__main__":
    for each in NAMES:
        write(each, Path(sys.argv[1]) / each)
