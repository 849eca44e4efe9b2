"""The model in the package: its size, its documentation and its nll of a text."""

import os
import re
from pathlib import Path

import numpy as np
import pytest

import txl_jax
from tests.support.refusal import refused
from tests.support.trained import command
from txl_jax.convert.release import read_release
from txl_jax.data.byte_ranges import checksum
from txl_jax.workdir import release_file
from txl_jax.workdir.release_file import packaged
from txl_jax.workdir.resolve import NO_TOKENS

CARD = (Path(__file__).parents[2] / "docs/models.md").read_text("utf-8")
LINES = """\
ROMEO:
What lady is that, which doth enrich the hand
Of yonder knight?
"""


def test_the_card_describes_the_file() -> None:
    path = packaged()["shakespeare"]
    found = read_release(path)
    assert path.stat().st_size < 2_000_000
    assert f"`{checksum(path)}`" in CARD
    assert f"revision `{found.origin['git_revision'][:7]}`" in CARD
    assert "+dirty" not in found.origin["git_revision"]
    assert f"{found.origin['parameters']:,} parameters" in CARD
    splits = found.origin["data"]["splits"]
    assert splits["valid"]["sha256"][:16] in re.findall(r"`(\w{16})`", CARD)


def test_it_has_learned_shakespeare(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    loaded = txl_jax.load("shakespeare")
    assert loaded.ids == NO_TOKENS
    assert loaded.params["layers"]["attention"]["q"].dtype == np.float32
    memory = txl_jax.Memory.empty(loaded.config.model, batch_size=1)
    tokens_T = loaded.vocab.encode(LINES)
    nll_BL, _ = loaded.model.apply(
        {"params": loaded.params},
        tokens_T[None, :-1],
        tokens_T[None, 1:],
        memory,
        method="nll",
    )
    assert np.mean(nll_BL) < 1.7  # bytes at random: 5.5
    sampled = command(
        "generate", "--model=shakespeare", "--num_tokens=40", "--mem_len=64"
    )
    assert re.match(r"ROMEO:\n[A-Z][a-z]+", sampled.result["text"])
    assert os.listdir() == [], "only the modes with pictures make a folder"


def test_a_package_in_a_zip_has_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(release_file, "PACKAGED", tmp_path / "txl.zip" / "packaged")
    with refused("there are none, because txl_jax is in a zip: install it"):
        release_file.find_model("shakespeare")


def test_a_folder_of_its_name_comes_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "shakespeare").mkdir()
    with pytest.raises(txl_jax.UserError, match="shakespeare holds no run"):
        txl_jax.load("shakespeare")
