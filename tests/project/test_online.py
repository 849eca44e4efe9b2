"""A file that is learned while it is read: every byte is scored before it is learned.

Dims: T bytes, V values of a byte.
"""

import json
from pathlib import Path

import numpy as np
import pytest

from experiments.figures import online, online_step
from tests.project.conftest import Start
from tests.support import tiny
from txl_jax.update.options import OptimConfig

# Calls of 3 segments of 4 bytes.
OPTIONS = online_step.Options(
    model=tiny.CONFIG,
    optim=OptimConfig(lr=0.05, schedule="constant", clip=0.5),
    tgt_len=4,
    streams=3,
    average_decay=0.8,
    jump=0.3,
    cache_len=6,
    segments_per_call=3,
)
TEXT_T = np.tile(tiny.make_tokens(1, 9)[0].astype(np.uint8), 8)[:65]


def learn(bytes_T: np.ndarray, folder: Path) -> np.ndarray:
    nll, _ = online.learn(OPTIONS, bytes_T, 1, folder)
    return nll


def test_a_byte_is_scored_once_by_a_distribution_of_earlier_bytes(
    tmp_path: Path,
) -> None:
    scores, place = [], 25  # a call's first byte
    for value in range(tiny.V):
        changed_T = TEXT_T.copy()
        changed_T[place] = value
        scores.append(learn(changed_T, tmp_path))
    nll_VT = np.stack(scores)
    assert nll_VT.shape[1] == len(TEXT_T) - 1
    # nll_VT[:, t] belongs to byte t + 1.
    np.testing.assert_array_equal(
        nll_VT[:, : place - 1], nll_VT[:1, : place - 1].repeat(tiny.V, 0)
    )
    assert np.exp(-nll_VT[:, place - 1]).sum() == pytest.approx(1, abs=1e-4)
    later_VT = nll_VT[:, place:]
    assert all(len(set(column)) > 1 for column in later_VT.T), "later bytes learn"


class Killed(Exception):
    """Ends a run after it has saved its state."""


def test_a_run_resumes_with_the_same_numbers(
    start: Start,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(online, "OPTIONS", OPTIONS)
    whole = learn(TEXT_T, tmp_path)
    text, workdir = tmp_path / "text", tmp_path / "runs"
    text.write_bytes(TEXT_T.tobytes() + b"more")
    save = online.save

    def save_and_end(
        file: Path, saved: tuple[online_step.State, np.ndarray, float]
    ) -> None:
        save(file, saved)
        if len(saved[1]) == 24:
            raise Killed

    monkeypatch.setattr(online, "SAVE_SECONDS", 0)
    monkeypatch.setattr(online, "save", save_and_end)
    flags = f"--path={text} --bytes={len(TEXT_T)} --workdir={workdir}"
    with pytest.raises(Killed):
        start("figures.online", flags)
    monkeypatch.setattr(online, "save", save)
    assert start("figures.online", flags) == 0
    result = json.loads(capsys.readouterr().out)
    bits = 8 + whole.astype(np.float64).sum() / np.log(2)
    assert result["bits_per_byte"] == pytest.approx(bits / len(TEXT_T), rel=1e-12)
    assert result["bits_per_byte"] < 2.5 < np.log2(tiny.V), "a period of 9 bytes"
