"""A run keeps the kernels that it measured."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support import tiny
from tests.support.refusal import refused
from txl_jax.config import Config
from txl_jax.evaluate.options import EvalConfig
from txl_jax.kernels.measure import Trial
from txl_jax.runtime import distributed
from txl_jax.train import Run
from txl_jax.update.options import TrainConfig
from txl_jax.workdir import kernel_choice
from txl_jax.workdir.folder import KERNELS_FILE
from txl_jax.workdir.kernel_choice import choose_kernels

CONFIG = Config(
    model=tiny.config(kernel="auto"),
    train=TrainConfig(batch_size=4, tgt_len=6, batch_chunk=2),
    eval=EvalConfig(streams=3, tgt_len=4, mem_len=9, segments_per_step=4),
)
TRIALS = {
    "training": {"xla": Trial(2.0), "chunked": Trial(1.0)},
    "evaluation": {"xla": Trial(2.0), "chunked": Trial(fault="o is off by 9%")},
}


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Returns the workloads that are measured, with the results of TRIALS."""
    calls: list[Any] = []

    def measure(workloads: Any) -> Any:
        calls.append(workloads)
        is_training = workloads["xla"].backward
        return TRIALS["training" if is_training else "evaluation"]

    monkeypatch.setattr(kernel_choice, "measure", measure)
    names = ["xla", "chunked"]
    monkeypatch.setattr(kernel_choice, "find_candidates", lambda *_: names)
    return calls


def names(config: Config, workdir: Path) -> list[str]:
    models, _ = choose_kernels(config, workdir, tiny.one_device())
    return [model.kernel for model in models]


def test_each_part_is_measured_once_in_a_run(
    tmp_path: Path, measured: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    models, rows = choose_kernels(CONFIG, tmp_path, tiny.one_device())
    assert [model.kernel for model in models] == ["chunked", "xla"]
    assert models[0] == dataclasses.replace(CONFIG.model, kernel="chunked")
    training, evaluation = measured
    assert {work.sizes[:4] for work in training.values()} == {(2, tiny.H, 6, 5)}
    # `xla` reads windows of whole segments, `chunked` all segments of a call.
    assert evaluation["xla"].sizes[:4] == (3, tiny.H, 8, 9)
    assert evaluation["chunked"].sizes[:4] == (3, tiny.H, 16, 9)
    line = "attention in training on 1 x cpu: chunked 1 ms, xla 2 ms (a layer, 1,000"
    said = capsys.readouterr().err
    assert line in said and "): chunked\n" in said
    assert "in evaluation on 1 x cpu: xla 2 ms, chunked o is off by 9% (" in said
    assert not [*tmp_path.iterdir()], "a plan writes nothing"

    (tmp_path / KERNELS_FILE).write_text(json.dumps(rows))
    assert names(CONFIG, tmp_path) == ["chunked", "xla"] and len(measured) == 2
    other = dataclasses.replace(CONFIG.eval, streams=2)
    assert names(dataclasses.replace(CONFIG, eval=other), tmp_path) and measured[2:]
    assert len(measured) == 3, "only another workload is measured again"


def test_a_named_kernel_is_taken(tmp_path: Path, measured: list[Any]) -> None:
    named = dataclasses.replace(CONFIG, model=tiny.config(kernel="chunked"))
    assert names(named, tmp_path) == ["chunked", "chunked"] and not measured


def test_a_run_writes_its_kernels(tmp_path: Path, measured: list[Any]) -> None:
    text = tiny.make_tokens(1, 200)[0]
    once = TrainConfig(batch_size=8, tgt_len=6, num_steps=1, eval_every=1)
    reading = dataclasses.replace(CONFIG.eval, streams=8)
    config = dataclasses.replace(CONFIG, train=once, eval=reading)
    for _ in range(2):
        Run(config, tmp_path, text, text[:40]).train()
        config = dataclasses.replace(
            config, train=dataclasses.replace(once, num_steps=2)
        )
    assert len(measured) == 2, "a resumed run keeps them"
    rows = json.loads((tmp_path / KERNELS_FILE).read_text())
    assert {key: row["kernel"] for key, row in rows.items()} == {
        "training on 8 x cpu": "chunked",
        "evaluation on 8 x cpu": "xla",
    }


def test_other_processes_take_the_choice_of_the_first(
    tmp_path: Path, measured: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[np.ndarray] = []

    def gather(indices: np.ndarray) -> np.ndarray:
        sent.append(indices)
        return np.stack([sent[0], indices])

    monkeypatch.setattr(distributed, "gather", gather)
    assert names(CONFIG, tmp_path) == ["chunked", "xla"]
    monkeypatch.setattr(distributed, "is_first", lambda: False)
    assert names(CONFIG, tmp_path) == ["chunked", "xla"] and len(measured) == 2
    assert sent[0].tolist() != sent[1].tolist()


def test_damage_is_reported(tmp_path: Path, measured: list[Any]) -> None:
    (tmp_path / KERNELS_FILE).write_text("{")
    with refused(KERNELS_FILE):
        names(CONFIG, tmp_path)
