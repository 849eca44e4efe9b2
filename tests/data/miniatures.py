"""Miniatures of the published corpora: their archives' layout and quirks, made up here.

A miniature has its archive's name, member names and kinds of line (blank ones, " \\n",
a missing last line end, non-ASCII, byte 10), a few KB each, the same bytes every time.
`facts` is the catalog's entry with the miniature's own checksums and sizes; `install`
puts it in the real one's place for a test.
"""

import functools
import hashlib
import io
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

LINE = " the of the 東京 @-@ café <unk> N N 9 the of game naïve \n"
ARTICLE = f" = Title = \n \n{LINE} \n = = Part = = \n\n{LINE}{LINE} \n"
PAGE = """  <page>
    <title>the of</title>
      <text xml:space="preserve">'''café'''


* [[Zürich]] &quot;东	&quot;</text>
  </page>
"""
WORDS = "the of and café 東京 N 9".split()
# By the member's name. WikiText's valid has no last line end, and each held-out split
# has words that training never sees. The cut of enwik8 splits a character.
TEXTS = {
    "wiki.train.tokens": f" \n{ARTICLE * 20} \n",
    "wiki.valid.tokens": f" \n{ARTICLE * 3} validword heldout",
    "wiki.test.tokens": f" \n{ARTICLE * 2} \n testword heldout testword \n",
    "ptb.train.txt": " the n of <unk> a game N N \n an of the \n" * 40,
    "ptb.valid.txt": " no it was n't N \n" * 5,
    "ptb.test.txt": " the game \n" * 6,
    "enwik8": f"<mediawiki>\n{PAGE * 40}",
    "text8": " anarchism originated as a term of abuse" * 40,
}


def text(member: str) -> bytes:
    """Returns the content of a member of a miniature."""
    name = member.rpartition("/")[2]
    if name.startswith("news"):  # a blank line in each shard of lm1b
        end = "" if name.endswith("00099-of-00100") else "\n"
        return f"the {name} of and café\n\ngame the 東京 9 N{end}".encode()
    return TEXTS[name].encode()[: -1 if name == "enwik8" else None]


def splits(corpus: str) -> dict[str, bytes]:
    """Returns the bytes that the builder must store."""
    real = CORPORA[corpus]
    if real.bounds:
        whole = text(corpus)
        edges = (0, *_bounds(corpus), len(whole))
        pieces = (whole[start:stop] for start, stop in pairwise(edges))
        return dict(zip(SPLITS, pieces, strict=True))
    members = [member for archive in real.archives for member in archive.members]
    return {
        name: b"".join(text(m.path) for m in members if name in m.splits)
        for name in SPLITS
    }


def _bounds(corpus: str) -> tuple[int, int]:
    total = len(text(corpus))
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
        contents = {m.path: text(m.path) for m in archive.members}
        if not archive.packed:
            files |= contents
        elif corpus == "lm1b":
            # As in the real one: more held-out shards, and the first not in order.
            first = next(name for name in contents if "heldout" in name)
            for shard in range(1, 4):
                name = first.replace("00000-of", f"{shard:05}-of")
                contents[name] = text(name)
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
        data = text(real.path)
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
