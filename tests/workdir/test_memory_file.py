"""A memory in a file: reading goes on from it as if it had never stopped.

Dims: as in `txl_jax`; T tokens of a text.
"""

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import txl_jax
from tests.support import tiny
from tests.support.refusal import refused
from tests.support.trained import TEXT, Home, home
from txl_jax import config as configs
from txl_jax.data.vocab import CharVocab
from txl_jax.generate import GenerateConfig, stream
from txl_jax.model.memory.key_values import NewestKeyValues
from txl_jax.workdir.memory_file import open_bookmark

FIXTURES = (home,)
# 33 bytes: the segments of 8 inputs end before the last one, as if reading went on.
FIRST, SECOND = TEXT[:33], TEXT[33:70]
ONE = "--config.eval.segments_per_step=1"


def score(home: Home, text: str, *flags: str) -> Any:
    """Returns the nll of each byte of a text."""
    (home.path / "part.txt").write_text(text)
    output = home.path / "scores.jsonl"
    flags += (f"--path={home.path / 'part.txt'}", "--per=token", f"--output={output}")
    result = home.read("score", *flags, ONE).result
    lines = [json.loads(line)["nll"] for line in output.read_text().splitlines()]
    assert result["scored_tokens"] == sum(nll is not None for nll in lines)
    return np.array(lines, float)


def generate(home: Home, *flags: str) -> Any:
    """Returns a greedy sample."""
    return home.read("generate", "--temperature=0", "--mem_len=80", *flags).result


@pytest.fixture(scope="module")
def file(home: Home) -> Path:
    """Returns the memory after FIRST, as the mode score saves it."""
    path = home.path / "first.memory"
    score(home, FIRST, f"--save_memory={path}", "--config.eval.mem_len=80")
    return path


@pytest.mark.exact_bits
@pytest.mark.long
def test_scores_go_on_bit_for_bit_and_change_nothing(home: Home) -> None:
    """The memory of 8 tokens is shorter than the text."""
    file, end = (home.path / name for name in ("own.memory", "end.memory"))
    score(home, FIRST, f"--save_memory={file}")
    before, loaded = file.read_bytes(), txl_jax.load(home.run)
    whole = score(home, FIRST + SECOND, f"--save_memory={end}")
    for _ in range(2):
        rest = score(home, SECOND, f"--memory={file}", f"--save_memory={end}2")
        np.testing.assert_array_equal(rest, whole[len(FIRST) :])
        ends = (txl_jax.load_memory(path, loaded) for path in (end, f"{end}2"))
        tiny.assert_equal(*ends)
    assert file.read_bytes() == before
    assert not list(home.path.glob(".*.tmp"))


def test_samples_go_on(home: Home, file: Path, tmp_path: Path) -> None:
    """With a prompt, without one, and from the end of another sample."""
    whole = generate(home, f"--prompt={FIRST + SECOND}")
    own = f"--memory={file}"
    rest = generate(home, own, f"--prompt={SECOND}")
    assert FIRST + rest["text"] == whole["text"]
    own_nlls, nlls = (x["sampled"][0]["token_nlls"] for x in (rest, whole))
    tiny.assert_close(np.array(own_nlls), np.array(nlls))
    save = f"--save_memory={tmp_path}/all"
    first = generate(home, own, "--prompt=", "--num_tokens=7", "--samples=2", save)
    again = generate(home, f"--memory={tmp_path}/all", "--prompt=", "--samples=2")
    once = generate(home, own, "--prompt=", "--num_tokens=27")
    assert first["text"] + again["text"] == once["text"]
    done = home.read("generate", f"--memory={tmp_path}/all", "--samples=3")
    assert done.status == 2 and "is of 2 texts, which 3 samples" in done.err
    done = home.read("score", f"--memory={tmp_path}/all")
    assert done.status == 2 and "score.memory = " in done.err and "of one" in done.err


@pytest.mark.long
def test_a_split_goes_on_another_mesh(home: Home, tmp_path: Path) -> None:
    """Eight devices keep hidden states, which one device continues."""
    mesh = ("--config.mesh.data=1", "--config.mesh.segments=8")
    flags = ("--split=valid", "--streams=1", *mesh)
    whole = home.read("evaluate", *flags, "--max_tokens=80").result
    save = f"--save_memory={tmp_path}/memory"
    first = home.read("evaluate", *flags, "--max_tokens=32", save).result
    text = home.split("valid").read_bytes()[33:81].decode()
    memory = f"--memory={tmp_path}/memory"
    rest = score(home, text, memory)
    total = first["nll"] * 32 + rest.sum()
    assert whole["nll"] == pytest.approx(total / 80, rel=tiny.FLOAT32)
    again = home.read("evaluate", *flags, "--max_tokens=9", memory).result
    assert (again["tokens"], again["cold_tokens"]) == (9, 0)
    done = home.read("evaluate", "--streams=8", memory)
    assert done.status == 2 and "set eval.streams to 1" in done.err


@pytest.mark.long
def test_hidden_states_of_python_go_on(home: Home, file: Path, tmp_path: Path) -> None:
    """They return bit for bit, and continue as the keys and values of a file do."""
    loaded = txl_jax.load(home.run)
    tokens_BT = loaded.vocab.encode(FIRST)[None]
    model = dataclasses.replace(loaded.config.model, mem_len=80)
    _, memory = tiny.read(model, loaded.params, tokens_BT[:, :-1], 8)
    txl_jax.save_memory(tmp_path / "memory", loaded, memory, tokens_BT[:, -1])
    bookmark = txl_jax.load_memory(tmp_path / "memory", loaded)
    tiny.assert_equal(bookmark.memory, memory)
    of_command = txl_jax.load_memory(file, loaded)
    assert isinstance(of_command.memory, NewestKeyValues)
    prompt = loaded.vocab.encode(SECOND)
    config = GenerateConfig(num_tokens=4, temperature=0.0, mem_len=80)
    drawn = [
        next(stream(loaded.config.model, loaded.params, [prompt], config, before=each))
        for each in (bookmark, of_command)
    ]
    tiny.assert_close(drawn[0], drawn[1])


def test_a_file_of_something_else_is_refused(
    home: Home, file: Path, tmp_path: Path
) -> None:
    loaded = txl_jax.load(home.run)
    params = jax.tree.map(lambda x: x + 1e-6, loaded.params)
    config = configs.with_fields(loaded.config, "model", n_layer=3)
    others = {
        "set of parameters": loaded._replace(params=params),
        "vocabulary": loaded._replace(vocab=CharVocab("01")),
        "model": loaded._replace(config=config),
    }
    for name, other in others.items():
        with refused(f"{file} belongs to another {name} .of update .* give the model"):
            txl_jax.load_memory(file, other)
    data = bytearray(file.read_bytes())
    for at in (len(data) // 2, len(data) - 2, 40):
        bad = tmp_path / "bad"
        bad.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
        with refused(f"{bad} is damaged or truncated|has format"):
            txl_jax.load_memory(bad, loaded)
    bad.write_bytes(data[:-5])
    done = home.read("generate", f"--memory={bad}")
    assert done.status == 2 and "generate.memory: " in tiny.complaint(done.err)
    done = home.read("score", f"--save_memory={tmp_path}/none/x")
    assert done.status == 2 and "in a folder that exists" in tiny.complaint(done.err)


@pytest.mark.parametrize("kind", [tiny.COMPRESSED, tiny.TOKENS])
def test_a_memory_that_is_not_saved_is_refused_before_the_work(
    home: Home, kind: dict[str, Any]
) -> None:
    loaded = txl_jax.load(home.run)
    parts = ("segments_per_call", "segments_per_update", "gradient_segments")
    fields = dict.fromkeys(parts, 1 + ("memory_tokens" in kind))
    config = configs.with_fields(loaded.config, "train", **fields)
    config = configs.with_fields(config, "model", **kind)
    config = configs.with_fields(config, "score", save_memory="file")
    with refused("score: a memory with a store, compressed slots or memory tokens"):
        open_bookmark(loaded._replace(config=config), "score")
