"""Made-up miniatures of the published corpora, with their archives' layout and quirks.

A miniature has its archive's name, member names and kinds of line (blank ones, " \\n",
a missing last line end, non-ASCII, byte 10) in a few KB.
"""

import hashlib
import io
import tarfile
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from txl_jax.data import catalog
from txl_jax.data.catalog import Archive, Corpus, Member
from txl_jax.data.options import SPLITS

# The real catalog; `install` replaces an entry.
REAL = dict(catalog.CORPORA)
NAMES = ("enwik8", "text8", "wikitext103", "wikitext2", "shakespeare", "lm1b", "ptb")

LINE = " the of the 東京 @-@ café <unk> N N 9 the of game naïve \n"
ARTICLE = f" = Title = \n \n{LINE} \n = = Part = = \n\n{LINE}{LINE} \n"
PAGE = """  <page>
    <title>the of</title>
      <text xml:space="preserve">'''café'''


* [[Zürich]] &quot;東	&quot;</text>
  </page>
"""
# Contents by member name. WikiText's valid has no last line end, and held-out splits
# have words that training never sees. The cut of enwik8 splits a character.
TEXTS = {
    "wiki.train.tokens": f" \n{ARTICLE * 20} \n",
    "wiki.valid.tokens": f" \n{ARTICLE * 3} validword heldout",
    "wiki.test.tokens": f" \n{ARTICLE * 2} \n testword heldout testword \n",
    "ptb.train.txt": " the n of <unk> a game N N \n an of the \n" * 40,
    "ptb.valid.txt": " no it was n't N \n" * 5,
    "ptb.test.txt": " the game \n" * 6,
    "enwik8": f"<mediawiki>\n{PAGE * 40}"[:-1],
    "text8": " anarchism originated as a term of abuse" * 40,
    "input.txt": "First Citizen:\nBefore we proceed any further.\n\n" * 20,
}
# The vocabulary file of lm1b: a word and its count on each line, `<S>` twice.
TYPES = "</S> 900\n<S> 900\n<UNK> 40\n<S> 0\nthe 900\nof 899\nand 898\n"
TYPES += "café 897\n東京 896\nN 895\n9 894\n"


def text(member: str) -> bytes:
    """Returns the content of a member of a miniature."""
    name = member.rpartition("/")[2]
    if name.startswith("news"):  # a blank line in each shard of lm1b
        end = "" if name.endswith("00099-of-00100") else "\n"
        return f"the {name} of and café\n\ngame the 東京 9 N{end}".encode()
    return TEXTS[name].encode()


def splits(corpus: str) -> dict[str, bytes]:
    """Returns the bytes that the builder must store."""
    real = REAL[corpus]
    if real.bounds:
        whole, (valid, test) = text(real.archives[0].members[0].path), _bounds(corpus)
        end = test if test > valid else len(whole)
        return {"train": whole[:valid], "valid": whole[valid:end], "test": whole[test:]}
    members = [member for archive in real.archives for member in archive.members]
    return {
        name: b"".join(text(m.path) for m in members if name in m.splits)
        for name in SPLITS
    }


def _bounds(corpus: str) -> tuple[int, int]:
    """Returns the starts of valid and test, which coincide if a member is held out."""
    real = REAL[corpus]
    total = len(text(real.archives[0].members[0].path))
    return total * 90 // 100, total * (95 if len(real.bounds) == 2 else 90) // 100


def pack(archive: Archive) -> bytes:
    """Returns the file that a host offers, with an entry that is not a member."""
    contents = {member.path: text(member.path) for member in archive.members}
    if not archive.packed:
        return contents[archive.name]
    folder = archive.members[0].path.rpartition("/")[0]
    contents[f"{folder}/README".removeprefix("/")] = b"no text"
    stream = io.BytesIO()
    if archive.name.endswith(".zip"):
        with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as zipped:
            if folder:
                zipped.mkdir(folder)
            for name, content in contents.items():
                zipped.writestr(name, content)
        return stream.getvalue()
    with tarfile.open(fileobj=stream, mode="w:gz") as packed:
        # As in the real archive, not in the order of the members.
        for name, content in reversed(contents.items()):
            info = tarfile.TarInfo(f"./{name}")
            info.size = len(content)
            packed.addfile(info, io.BytesIO(content))
    return stream.getvalue()


def install(corpus: str, data_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Corpus:
    """Puts a miniature in the manual folder and its entry in the catalog.

    The entry has the miniature's own checksums and sizes; no host offers it.
    """
    folder = data_dir / "downloads" / "manual"
    folder.mkdir(parents=True, exist_ok=True)

    def member(real: Member, data: bytes) -> Member:
        return replace(real, digest=real.digest and hashlib.sha256(data).hexdigest())

    def archive(real: Archive) -> Archive:
        data = pack(real)
        (folder / real.name).write_bytes(data)
        members = tuple(member(each, text(each.path)) for each in real.members)
        sha256 = hashlib.sha256(data).hexdigest()
        return replace(real, urls=(), sha256=sha256, size=len(data), members=members)

    entry = REAL[corpus]
    entry = replace(entry, archives=tuple(map(archive, entry.archives)))
    if entry.bounds:
        entry = replace(entry, bounds=tuple(sorted({*_bounds(corpus)})))
    if entry.types.path:
        (folder / entry.types.path).write_text(TYPES, "utf-8")
        entry = replace(entry, types=member(entry.types, TYPES.encode()))
    monkeypatch.setitem(catalog.CORPORA, corpus, entry)
    return entry
