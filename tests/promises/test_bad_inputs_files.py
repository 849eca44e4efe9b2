"""What can be wrong with the files that a user gives, has kept or may not touch.

Text, vocabularies, prepared tokens, workdirs, checkpoints, models of other code bases,
permissions: each is one clear line and changes nothing, as in `test_bad_inputs.py`.
"""

import gzip
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.convert.test_huggingface import VOCAB, folder_of
from tests.convert.test_pickle import RECORDED
from tests.promises.test_bad_inputs import (
    CONFIG,
    LONG,
    NEW,
    TEXT,
    make_home,
    mode,
    new,
    refuse,
)
from tests.support.rights import public_folder, without_rights
from txl_jax.report.checksum import verify_checksum, with_checksum

pytestmark = pytest.mark.promise("User errors are one line")

Change = Callable[[Path], object]


def write(text: str | bytes) -> Change:
    return lambda path: path.write_bytes(
        text if isinstance(text, bytes) else text.encode()
    )


def edit(old: str, new: str) -> Change:
    return lambda path: path.write_text(path.read_text().replace(old, new))


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-9])


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def deepen(path: Path) -> None:
    path.write_text("[" * 100_000)


def relayer(path: Path) -> None:
    """Gives the config another layer, and the checksum that goes with it."""
    state = verify_checksum(json.loads(path.read_text()), required=True)
    state["model"]["n_layer"] = 2
    path.write_text(json.dumps(with_checksum(state)))


def fields(**changes: object) -> Change:
    def change(path: Path) -> None:
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return change


def each(change: Change, names: str) -> Change:
    """Returns the change of all files below a folder that the glob names."""

    def change_each(folder: Path) -> None:
        for path in list(folder.glob(names)):
            change(path)

    return change_each


def empty(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.mkdir()


def replace(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.touch()


LETTERS = json.dumps(
    {"kind": "char", "of_bytes": False, "symbols": "".join(map(chr, range(32, 288)))}
)
WRITTEN: dict[str, str | bytes] = {
    "latin.txt": "café au lait\n".encode("latin-1") * 200,
    "cut.txt.gz": gzip.compress(TEXT.encode())[:-20],
    "fake.gz": "this is no gzip\n",
    **{f"splits/{name}.txt": TEXT for name in ("train", "valid", "test", "more")},
    "half.json": "{",
    "list.json": "[1]",
    "deep.json": "[" * 100_000,
    "tokenizer.json": '{"model": 3}',
    "sentences.model": b"\0\1",
    "words.txt": "one two\nthree\n",
    "marked.txt": "<eos>\none\n",
    "many.txt": "\n".join(["<eos>", *map(str, range(300))]),
    "nothing.txt": "",
    "hollow/.hidden": "",
}
# Copies of a folder, in each of which one file is changed: of what, which, how.
COPIES: dict[str, tuple[str, str, Change]] = {
    "tokens_cut": ("tokens", "train.bin", cut),
    "tokens_gone": ("tokens", "valid.bin", Path.unlink),
    "manifest_half": ("tokens", "manifest.json", write("{")),
    "manifest_empty": ("tokens", "manifest.json", write("{}")),
    "manifest_list": ("tokens", "manifest.json", write("[]")),
    "manifest_bytes": ("tokens", "manifest.json", write(b"\xff")),
    "manifest_deep": ("tokens", "manifest.json", deepen),
    "vocab_empty": ("tokens", "vocab.json", write("{}")),
    "vocab_number": ("tokens", "vocab.json", edit('"byte"', "7")),
    "config_unknown": ("run", "config.json", edit('"n_layer"', '"n_layers"')),
    "config_flipped": ("run", "config.json", edit('"keep": 2', '"keep": 3')),
    "config_list": ("run", "config.json", write("[]")),
    "config_bytes": ("run", "config.json", write(b"\xff\xfe")),
    "config_deep": ("run", "config.json", deepen),
    "config_layers": ("run", "config.json", relayer),
    "run_half": ("run", "run.json", cut),
    "run_list": ("run", "run.json", write("[]")),
    "words_half": ("run", "vocab.json", write("{")),
    "words_gone": ("run", "vocab.json", Path.unlink),
    "words_kind": ("run", "vocab.json", edit("byte", "bite")),
    "words_flipped": ("run", "vocab.json", edit('"byte"', '"char"')),
    "letters": ("run", "vocab.json", write(LETTERS)),
    "records": ("run", "checkpoints", each(cut, "*/record/metadata")),
    "record": ("run", "checkpoints", each(cut, "1/record/metadata")),
    "items_gone": ("run", "checkpoints", each(shutil.rmtree, "*/record")),
    "params_gone": ("run", "checkpoints", each(shutil.rmtree, "2/params")),
    "checkpoints_gone": ("run", "checkpoints", shutil.rmtree),
    "checkpoints_emptied": ("run", "checkpoints", empty),
    "checkpoints_file": ("run", "checkpoints", replace),
    "no_weights": ("model", "model.safetensors", Path.unlink),
    "weights_cut": ("model", "model.safetensors", cut),
    "no_config": ("model", "config.json", Path.unlink),
    "half_config": ("model", "config.json", write("{")),
    "list_config": ("model", "config.json", write("[]")),
    "gpt2": ("model", "config.json", fields(model_type="gpt2")),
    "other_size": ("model", "config.json", fields(d_model=64)),
    "words_for_number": ("model", "config.json", fields(mem_len="x")),
    "no_words": ("model", "vocab.txt", Path.unlink),
    "blank_words": ("model", "vocab.txt", write("\n")),
    "index_cut": ("tensorflow", "ckpt-0.index", cut),
    "numbers_flipped": ("tensorflow", "ckpt-0.data-00000-of-00001", flip),
    "numbers_gone": ("tensorflow", "ckpt-0.data-00000-of-00001", Path.unlink),
    "no_checkpoint": ("tensorflow", "ckpt-0.index", Path.unlink),
}
PAPER = RECORDED / "plain.zip.pt"


def text(name: str, *more: str) -> tuple[str, ...]:
    return new(f"data.path={{home}}/{name}", *more)


def words(name: str) -> tuple[str, ...]:
    return new(f"data.vocab_path={{home}}/{name}")


def corpus(name: str, *more: str) -> tuple[str, ...]:
    return new(f"data.corpus={name}", *more)


def data_dir(name: str) -> tuple[str, ...]:
    return new(f"data.data_dir={{home}}/{name}")


def train(name: str) -> tuple[str, ...]:
    return (f"--workdir={{home}}/{name}",)


def evaluate(name: str, *flags: str) -> tuple[str, ...]:
    return mode("evaluate", *flags, run=f"--workdir={{home}}/{name}")


MEM_LEN = "--config.model.mem_len=2"


def bring(form: str, source: object, *flags: str) -> tuple[str, ...]:
    source = source if isinstance(source, Path) else f"{{home}}/{source}"
    return ("--mode=import", f"--format={form}", f"--source={source}", NEW[1], *flags)


AGAIN = "delete the folder and prepare again"
TABLE: dict[str, tuple[tuple[str, ...], str]] = {
    # Texts
    "no UTF-8": (text("latin.txt", "data.vocab=char"), "convert it to UTF-8, or set"),
    "gzip that ends": (text("cut.txt.gz"), "cut.txt.gz as .gz"),
    "gzip by name": (text("fake.gz"), "it is damaged or has the wrong suffix"),
    "glob": (text("*.none"), "matches no file: correct the glob"),
    "folder of nothing": (text("hollow"), "is a folder without files: add some text"),
    "too many splits": (text("splits"), "leave only those three"),
    "name too long": (text(LONG), "File name too long"),
    "path of a corpus": (corpus("enwik8"), "leave it empty, or set data.corpus='text'"),
    "corpus misspelt": (corpus("wt103", "data.path="), "did you mean 'wikitext103'"),
    "TFDS's, unprepared": (
        corpus("tfds:nothing", "data.path="),
        "or set data.data_dir to where it is",
    ),
    "TFDS's, outside": (
        corpus("tfds:../x", "data.path="),
        "is not the name of a dataset: write",
    ),
    # Vocabularies
    "kind": (new("data.vocab=words"), "did you mean 'word'"),
    "convention": (new("data.convention=lined"), "data.convention = 'lined' must be"),
    "idle size": (new("data.vocab_size=99"), "is not used with data.vocab='byte'"),
    "few subwords": (new("data.vocab=subword"), "at least 256 (32000 is common)"),
    "words missing": (words("nowhere.txt"), "cannot be read (No such file"),
    "words of a folder": (words("hollow"), "cannot be read (Is a directory"),
    "half a vocabulary": (words("half.json"), "give a tokenizer.json, a Sentence"),
    "a list": (words("list.json"), "is not a vocabulary"),
    "too deep": (words("deep.json"), "is not a vocabulary"),
    "no tokenizer": (words("tokenizer.json"), "is not a tokenizer.json"),
    "no model": (words("sentences.model"), "is not a SentencePiece model"),
    "no marks": (words("words.txt"), "lacks '<eos>', which marks each line: add it"),
    "words in latin": (words("latin.txt"), "is not a vocabulary"),
    "unknown word": (words("marked.txt"), "is not in the vocabulary"),
    # Prepared tokens
    "data_dir is a file": (data_dir("text.txt"), "set data.data_dir"),
    "data_dir too long": (data_dir(LONG), "set data.data_dir"),
    "data_dir of no cloud": (
        new("data.data_dir=s3x://b"),
        "set data.data_dir to a loc",
    ),
    **{
        name: (data_dir(name), AGAIN)
        for name, (of, _, _) in COPIES.items()
        if of == "tokens"
    },
    # Workdirs
    **{
        f"{how.__name__} {name}": (how(name), "{home}/" + f"{name}/config.json: ")
        for how in (train, evaluate)
        for name in COPIES
        if name.startswith("config_") and name != "config_layers"
    },
    "layers": (train("config_layers"), "has another model or optimizer"),
    "layers to read": (evaluate("config_layers"), "give the config of the run that"),
    "half of run.json": (train("run_half"), "run.json is damaged"),
    "list as run.json": (train("run_list"), "from a backup, or delete it"),
    **{
        name: (evaluate(name), "vocab.json is not a vocabulary")
        for name in COPIES
        if name.startswith("words_") and COPIES[name][0] == "run"
    },
    "prompt of no letters": (
        mode("generate", "--prompt=😀", run="--workdir={home}/letters"),
        "generate.prompt: character '😀' is not in the vocabulary",
    ),
    # Checkpoints
    "records": (train("records"), "restore one from a backup, or"),
    "records to read": (evaluate("records"), "is damaged: restore one from a"),
    "one record": (evaluate("record", "--checkpoint=1"), "another step of 1, 2"),
    "no records": (train("items_gone"), "is damaged (no manifest"),
    "no parameters": (evaluate("params_gone"), "checkpoint 2 is damaged (item params"),
    "deleted": (train("checkpoints_gone"), "was trained to update 2, as metrics.jsonl"),
    "none to read": (evaluate("checkpoints_gone"), "train there first, or give the"),
    "emptied": (evaluate("checkpoints_emptied"), "no checkpoint in {home}"),
    "no folder": (
        train("checkpoints_file"),
        "checkpoints is not a folder: move it away",
    ),
    "begin with letters": (
        new("train.init_from={home}/letters"),
        "its vocabulary is not this run's: use it with data.vocab_path",
    ),
    "begin with damage": (new("train.init_from={home}/records"), "train.init_from = "),
    "begin with nothing": (
        new("train.init_from={home}/checkpoints_gone"),
        "no checkpoint in {home}/checkpoints_gone",
    ),
    "begin too long": (new(f"train.init_from={LONG}"), "cannot be used (File name"),
    # Models of other code bases
    "format": (bring("hugingface", "model"), "did you mean 'huggingface'"),
    "no format": (bring("", "model"), "--format = '' must be one of"),
    "no source": (("--mode=import", "--format=nvidia", NEW[1]), "give --source"),
    "source missing": (bring("nvidia", "nowhere"), "does not exist"),
    "source too long": (bring("nvidia", LONG), "does not exist"),
    "gpt2": (bring("huggingface", "gpt2"), "model_type = 'gpt2', not 'transfo-xl'"),
    **{
        name: (bring("huggingface", name), "{home}/" + name)
        for name, (of, _, _) in COPIES.items()
        if of == "model" and name != "gpt2"
    },
    "no such words": (
        bring("huggingface", "model", "--vocab={home}/nowhere"),
        "no vocabulary file",
    ),
    "too many words": (
        bring("huggingface", "model", "--vocab={home}/many.txt"),
        "has 301 words, the model only 37: give the model's own",
    ),
    "mem_len unsaid": (bring("pytorch", PAPER), "give --config.model.mem_len"),
    "weights of text": (
        bring("pytorch", "text.txt", MEM_LEN),
        "text.txt was not written by torch.save",
    ),
    "weights of nothing": (bring("pytorch", "nothing.txt", MEM_LEN), "nothing."),
    "not NVIDIA's": (bring("nvidia", PAPER), "no model_state"),
    **{
        name: (bring("tensorflow", name, MEM_LEN), "{home}/" + name)
        for name, (of, _, _) in COPIES.items()
        if of == "tensorflow"
    },
    "used": (
        (
            "--mode=import",
            "--format=huggingface",
            "--source={home}/model",
            train("run")[0],
        ),
        "is not an empty folder: give a new one",
    ),
    "import of a config": (("--mode=import", *NEW), "takes no --config"),
    "import to train": (
        bring("huggingface", "model", "--config.train.seed=3"),
        "is not trained in its workdir",
    ),
    "import of layers": (
        bring("huggingface", "model", "--config.model.n_layer=9"),
        "leave the model's sizes unchanged",
    ),
    "no target": (mode("export", "--format=huggingface"), "give --target"),
    "target used": (
        mode("export", "--format=huggingface", "--target={home}/run"),
        "--target='{home}/run' is not an empty folder",
    ),
    "target in a file": (
        mode("export", "--format=huggingface", "--target={home}/text.txt/x"),
        "give another folder",
    ),
}


@pytest.fixture(scope="module")
def home() -> Iterator[Path]:
    """Holds all of them, where any user of the machine may look."""
    with public_folder() as path:
        make_home(path)
        for name, content in WRITTEN.items():
            (path / name).parent.mkdir(exist_ok=True)
            write(content)(path / name)
        (folder_of(path / "model") / "model.safetensors").chmod(0o644)
        (path / "model" / "vocab.txt").write_text("\n".join(VOCAB.words))
        shutil.copytree(
            RECORDED.parent / "tensorflow_checkpoints" / "wt103", path / "tensorflow"
        )
        for name, (of, file, change) in COPIES.items():
            shutil.copytree(path / ("data" if of == "tokens" else of), path / name)
            (found,) = (
                (path / name).glob(f"**/{file}")
                if of == "tokens"
                else (path / name / file,)
            )
            change(found)
        yield path


@pytest.mark.parametrize("mistake", TABLE)
def test_a_mistake_is_one_line_and_changes_nothing(home: Path, mistake: str) -> None:
    refuse(home, *TABLE[mistake])


FORBIDDEN: dict[str, tuple[tuple[str, ...], str, str]] = {
    "to write the workdir": (NEW, ".", "Permission denied): give another --workdir"),
    "to read the config": ((CONFIG, NEW[1]), "tiny.py", "PermissionError"),
    "to read the run": (evaluate("run"), "run/config.json", "cannot read {home}/run/c"),
    "to read the words": (evaluate("run"), "run/vocab.json", "Permission denied"),
    "to read the record": (
        evaluate("run", "--checkpoint=2"),
        "run/checkpoints/2/record/metadata",
        "cannot read {home}/run/checkpoints/2/record/metadata",
    ),
    "to read the text": (text("words.txt"), "words.txt", "make it readable"),
    "to write the data": (text("many.txt"), "data/txl_jax", "to a writable folder"),
    "to write the lock": ((CONFIG, train("run")[0]), "run", "give another --workdir"),
    "to read the weights": (
        bring("huggingface", "model"),
        "model/model.safetensors",
        "cannot read {home}/model/model.safetensors: Permission denied",
    ),
    "to make the import": (bring("huggingface", "model"), ".", "give another folder"),
}


@pytest.mark.parametrize("right", FORBIDDEN)
def test_a_lack_of_rights_is_one_line_and_changes_nothing(
    home: Path, right: str
) -> None:
    argv, path, reason = FORBIDDEN[right]
    with without_rights(home / path):
        refuse(home, argv, reason)
