"""Training in stages of other lengths (Press et al. 2021)."""

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support import tiny
from txl_jax import train as loop
from txl_jax.cli import run
from txl_jax.cli.run import stages, train_on
from txl_jax.config import Config
from txl_jax.errors import RETRY, Interrupted, UserError
from txl_jax.model.memory import Memory
from txl_jax.report.log import read_metrics
from txl_jax.runtime.preemption import Stop
from txl_jax.train import NO_HOOKS, Hooks
from txl_jax.update.options import TrainConfig

STAGES = "4:tgt_len=2,mem_len=0"
MORE = f"{STAGES};8:tgt_len=4,mem_len=2"
TEXT = np.random.default_rng(0).integers(0, tiny.V, 2000, dtype=np.uint16)


def config(stages: str) -> Config:
    """Returns a run of 10 updates, whose last stage has a memory of 4."""
    base = Config()
    sizes: dict[str, Any] = {"batch_size": 8, "tgt_len": 4, "num_steps": 10}
    train = TrainConfig(**sizes, eval_every=8, log_every=1, stages=stages)
    return dataclasses.replace(
        base,
        model=tiny.config(mem_len=4, dropout=0.1),
        train=train,
        optim=dataclasses.replace(base.optim, lr=1e-2, warmup_steps=4),
        eval=dataclasses.replace(base.eval, tgt_len=8, mem_len=4, streams=8),
        checkpoint=dataclasses.replace(base.checkpoint, every_steps=2),
    )


def losses(config: Config, workdir: Path, observers: Hooks = NO_HOOKS) -> list[Any]:
    """Trains, and returns the exact numbers of all updates."""
    train_on(config, workdir, TEXT, TEXT[:80], observers=observers)
    return [line["exact"] for line in read_metrics(workdir / "metrics.jsonl")]


@pytest.mark.long
def test_stages_of_the_same_lengths_change_no_number(tmp_path: Path) -> None:
    staged = losses(config("3:tgt_len=4;7:mem_len=4"), tmp_path / "staged")
    whole = losses(config(""), tmp_path / "whole")
    assert [line["loss"] for line in staged] == [line["loss"] for line in whole]


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], list[Any]]:
    """Returns the numbers of a run that is not interrupted."""
    return functools.cache(
        lambda stages: losses(config(stages), tmp_path_factory.mktemp("straight"))
    )


KILLS = [(MORE, k, False) for k in (3, 4, 5, 7, 9)]


@pytest.mark.long
@pytest.mark.parametrize(("stages", "step", "signalled"), [(STAGES, 7, True), *KILLS])
def test_a_run_resumes_in_every_stage(
    tmp_path: Path,
    straight: Callable[[str], list[Any]],
    monkeypatch: pytest.MonkeyPatch,
    stages: str,
    step: int,
    signalled: bool,
) -> None:
    """It ends before the update after `step`, with checkpoints of all even updates.

    After a signal it makes that update, whose validation is left to the resumed run.
    """
    stop = Stop()

    def end(before: int, _: Any) -> None:
        if before == step and signalled:
            stop.status = RETRY
        elif before == step:
            raise KeyboardInterrupt

    ended = tmp_path / "ended"
    with monkeypatch.context() as patch:
        patch.setattr(loop, "stop", stop)
        with pytest.raises((KeyboardInterrupt, Interrupted)):
            losses(config(stages), ended, Hooks(before=[end]))
    resumed = losses(config(stages), ended)
    assert resumed == straight(stages)
    assert [line["tokens"] for line in resumed] == [16] * 4 + [32] * 6


def test_a_resumed_run_skips_stages_and_keeps_failed_saves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The newest checkpoint, which the first stage reads, is in the last one."""
    trained: list[int] = []

    def train_stage(stage: Config, *_: Any) -> dict[str, Any]:
        trained.append(stage.train.num_steps)
        return {"updates": max(9, trained[-1]), "failed_saves": trained[-1:]}

    monkeypatch.setattr(run, "train", train_stage)
    result = train_on(config(MORE), Path(), TEXT, TEXT)
    assert (trained, result) == ([4, 10], {"updates": 10, "failed_saves": [4, 10]})


def test_stages_have_their_own_lengths() -> None:
    lengths = [
        (stage.train.num_steps, stage.train.tgt_len, stage.model.mem_len)
        for stage in stages(config(MORE))
    ]
    assert lengths == [(4, 2, 0), (8, 4, 2), (10, 4, 4)]


@pytest.mark.parametrize("M", [0, 2, 5, 8])
def test_a_memory_is_cut_or_grows_by_invisible_slots(M: int) -> None:
    params, tokens_BT = tiny.make_params(), tiny.make_tokens(3, 4)
    full = tiny.config(mem_len=5)
    _, memory = tiny.read(full, params, tokens_BT, 2)
    other = dataclasses.replace(full, mem_len=M)
    _, expected = tiny.read(other, params, tokens_BT, 2)
    resized = memory.resize(M)
    np.testing.assert_array_equal(resized.filled_B, expected.filled_B)
    np.testing.assert_array_equal(resized.h_NBMD[0, :, -M:], expected.h_NBMD[0, :, -M:])
    assert isinstance(resized, Memory) and resized.mem_len == M


@pytest.mark.parametrize(
    "stages",
    ["6", "6:tgt_len", "6:length=3", "6:tgt_len=0", "6:mem_len=-1", "a:tgt_len=2"]
    + ["6:tgt_len=2;6:tgt_len=3", "10:tgt_len=2", "0:tgt_len=2"]
    + ["6:mem_len=1,mem_len=2"],
)
def test_impossible_stages_are_refused(stages: str) -> None:
    with pytest.raises(UserError, match=r"train\.stages"):
        config(stages)
