"""Token files are exact, appear whole or not at all, and are refused when damaged."""

import contextlib
import errno
import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from filelock import FileLock

from tests.data import miniatures
from tests.support.buckets import Bucket, bucket
from tests.support.refusal import quiet, refused
from txl_jax.data import corpora
from txl_jax.data import vocab as vocabulary
from txl_jax.data.options import SPLITS, DataConfig
from txl_jax.data.tokens import Tokens, prepare, statistics
from txl_jax.data.word import Lines, WordVocab
from txl_jax.errors import UserError

assert bucket  # the fixture

ROOT = Path(__file__).parents[2]
LINES = b"".join(b"%d bottles of beer on the wall\n" % n for n in range(40_000))

RUN = """
import os, sys
from txl_jax.data import tokens
path, data_dir = sys.argv[1:]
config = tokens.DataConfig(corpus="text", path=path, data_dir=data_dir)
"""


def start(code: str, *args: str | Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-W", "error", "-c", RUN + code, *map(str, args)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A text of 1.2 MB: two blocks of TFDS, cut 90/5/5."""
    path = tmp_path_factory.mktemp("text") / "beer.txt"
    path.write_bytes(LINES)
    return path


@pytest.fixture(scope="module")
def prepared(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data_dir in which `text` is prepared."""
    data_dir = tmp_path_factory.mktemp("prepared")
    prepare(DataConfig("text", str(text), str(data_dir)), quiet)
    return data_dir


@pytest.fixture
def config(text: Path, prepared: Path, tmp_path: Path) -> DataConfig:
    """The config of `text`, prepared in a folder that a test may damage."""
    shutil.copytree(prepared / "txl_jax", tmp_path / "txl_jax")
    return DataConfig("text", str(text), str(tmp_path))


def joined(made: Tokens) -> bytes:
    return b"".join(made.split(name).tobytes() for name in SPLITS)


def test_stdlib_tokens_are_the_files(tmp_path: Path) -> None:
    output: list[str] = []
    made = prepare(DataConfig(data_dir=str(tmp_path)), output.append)
    source = corpora.find("stdlib")
    assert made.folder.parent == tmp_path / "txl_jax" / source.config / "1.0.0"
    assert made.folder.name.startswith("byte-")
    assert made.manifest["corpus"] == "stdlib"
    assert made.manifest["edition"] == source.edition
    assert (made.manifest["vocab"], made.manifest["dtype"]) == ("byte", "uint8")
    for split, pieces in source.unpack(tmp_path / "scratch", quiet).items():
        expected = b"".join(piece.path.read_bytes() for piece in pieces)
        array = made.split(split)
        assert isinstance(array, np.memmap) and not array.flags.writeable
        assert array.dtype == np.uint8 and array.tobytes() == expected
        entry = made.manifest["splits"][split]
        assert entry["tokens"] == entry["bytes"] == len(expected)
        assert entry["sha256"] == hashlib.sha256(expected).hexdigest()
    assert len(output) == 2 and "preparing" in output[0] and "tokens in" in output[1]
    again = prepare(DataConfig(data_dir=str(tmp_path)), output.append)
    assert again.manifest == made.manifest and len(output) == 2


def test_default_data_dir_is_that_of_tfds(
    text: Path, prepared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TFDS_DATA_DIR", str(prepared))
    made = prepare(DataConfig("text", str(text)))
    assert joined(made) == LINES
    monkeypatch.delenv("TFDS_DATA_DIR")
    monkeypatch.setenv("HOME", str(prepared))
    (prepared / "tensorflow_datasets").symlink_to(prepared)
    assert prepare(DataConfig("text", str(text))).manifest == made.manifest


def test_changed_text_is_prepared_again(tmp_path: Path) -> None:
    path = tmp_path / "text"
    path.write_bytes(LINES[:1000])
    config = DataConfig("text", str(path), str(tmp_path))
    first = prepare(config, quiet)
    path.write_bytes(b"other\n" + LINES[:1000])
    second = prepare(config, quiet)
    assert first.folder != second.folder
    assert second.split("train")[:6].tobytes() == b"other\n"


def test_reuse_does_not_import_tfds(
    text: Path, prepared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr("txl_jax.data.builder", raising=False)
    monkeypatch.setitem(sys.modules, "txl_jax.data.builder", None)
    assert joined(prepare(DataConfig("text", str(text), str(prepared)))) == LINES


def test_two_processes_prepare_the_same(text: Path, tmp_path: Path) -> None:
    code = """
print(tokens.prepare(config).manifest)
assert "tensorflow" not in sys.modules
"""
    both = [start(code, text, tmp_path) for _ in range(2)]
    outputs = [process.communicate() for process in both]
    assert [process.returncode for process in both] == [0, 0], outputs
    assert outputs[0][0] == outputs[1][0] != ""
    lines = [line for _, error in outputs for line in error.splitlines()]
    assert all(line.startswith("data: ") for line in lines)
    # Only one of them prepared it, whether or not the other had to wait.
    assert sum(line.startswith("data: preparing") for line in lines) == 1


def test_waiting_for_the_lock_is_reported(
    text: Path, tmp_path: Path, prepared: Path
) -> None:
    config = DataConfig("text", str(text), str(tmp_path))
    name = corpora.find("text", str(text)).config
    lock = FileLock(tmp_path / "txl_jax" / f"{name}.lock")
    (tmp_path / "txl_jax").mkdir()
    lock.acquire()
    output: list[str] = []

    def say(line: str) -> None:
        # The other process finishes its work while this one waits.
        output.append(line)
        shutil.copytree(prepared / "txl_jax" / name, tmp_path / "txl_jax" / name)
        lock.release()

    assert len(prepare(config, say).split("train")) > 0
    assert output == [f"data: waiting for another process that prepares {name}"]


class Killed(BaseException):
    """Ends a preparation, as a signal would."""


def kill(*_: Any) -> None:
    raise Killed


def test_preparation_killed_while_tfds_writes(text: Path, tmp_path: Path) -> None:
    code = """
from txl_jax.data import byte_ranges
blocks = byte_ranges.blocks
def kill(pieces, size):
    for number, block in enumerate(blocks(pieces, size)):
        yield block if number == 0 else os._exit(9)
byte_ranges.blocks = kill
tokens.prepare(config)
"""
    process = start(code, text, tmp_path)
    process.communicate()
    assert process.returncode == 9
    check_recovery(DataConfig("text", str(text), str(tmp_path)))


@pytest.mark.parametrize(
    "vocab, moment",
    [
        ("byte", "txl_jax.data.vocab.CharVocab.stream"),
        ("word", "txl_jax.data.word.WordVocab.stream"),
        ("byte", "os.fsync"),
    ],
)
def test_preparation_killed_while_tokens_are_written(
    vocab: str, moment: str, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = DataConfig("text", str(text), str(tmp_path), vocab)
    with monkeypatch.context() as patch, contextlib.suppress(Killed):
        patch.setattr(moment, kill)
        prepare(config, quiet)
    check_recovery(config)


def check_recovery(config: DataConfig) -> None:
    """Checks that a killed preparation leaves nothing complete and can be repeated."""
    data_dir = Path(config.data_dir)
    assert list(data_dir.rglob("*incomplete*"))
    folders = {path.parent for path in data_dir.rglob("manifest.json")}
    assert all(folder.suffix == ".incomplete" for folder in folders)
    made = prepare(config, quiet)
    assert not list(data_dir.rglob("*incomplete*"))
    text = "".join(made.vocab.decode(made.split(name)) for name in SPLITS)
    assert text.encode() == LINES


def truncate(folder: Path) -> None:
    os.truncate(folder / "valid.bin", 10)


def remove(folder: Path) -> None:
    (folder / "test.bin").unlink()


def garble(folder: Path) -> None:
    (folder / "manifest.json").write_text("{")


def empty(folder: Path) -> None:
    (folder / "manifest.json").write_text("[]")


def forget(folder: Path) -> None:
    manifest = json.loads((folder / "manifest.json").read_text())
    del manifest["splits"]["test"]
    (folder / "manifest.json").write_text(json.dumps(manifest))


@pytest.mark.parametrize("damage", [truncate, remove, garble, empty, forget])
def test_damaged_tokens_are_refused(
    config: DataConfig, damage: Callable[[Path], None]
) -> None:
    folder = prepare(config).folder
    damage(folder)
    with refused(f"{folder}.*delete the folder and prepare again"):
        prepare(config)
    shutil.rmtree(folder)
    assert prepare(config, quiet).split("valid").size > 10


def test_a_flipped_bit_in_a_split_is_refused(config: DataConfig) -> None:
    """The file has its size; the other splits are good."""
    tokens = prepare(config)
    assert tokens.split("valid").size > 10
    path = tokens.folder / "valid.bin"
    content = bytearray(path.read_bytes())
    content[7] ^= 1
    path.write_bytes(content)
    with refused(f"{path.name} has changed since it was"):
        tokens.split("valid")
    assert tokens.split("test").size > 10


def test_tokens_without_a_manifest_are_made_again(config: DataConfig) -> None:
    (prepare(config).folder / "manifest.json").unlink()
    assert prepare(config, quiet).manifest["corpus"] == "text"


def test_impossible_configs_are_refused(config: DataConfig, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("in the way")
    cases = {
        DataConfig(corpus="txt"): "data.corpus='txt' is unknown .did you mean 'text'",
        DataConfig(data_dir=str(file)): "cannot write .*file.* set data.data_dir",
        DataConfig(data_dir="/proc/nope"): "cannot write /proc/nope",
    }
    for bad, message in cases.items():
        with refused(message):
            prepare(bad)
    with refused("data.vocab = 'bite' must be one of .* .did you mean 'byte'"):
        DataConfig(vocab="bite")
    with refused("'tests' is unknown .did you mean 'test'"):
        prepare(config).split("tests")


def write_text(
    folder: Path, train: str, valid: str = "a b\n", test: str = "a\n"
) -> str:
    folder.mkdir(exist_ok=True)
    for name, text in (("train", train), ("valid", valid), ("test", test)):
        (folder / f"{name}.txt").write_text(text, "utf-8")
    return str(folder)


def words_of(made: Tokens, split: str) -> list[str]:
    assert isinstance(made.vocab, WordVocab)
    return [made.vocab.words[token] for token in made.split(split)]


def test_wikitext2_is_as_published(tmp_path: Path) -> None:
    real = Path(os.environ.get("TXL_JAX_TEST_DATA", "no-such-folder")) / "wikitext2"
    if not real.is_dir():
        pytest.skip("TXL_JAX_TEST_DATA names no folder with the real files")
    folder = tmp_path / "downloads" / "manual" / "wikitext-2"
    folder.parent.mkdir(parents=True)
    folder.symlink_to(real.absolute())
    made = prepare(DataConfig("wikitext2", data_dir=str(tmp_path)), quiet)
    counts = statistics(made)
    tokens = [counts["splits"][split]["tokens"] for split in SPLITS]
    assert tokens == [2_088_628, 217_646, 245_569]
    kinds = counts["types"], counts["dtype"], counts["vocab"]
    assert kinds == (33_278, "uint16", "word")
    for split in SPLITS:
        # Every line ends, so the published word count is words and lines.
        assert made.denominators(split)["words"] == len(made.split(split))
        raw = (folder / f"wiki.{split}.tokens").read_text("utf-8")
        lines = [" ".join(line.split()) for line in raw.split("\n")]
        assert made.vocab.decode(made.split(split)) == "\n".join(lines)
        assert len(raw.encode()) == counts["splits"][split]["bytes"]


def transcribe(
    data: dict[str, bytes], counted: tuple[str, ...], lower: bool
) -> tuple[list[str], dict[str, list[str]]]:
    """Returns vocabulary and words of splits, as the original code makes them."""
    texts = {split: raw.decode() for split, raw in data.items()}
    if lower:
        texts = {split: text.lower() for split, text in texts.items()}
    counts: dict[str, int] = {}
    for split in counted:
        for word in texts[split].split():
            counts[word] = counts.get(word, 0) + 1
    words = ["<eos>", *sorted(counts, key=lambda word: -counts[word])]
    known = set(words)
    result = {}
    for split, text in texts.items():
        lines = text.removesuffix("\n").split("\n")
        flat = [word for line in lines for word in (*line.split(), "<eos>")]
        result[split] = [word if word in known else "<unk>" for word in flat]
    return words, result


@pytest.mark.parametrize("name", ["wikitext103", "wikitext2", "ptb"])
def test_words_of_published_corpora(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    corpus = miniatures.install(name, tmp_path, monkeypatch)
    made = prepare(DataConfig(name, data_dir=str(tmp_path)), quiet)
    words, expected = transcribe(
        miniatures.splits(name), corpus.vocab_splits, corpus.lower
    )
    assert isinstance(made.vocab, WordVocab) and made.vocab.words == words
    for split in SPLITS:
        assert words_of(made, split) == expected[split]
        unknown = expected[split].count("<unk>")
        assert made.manifest["splits"][split]["unknowns"] == unknown


@pytest.mark.parametrize("convention", ["", "newlines_deleted", "newlines_kept"])
def test_both_conventions_of_enwik8(
    convention: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    miniatures.install("enwik8", tmp_path, monkeypatch)
    config = DataConfig("enwik8", data_dir=str(tmp_path), convention=convention)
    made = prepare(config, quiet)
    data = miniatures.splits("enwik8")
    if convention != "newlines_kept":
        data = {split: raw.replace(b"\n", b"") for split, raw in data.items()}
    types = len(set(b"".join(data.values())))
    assert len(made.vocab) == made.manifest["types"] == types
    for split, raw in data.items():
        assert made.vocab.decode(made.split(split)) == raw.decode(errors="replace")
        counts = made.denominators(split)
        assert counts["tokens"] == counts["bytes"] == len(raw)
        assert counts["original_bytes"] == len(miniatures.splits("enwik8")[split])
    byte = prepare(DataConfig("enwik8", "", str(tmp_path), "byte", convention), quiet)
    assert byte.split("test").tobytes() == data["test"]


def test_text8_is_as_it_stands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    miniatures.install("text8", tmp_path, monkeypatch)
    made = prepare(DataConfig("text8", data_dir=str(tmp_path)), quiet)
    for split, raw in miniatures.splits("text8").items():
        assert made.vocab.decode(made.split(split)) == raw.decode()
    assert len(made.vocab) <= 27


@pytest.mark.parametrize("published", [False, True])
def test_both_conventions_of_lm1b(
    published: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    miniatures.install("lm1b", tmp_path, monkeypatch)
    types = tmp_path / "downloads" / "manual" / "1b_word_vocab.txt"
    types.unlink(missing_ok=True)
    if published:
        types.write_bytes(miniatures.types())
    folders = set()
    for convention, first, last in (("", "<S>", "<S>"), ("words", "", "</S>")):
        config = DataConfig("lm1b", data_dir=str(tmp_path), convention=convention)
        made = prepare(config, quiet)
        folders.add(made.folder)
        assert isinstance(made.vocab, WordVocab)
        if published:
            lines = miniatures.types().decode().splitlines()
            # The list has <S> twice, and the original code takes one of them.
            assert made.vocab.words == [
                *dict.fromkeys(line.split()[0] for line in lines)
            ]
        for split, raw in miniatures.splits("lm1b").items():
            expected: list[str] = []
            for line in raw.decode().removesuffix("\n").split("\n"):
                expected += [*first.split(), *line.split(), last]
            known = set(made.vocab.words)
            expected = [word if word in known else "<UNK>" for word in expected]
            assert words_of(made, split) == expected
    assert len(folders) == 2


def test_given_vocabulary_encodes_another_corpus(tmp_path: Path) -> None:
    path = write_text(tmp_path / "text", "a b c\n")
    given = tmp_path / "words.txt"
    given.write_text("<eos>\nb\n<unk>\na\n")
    config = DataConfig("text", path, str(tmp_path), vocab_path=str(given))
    made = prepare(config, quiet)
    assert made.split("train").tolist() == [3, 1, 2, 0]
    assert made.manifest["splits"]["train"]["unknowns"] == 1
    # Its own marks stay, also where the corpus would have others.
    marked = WordVocab(["</S>", "a", "b", "c"], Lines("</S>"))
    vocabulary.save(marked, tmp_path / "vocab.json")
    config = DataConfig(
        "text", path, str(tmp_path), vocab_path=str(tmp_path / "vocab.json")
    )
    own = prepare(config, quiet)
    assert own.split("train").tolist() == [1, 2, 3, 0]
    assert own.manifest["convention"] == "words"
    assert own.folder != made.folder
    given.write_text("<eos>\nb\na\n")
    with refused("word 'c' is not in the vocabulary"):
        prepare(DataConfig("text", path, str(tmp_path), vocab_path=str(given)), quiet)


def test_subwords_are_learned_and_lose_nothing(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers", reason="needs the extra subword")
    path = write_text(
        tmp_path / "text", "the café of the sea\n\n" * 50, "the odd ünï\n"
    )
    config = DataConfig("text", path, str(tmp_path), "subword", vocab_size=280)
    made = prepare(config, quiet)
    assert made.vocab.decode(made.split("valid")) == "the odd ünï\n"
    assert made.denominators("valid")["words"] == 4
    assert prepare(config, quiet).manifest == made.manifest


def test_vocabulary_that_cannot_work_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("enwik8", "lm1b"):
        miniatures.install(name, tmp_path, monkeypatch)
    path = write_text(tmp_path / "text", "a b c\n")
    words = tmp_path / "words.txt"
    words.write_text("<eos>\na\n")
    given = str(words)
    cases: dict[str, dict[str, Any]] = {
        "one of tensorflow, words .did you mean 'words'": dict(
            corpus="lm1b", convention="word"
        ),
        "'newlines_kept' is for data.vocab='byte' or 'char', not 'word'": dict(
            corpus="enwik8", vocab="word", convention="newlines_kept"
        ),
        "data.convention = 'words' must be one of lines": dict(
            vocab="word", convention="words"
        ),
        "min_count=2 is not used with data.vocab='char'": dict(
            vocab="char", min_count=2
        ),
        "lower_case=True is not used with": dict(vocab="byte", lower_case=True),
        "vocab_size=100 is too small for subwords": dict(
            vocab="subword", vocab_size=100
        ),
        "determines the words": dict(vocab_path=given, min_count=2),
        "is a vocabulary of kind 'word', not data.vocab='char'": dict(
            vocab_path=given, vocab="char"
        ),
        "cannot be read": dict(vocab_path=str(tmp_path / "missing.json")),
    }
    for message, fields in cases.items():
        with refused(message):
            fields = {"corpus": "text", "data_dir": str(tmp_path)} | fields
            fields |= {"path": path} if fields["corpus"] == "text" else {}
            prepare(DataConfig(**fields), quiet)
    with refused("data.vocab_size = -1 must be at least 0"):
        DataConfig(vocab_size=-1)


def test_text_that_cannot_work_is_refused(tmp_path: Path) -> None:
    bad = tmp_path / "bad"
    path = write_text(bad, "a b\n")
    (bad / "valid.txt").write_bytes(b"na\xefve\n")
    for kind in ("word", "char"):
        config = DataConfig("text", path, str(tmp_path), kind)
        with refused("the valid split of corpus 'text' is not UTF-8 at byte 2"):
            prepare(config, quiet)
    (bad / "valid.txt").write_bytes(b"\xff" * 9)
    assert (
        len(prepare(DataConfig("text", path, str(tmp_path)), quiet).split("valid")) == 9
    )
    path = write_text(tmp_path / "few", "a b\n", test="\n\n")
    made = prepare(DataConfig("text", path, str(tmp_path), "word"), quiet)
    assert made.split("test").tolist() == [0, 0]
    # Two bytes, so the corpus takes it; one token, so nothing could be scored.
    path = write_text(tmp_path / "one", "a b\n", test=" \n")
    with refused("the test split .* has 1 tokens and needs"):
        prepare(DataConfig("text", path, str(tmp_path), "word"), quiet)


@pytest.mark.parametrize("kind", ["byte", "word"])
def test_full_disk_is_one_line(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    real = Path.open

    def fill(self: Path, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        if mode == "wb" and self.suffix == ".bin":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self))
        return real(self, mode, *args, **kwargs)

    config = DataConfig("text", str(text), str(tmp_path), kind)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", fill)
        with refused(r"\(No space left on device\): make room"):
            prepare(config, quiet)
    assert not list(tmp_path.rglob("manifest.json"))
    assert len(prepare(config, quiet).split("test")) > 2


def test_read_only_folder_that_is_prepared_is_used(
    text: Path, prepared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise PermissionError(13, "Read-only file system")

    # A mode would not stop the tests when they run as root.
    monkeypatch.setattr(Path, "mkdir", refuse)
    assert len(prepare(DataConfig("text", str(text), str(prepared))).split("test")) > 9
    with refused("Read-only file system.*set data.data_dir"):
        prepare(DataConfig("text", str(text), str(prepared / "other")), quiet)


def test_progress_is_reported(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("txl_jax.report.progress.EVERY_SECONDS", 0.0)
    output: list[str] = []
    prepare(DataConfig("text", str(text), str(tmp_path), "word"), output.append)
    assert any("counting train " in line for line in output)


def test_bucket_is_copied_once_per_host(
    bucket: type[Bucket],
    text: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = DataConfig("text", str(text), "gs://bucket/data", "word")
    output: list[str] = []
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "first"))
    made = prepare(config, output.append)
    assert any(
        line.endswith(f"gs://bucket/data/txl_jax/{inside(made)}") for line in output
    )
    stored = [name for name in bucket.store if name.endswith((".bin", ".json"))]
    assert len(stored) == 5
    # Another host takes it from there, without the corpus's blocks.
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "second"))
    output.clear()
    again = prepare(config, output.append)
    assert len(output) == 1 and "copying gs://bucket/data/" in output[0]
    assert again.manifest == made.manifest and again.folder != made.folder
    assert (again.split("train") == made.split("train")).all()
    assert prepare(config, output.append).manifest == made.manifest and len(output) == 1
    # What was damaged on the way is refused, and leaves nothing complete.
    (name,) = [name for name in stored if name.endswith("valid.bin")]
    file = bucket.store[name]
    data = file.getvalue()
    file.seek(0)
    file.write(bytes([data[0] ^ 1]))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "third"))
    with refused(r"valid\.bin has SHA-256"):
        prepare(config, quiet)
    assert not list((tmp_path / "third").rglob("manifest.json"))


def inside(made: Tokens) -> str:
    return "/".join(made.folder.parts[-3:])


def test_bucket_that_cannot_be_reached_is_refused(
    bucket: type[Bucket],
    text: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise RuntimeError("Anonymous caller\nand a trace")

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    config = DataConfig("text", str(text), "gs://bucket")
    with monkeypatch.context() as patch:
        patch.setattr(Bucket, "_open", refuse)
        with pytest.raises(UserError, match=r"cannot write gs://bucket/.*caller\)"):
            prepare(config, quiet)
    # What this host made is kept, and goes to the bucket the next time.
    output: list[str] = []
    prepare(config, output.append)
    assert len(output) == 1 and output[0].startswith("data: copying /")
    with monkeypatch.context() as patch:
        patch.setattr(Bucket, "exists", refuse)
        with refused("cannot reach.*install gcsfs"):
            prepare(config, quiet)
