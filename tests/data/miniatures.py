"""Miniatures of the published corpora: their archives' layout and quirks, made up here.

A miniature has its archive's name, member names and kinds of line (blank ones, " \\n",
a missing last line end, non-ASCII, byte 10), a few KB each, the same bytes every time.
`facts` is the catalog's entry with the miniature's own checksums and sizes; `install`
puts it in the real one's place for a test.
"""

import functools
import hashlib
import io
import random
import tarfile
import zipfile
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from txl_jax.data import catalog
from txl_jax.data.catalog import Corpus, Member
from txl_jax.data.options import SPLITS

# The real catalog, of which `install` replaces an entry.
CORPORA = dict(catalog.CORPORA)
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


@functools.cache
def text(corpus: str, member: str) -> bytes:
    """Returns what a miniature's archive holds under the name of a member."""
    name = member.rpartition("/")[2]
    if corpus in ("wikitext103", "wikitext2"):
        return _wikitext(name.split(".")[1], corpus == "wikitext103")
    if corpus == "ptb":
        return _ptb(name.split(".")[1])
    if corpus == "lm1b":
        return _lm1b(name)
    return {"enwik8": _enwik8, "text8": _text8}[corpus]()


def splits(corpus: str) -> dict[str, bytes]:
    """Returns the bytes that the builder must store."""
    real = CORPORA[corpus]
    if real.bounds:
        whole = text(corpus, corpus)
        edges = (0, *_bounds(corpus), len(whole))
        pieces = (whole[start:stop] for start, stop in pairwise(edges))
        return dict(zip(SPLITS, pieces, strict=True))
    members = [member for archive in real.archives for member in archive.members]
    return {
        name: b"".join(text(corpus, m.path) for m in members if name in m.splits)
        for name in SPLITS
    }


def _bounds(corpus: str) -> tuple[int, int]:
    total = len(text(corpus, corpus))
    return total * 90 // 100, total * 95 // 100


def types() -> bytes:
    """Returns lm1b's vocabulary file: a word and its count a line, `<S>` twice."""
    lines = ["</S> 900", "<S> 900", "<UNK> 40", "<S> 0"]
    lines += [f"{word} {900 - rank}" for rank, word in enumerate(WORDS)]
    return "".join(f"{line}\n" for line in lines).encode()


def zipped(contents: dict[str, bytes], mode: int = 0) -> bytes:
    """Returns a zip with these files, all of one mode."""
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as file:
        for name, content in contents.items():
            info = zipfile.ZipInfo(name)
            info.external_attr = mode << 16
            file.writestr(info, content, zipfile.ZIP_DEFLATED)
    return stream.getvalue()


def tar(*entries: tuple[str, bytes, bytes]) -> bytes:
    """Returns a tar.gz with entries: name, type and content."""
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w:gz") as file:
        for name, kind, content in entries:
            info = tarfile.TarInfo(name)
            info.type, info.linkname, info.size = kind, "/etc/passwd", len(content)
            file.addfile(info, io.BytesIO(content))
    return stream.getvalue()


@functools.cache
def packed(corpus: str) -> dict[str, bytes]:
    """Returns the files that a host offers: archives, or PTB's three texts."""
    files: dict[str, bytes] = {}
    for archive in CORPORA[corpus].archives:
        contents = {m.path: text(corpus, m.path) for m in archive.members}
        if not archive.packed:
            files |= contents
        elif corpus == "lm1b":
            # As in the real one: more held-out shards, and the first not in order.
            first = next(name for name in contents if "heldout" in name)
            for shard in range(1, 4):
                name = first.replace("00000-of", f"{shard:05}-of")
                contents[name] = text(corpus, name)
            names = [*reversed(contents), "README"]
            kept = [(f"./{n}", tarfile.REGTYPE, contents.get(n, b"no")) for n in names]
            files[archive.name] = tar(*kept)
        else:
            folders = {f"{name.rpartition('/')[0]}/": b"" for name in contents}
            folders.pop("/", None)
            files[archive.name] = zipped(folders | contents)
    return files


@functools.cache
def facts(corpus: str) -> Corpus:
    """Returns the catalog's entry for a miniature, which no host offers."""
    real, files = CORPORA[corpus], packed(corpus)

    def sha256(data: bytes) -> str:
        return hashlib.sha256(data).hexdigest()

    def member(real: Member) -> Member:
        data = text(corpus, real.path)
        return replace(real, digest=real.digest and sha256(data), size=len(data))

    archives = tuple(
        replace(
            archive,
            urls=(),
            sha256=sha256(files[archive.name]),
            size=len(files[archive.name]),
            members=tuple(map(member, archive.members)),
        )
        for archive in real.archives
    )
    listed = replace(real.types, digest=real.types.digest and sha256(types()))
    bounds = _bounds(corpus) if real.bounds else ()
    return replace(real, archives=archives, types=listed, bounds=bounds)


def install(corpus: str, data_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Corpus:
    """Puts a miniature in the manual folder and its facts in the real one's place."""
    folder = data_dir / "downloads" / "manual"
    folder.mkdir(parents=True, exist_ok=True)
    for name, data in packed(corpus).items():
        (folder / name).write_bytes(data)
    if CORPORA[corpus].types.path:
        (folder / CORPORA[corpus].types.path).write_bytes(types())
    monkeypatch.setitem(catalog.CORPORA, corpus, result := facts(corpus))
    return result
