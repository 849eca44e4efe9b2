"""Wrong flags, configs, meshes and prompts, and damaged, missing or forbidden files.

Each error is one line that names the field or file and the fix, with status 2, and no
file is changed. `tests/test_config.py` has the errors in the config alone.
"""

import codecs
import contextlib
import dataclasses
import gzip
import json
import os
import shlex
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import pytest

from tests.convert.test_huggingface import folder_of
from tests.convert.test_pickle import RECORDED
from tests.support import tiny, trained
from tests.support.refusal import contents
from tests.support.rights import public_folder, without_rights
from tests.support.trained import TEXT, command, home
from txl_jax import config as configs
from txl_jax.checkpoint import manifest
from txl_jax.data.tokens import prepare
from txl_jax.workdir.release_file import packaged

pytestmark = pytest.mark.promise("User errors are one line")
FIXTURES = (home,)

# Changes of files.

Change = Callable[[Path], object]


def edit(old: str, new: str) -> Change:
    return lambda path: path.write_text(path.read_text().replace(old, new))


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-9])


def update(change: Callable[[Any], object]) -> Change:
    """Returns a change of a JSON object."""

    def write(path: Path) -> None:
        state = json.loads(path.read_text())
        change(state)
        path.write_text(json.dumps(state))

    return write


def each(change: Change, names: str) -> Change:
    """Returns the change of all files below a folder that the glob names."""
    return lambda folder: [change(path) for path in list(folder.glob(names))]


def without_position(path: Path) -> None:
    """Rewrites a checkpoint's manifest as an import's."""
    checkpoint = path.parents[1]
    saved = manifest.read_manifest(checkpoint, int(checkpoint.name))
    manifest.write_manifest(checkpoint, dataclasses.replace(saved, position=None))


WRITTEN: dict[str, str | bytes] = {
    "latin.txt": "café au lait\n".encode("latin-1") * 200,
    "cut.txt.gz": gzip.compress(TEXT.encode())[:-20],
    **{f"splits/{name}.txt": TEXT for name in ("train", "valid", "test", "more")},
    "words.txt": "one two\nthree\n",
    "line.txt": "one two three " * 99,
    "marked.txt": "<eos>\none\n",
    "many.txt": "\n".join(["<eos>", *map(str, range(300))]),
    "nothing.txt": "",
}
# Copies of a folder with one changed file: the folder, the file and the change.
COPIES: dict[str, tuple[str, str, Change]] = {
    "tokens_gone": ("data", "valid.bin", Path.unlink),
    "config_cut": ("run", "config.json", cut),
    "layers": ("run", "config.json", update(lambda x: x["model"].update(n_layer=3))),
    "run_other": ("run", "run.json", edit('"sha256": "', '"sha256": "0')),
    "words_flipped": ("run", "vocab.json", edit('"byte"', '"char"')),
    "manifests": ("run", "checkpoints", each(cut, "*/record/metadata")),
    "arrays": ("run", "checkpoints", each(cut, "60/params/**/manifest.ocdbt")),
    "checkpoints_gone": ("run", "checkpoints", shutil.rmtree),
    "disk_gone": ("run", "checkpoints", each(shutil.rmtree, "*")),
    "no_heads": ("run", "config.json", update(lambda x: x["model"].pop("n_head"))),
    "imported": (
        *("run", "checkpoints"),
        each(without_position, "*/record/metadata"),
    ),
    "no_words": ("model", "vocab.txt", Path.unlink),
}

# A command, a part of its error, and the path that it may not use, if any. The first
# word of a command stands for flags:
#   config FILE    --config=FILE --workdir=new            new F=V ..  --config.F=V in it
#   run FOLDER     --workdir=FOLDER                       MODE ..     --mode=MODE there
#   import FORMAT SOURCE   to the workdir `new`           txl ..      nothing
ERRORS = """
txl                                       | give --config=FILE, the --workdir of a
txl --mode=evalute --workdir={run}        | did you mean 'evaluate'
txl --config=quickstart --bach_size=3      | did you mean '--config.train.batch_size'
txl --config=quickstrat                   | did you mean 'quickstart'
txl --config={tiny} --workdir={text}/x    | Not a directory
txl attention --model={packaged} --workdir={text} | text.txt' is no folder: give one
txl --config={tiny} --workdir={long}      | File name too long
txl --config={tiny} --workdir={home}/[a]  | has one of [ * ? in its path
txl --config={tiny} --workdir={run} --config.model.n_layer=3 | model.n_layer was 2, is
config none.py                            | no config file
evaluate run --prompt=x                   | unknown flag '--prompt'
evaluate run --streams=2 --config.eval.streams=3 | --streams=2 and --config.eval
config tiny.py --config.optim.lr=1 --config.optim.lr=1 | set one option: leave one out
evaluate run --workdir=run                | --workdir=run set one option
evaluate run --config.eval.warm_start --warm_start | and --warm_start set one option
config tiny.py --config.model.n_layer     | n_layer

new model.vocab_size=99                   | model.vocab_size = 99
new model.cutoffs=9,300                   | below the vocabulary's 256
new model.kernel=tpu                      | use model.kernel "xla" or "chunked"
new model.kernel=cudnn                    | needs an NVIDIA GPU
new model.kernel=chunked train.batch_chunk=2 | batch_size / batch_chunk
new train.batch_size=12                   | is not divisible by mesh.data x mesh.fsdp
new train.batch_size=80000                 | decrease train.batch_size
new eval.streams=12                       | eval.streams = 12
new eval.streams=1000000000               | eval.streams = 1000000000 must be from 1 to
new eval.tgt_len=1000000000               | eval.tgt_len = 1000000000 must be from 1 to
new train.batch_size=1000000000           | train.batch_size = 1000000000 must be from
new train.tgt_len=1000000000              | train.tgt_len = 1000000000 must be from 1 to
evaluate run --sweep=mem_len=0,1000000000 | eval.mem_len = 1000000000 must be from 0 to
new train.order=sentences data.path={home}/line.txt | set it to "stream"
new train.reset_memory_at=300             | train.reset_memory_at: '300' is 3 tokens
new mesh.data=16                          | does not fit 8 devices; set mesh.data=-1
new mesh.model=8                          | make it a multiple of 8, or lower mesh.model

new data.vocab=char generate.prompt=😀    | generate.prompt: character '😀' is not
new generate.prompt=                      | has no token: give at least one
new generate.prompt=@{home}/nowhere       | nowhere' does not exist

new data.convention=lined                 | data.convention = 'lined' must be
new data.vocab_size=99                    | is not used with data.vocab='byte'
new data.vocab=subword                    | must be at least 256 for subwords
new data.vocab=word data.convention=text    | 'text' must be one of lines
new data.vocab_path={home}/marked.txt data.vocab_size=2 | is not used with
new data.vocab_path={home}/marked.txt data.vocab=char | do not fit a vocabulary
new data.dtype=int32                      | is for data.corpus='tokens'
new data.vocab=number                     | do not fit a vocabulary of kind
new data.corpus=txt                       | did you mean 'text'
new data.path=                            | does not exist or has no files
new data.path={home}/words.txt            | too small
new data.path={home}/latin.txt data.vocab=char | convert it to UTF-8, or set
new data.path={home}/cut.txt.gz           | if .gz is the wrong suffix
score run --path={home}/nothing.txt       | has no token after another
score run --path={text} --config.data.dtype=int8 | is for numbers: leave it out
new data.path={home}/splits               | no split: more.txt): give train, valid
new data.corpus=enwik8                    | leave it empty, or set data.corpus='text'
new data.corpus=tfds:nothing data.path=   | or set data.data_dir to its folder
new data.vocab_path={home}/words.txt      | lacks '<eos>', which marks each line: add it
new data.vocab_path={home}/marked.txt     | is not in the vocabulary
new data.data_dir={text}                  | set data.data_dir
new data.data_dir=s3x://b                 | no other store is supported
new data.data_dir={home}/tokens_gone      | delete it and prepare again

run nowhere                               | holds no run
run config_cut                            | cannot read {home}/config_cut/config.json:
run layers                                | give the config of the run that
evaluate layers                           | give the config of the run that
run run_other                             | another version of corpus 'text'
run checkpoints_gone                      | was at update 60, and
txl --config={tiny} --workdir={home}/disk_gone | has no checkpoint: mount its disk
run run --config.train.num_steps=30       | is already at update 60: raise train.num_ste
run no_heads                              | lacks model.n_head, which is 2 in run.json
evaluate no_heads                         | lacks model.n_head, which is 2 in run.json
txl --config={tiny} --workdir={home}/no_heads | lacks model.n_head, which is 2
new train.init_from={home}/no_heads       | lacks model.n_head, which is 2 in run.json
evaluate run_other                        | was trained on another version of corpus
attention run_other                       | was trained on another version of corpus
generate run_other --context_tokens=4     | was trained on another version of corpus
recl run --workdirs={run},{home}/run_other | run_other: the model was trained on another

txl evaluate --workdir={run}/checkpoints | checkpoints: give the workdir that contains
txl evaluate --workdir={run}/checkpoints/60 | is a checkpoint of a run: give the workdir
evaluate model                            | is a model of Hugging Face: make a workdir
evaluate {packaged}                       | is a model in one file: give it as --model
new train.init_from={packaged}            | is a model in one file: give it as --model
txl --config={tiny} --workdir={home}/model | is a model of Hugging Face: make a
txl --config={tiny} --workdir={text}      | text.txt' is no folder: give one, which
txl evaluate --model={run}                | is the workdir of a run: give it
txl evaluate --model={home}/model/model.safetensors | is a model of Hugging Face: make
txl evaluate --model={long}               | no packaged model and no file; there are
import nvidia run                         | run is the workdir of a run: give it
import pytorch {packaged} {mem_len}       | is a model in one file: give it as --model
import pytorch {home}/pipe {mem_len}      | is a pipe or a device
score run --output={long}                 | File name too long
evaluate words_flipped                    | vocab.json is not a vocabulary
run manifests                             | restore one from a backup, or
evaluate manifests                        | is damaged (its manifest
evaluate arrays --checkpoint=60           | checkpoint 60 is damaged (item params
evaluate checkpoints_gone                 | train there first, or give the
run imported                              | {home}/imported holds an imported mo
recl run                                  | give two or more as --workdirs=RUN,RUN
new train.init_from={run} model.n_layer=3 | model.n_layer is 2 there, 3 here

evaluate run --config.model.d_inner=64    | model.d_inner was 32
evaluate run --config.data.vocab=char     | another vocabulary than the corpus: set
evaluate run --config.train.seed=2        | no effect in the mode evaluate
attention run --config.eval.streams=16    | train, evaluate, import, compile, table
evaluate run --checkpoint=5               | give best, latest
evaluate run --streams=8000               | too few for 8000 streams
evaluate run --sweep=mem_len=0,8 --ext_len=4 --mem_len=0 | eval.ext_len = 4 with eval.m
generate run --output={home}/no/where     | cannot use {home}/no/where (No such file
generate run --prompt=@{text} --output={text} | is a text to read: choose another

txl --mode=import --format=nvidia --workdir={home}/new | give --source
import huggingfase model                  | did you mean 'huggingface'
txl import --format=huggingface --source=model --workdir={run} | is not an empty fo
import huggingface model --config.train.seed=3 | trained with another value
import huggingface model --dtype=float16   | no effect in the mode import
import huggingface model --config.model.n_layer=9 | was trained with another value
import huggingface model --config.data.vocab_path={home}/many.txt | 301 words, the model
import huggingface run                    | neither model.safetensors
import huggingface no_words               | give one with --config.data.vocab_path
import pytorch {paper}                    | give --config.model.mem_len
import pytorch {module} {mem_len} --config.model.cutoffs=9,8 | (9, 8)
import tensorflow model {mem_len}         | {home}/model
export run --format=txl_jax               | --target='' exists or is a folder
export run --format=pytorch --target=x    | must be one of txl_jax
export run --format=txl_jax --target={run} | run' exists or is a folder
export run --format=txl_jax --target={text}/x | cannot use {text}

config tiny.py                      | Permission denied): give another --workdir | .
config tiny.py                      | PermissionError            | tiny.py
evaluate run                        | {home}/run/config.json     | run/config.json
evaluate run --checkpoint=60        | cannot read | run/checkpoints/60/record/metadata
new data.path={home}/words.txt      | make it readable           | words.txt
new data.path={home}/many.txt       | to a writable folder       | data/txl_jax
import huggingface model            | new (Permission denied)    | .

txl --config=~/tiny.py --workdir=~/text.txt | text.txt' is no folder: give one
txl evaluate --model=~/run                | is the workdir of a run: give it
new train.init_from=~/nowhere             | {home}/nowhere holds no run
new data.data_dir=~/text.txt              | set data.data_dir
new data.path=~/words.txt                 | too small
new data.vocab_path=~/words.txt           | lacks '<eos>', which marks each line: add it
new generate.prompt=@~/nothing.txt        | has no token: give at least one
score run --path={text} --output={home}/no/x.npz | cannot use {home}/no/x.npz (No such
score run --path={text} --output={home}/pipe.npz | pipe.npz (not a regular file
score run --path=~/nothing.txt            | has no token after another
score run --output=~/no/where             | cannot use {home}/no/where (No such file
export run --format=txl_jax --target=~/run | run' exists or is a folder
txl import --format=nvidia --source=~/run --workdir=~/new | run is the workdir of a run
recl run --workdirs={run},~/run_other     | run_other: the model was trained on another

txl --config=~no.one/tiny.py              | --config='~no.one/tiny.py': no such user
txl --config={tiny} --workdir=~no.one/x   | --workdir='~no.one/x': no such user
txl evaluate --model=~no.one/x            | --model='~no.one/x': no such user
new train.init_from=~no.one/x             | train.init_from = '~no.one/x': --workdir=
new data.data_dir=~no.one/x               | data.data_dir='~no.one/x': no such user
new data.path=~no.one/x                   | data.path='~no.one/x': no such user
new data.vocab_path=~no.one/x             | data.vocab_path='~no.one/x': no such user
new generate.prompt=@~no.one/x            | generate.prompt='~no.one/x': no such user
score run --path=~no.one/x                | score.path='~no.one/x': no such user
score run --path={text} --output=~no.one/x | score.output='~no.one/x': no such user
generate run --output=~no.one/x           | generate.output='~no.one/x': no such user
export run --format=txl_jax --target=~no.one/x | --target='~no.one/x': no such user
txl import --format=nvidia --source=~no.one/x --workdir=~/new | '~no.one/x': no such use
recl run --workdirs={run},~no.one/x       | --workdir='~no.one/x': no such user
"""


def expand(home: Path, kind: str, *words: str) -> list[str]:
    """Returns the command line that a row of ERRORS stands for."""
    new = f"--workdir={home}/new"
    if kind == "txl":
        return [*words]
    if kind == "new":
        return [f"--config={home}/tiny.py", new, *(f"--config.{x}" for x in words)]
    if kind == "config":
        return [f"--config={home / words[0]}", new, *words[1:]]
    if kind == "import":
        flags = [f"--format={words[0]}", f"--source={home / words[1]}", new]
        return ["--mode=import", *flags, *words[2:]]
    mode = [] if kind == "run" else [f"--mode={kind}"]
    return [*mode, f"--workdir={home / words[0]}", *words[1:]]


class Inputs:
    """A folder with all files, and their states after the latest command."""

    def __init__(self, path: Path):
        self.path = path
        self.names = {
            "home": path,
            "run": path / "run",
            "tiny": path / "tiny.py",
            "text": path / "text.txt",
            "long": "x" * 300,  # no file system has such a name
            "mem_len": "--config.model.mem_len=2",
            "paper": RECORDED / "plain.zip.pt",
            "packaged": packaged()["shakespeare"],
            "module": RECORDED / "div_val_2_all_tied.module.zip.pt",
        }
        self.states = contents(path)

    def refuse(self, line: str, part: str) -> None:
        """Runs the command, which must fail with this error and change no file."""
        words = shlex.split(line.format(**self.names))
        done = command(*expand(self.path, *words))
        assert (done.status, done.out) == (2, "")
        error = tiny.complaint(done.err)
        assert len(error) < 900 and part.format(**self.names) in error
        before, self.states = self.states, contents(self.path)
        assert {path: self.states.get(path) for path in before} == before
        for path in self.states.keys() - before.keys():  # a prepared corpus may stay
            assert path.startswith(f"{self.path}/data/txl_jax/")
            assert "incomplete" not in path


@pytest.fixture(scope="module")
def inputs(home: trained.Home) -> Iterator[Inputs]:
    """Makes all files, in a folder that any user of the machine may read."""
    codecs.lookup("utf-8-sig")  # the user nobody could not import it later
    with public_folder() as path:
        skip = shutil.ignore_patterns("data")
        shutil.copytree(home.path, path, dirs_exist_ok=True, ignore=skip)
        files = {"path": "text.txt", "data_dir": "data"}
        places = {name: str(path / file) for name, file in files.items()}
        (path / "tiny.py").write_text(trained.EXPERIMENT.format(**places))
        config = configs.load(str(path / "tiny.py"))
        (path / "run" / "config.json").write_text(json.dumps(configs.to_json(config)))
        prepare(config.data)
        for name, content in WRITTEN.items():
            (path / name).parent.mkdir(exist_ok=True)
            data = content if isinstance(content, bytes) else content.encode()
            (path / name).write_bytes(data)
        for name in ("pipe", "pipe.npz"):
            os.mkfifo(path / name)
        (folder_of(path / "model") / "model.safetensors").chmod(0o644)
        for name, (source, file, change) in COPIES.items():
            shutil.copytree(path / source, path / name)
            (changed,) = (path / name).glob(f"{'**/' * (source == 'data')}{file}")
            change(changed)
        yield Inputs(path)


@pytest.mark.parametrize("row", [row for row in ERRORS.splitlines() if row])
def test_an_error_is_one_line_and_changes_nothing(
    inputs: Inputs, row: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    line, part, *forbidden = (cell.strip() for cell in row.split(" | "))
    monkeypatch.chdir(inputs.path)  # where runs/ would be made
    monkeypatch.setenv("HOME", str(inputs.path))
    with contextlib.ExitStack() as stack:
        if forbidden:
            stack.enter_context(without_rights(inputs.path / forbidden[0]))
        inputs.refuse(line, part)


def test_a_model_too_large_for_the_memory_is_reported_in_one_line(
    inputs: Inputs, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run_out(*_: Any) -> None:
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory\nmore")

    monkeypatch.setattr("txl_jax.cli.modes.load", run_out)
    inputs.refuse("evaluate run", "out of memory (RESOURCE_EXHAUSTED: Out of")
