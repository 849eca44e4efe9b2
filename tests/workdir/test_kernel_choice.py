"""A run keeps the kernels that it measured."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from tests.support import tiny
from tests.support.refusal import refused
from txl_jax.config import Config
from txl_jax.data.options import SLACK
from txl_jax.evaluate.options import EvalConfig
from txl_jax.kernels import xla
from txl_jax.kernels.dispatch import KERNELS
from txl_jax.kernels.measure import Trial, Workload, make_operands
from txl_jax.kernels.operands import Operands
from txl_jax.runtime import distributed
from txl_jax.sharding.mesh import make_mesh
from txl_jax.sharding.options import MeshConfig
from txl_jax.train import Run
from txl_jax.update.options import TrainConfig
from txl_jax.workdir import kernel_choice
from txl_jax.workdir.folder import KERNELS_FILE
from txl_jax.workdir.kernel_choice import (
    PARTS,
    choose_kernels,
    make_workload,
    make_workloads,
)

CONFIG = Config(
    model=tiny.config(kernel="auto"),
    train=TrainConfig(batch_size=4, tgt_len=6, batch_chunk=2),
    eval=EvalConfig(streams=3, tgt_len=4, mem_len=9, segments_per_step=4),
)
TRIALS: dict[str, dict[str, Trial]] = {
    "training": {"chunked": 1.0, "xla": 2.0},
    "evaluation": {"xla": 2.0, "chunked": "o is off by 9%"},
}


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Returns the workloads that are measured, with the results of TRIALS."""
    calls: list[Any] = []

    def measure(works: dict[str, Workload], options: Any) -> Any:
        is_training = works["xla"].layers > 0
        assert [*works] == ["xla", "chunked"]
        assert options == ({"recorded": True} if is_training else None)
        calls.append(works)
        return TRIALS["training" if is_training else "evaluation"]

    def find_candidates(device: Any, A: int, dtype: Any, dropout: bool) -> list[str]:
        assert (device.platform, A, dtype) == ("cpu", tiny.A, "float32")
        return ["xla", "chunked"] + ["cudnn"] * dropout

    monkeypatch.setattr(kernel_choice, "record_loops", lambda _: {"recorded": True})
    monkeypatch.setattr(kernel_choice, "measure", measure)
    monkeypatch.setattr(kernel_choice, "find_candidates", find_candidates)
    return calls


CHOSEN = {"training": "chunked", "evaluation": "xla"}


def chosen(config: Config, workdir: Path) -> dict[str, str]:
    return choose_kernels(config, workdir, tiny.one_device())


def test_each_part_is_measured_once_in_a_run(
    tmp_path: Path, measured: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    assert chosen(CONFIG, tmp_path) == CHOSEN
    training, evaluation = measured
    assert {work.sizes[:4] for work in training.values()} == {(2, tiny.H, 6, 5)}
    # `xla` reads windows of whole segments, `chunked` all segments of a call.
    assert evaluation["xla"].sizes[:4] == (3, tiny.H, 8, 9)
    assert evaluation["chunked"].sizes[:4] == (3, tiny.H, 16, 9)
    line = "attention in training on 1 x cpu: chunked 1 ms, xla 2 ms (a layer, 1,000"
    said = capsys.readouterr().err
    assert line in said and "): takes chunked\n" in said
    assert "in evaluation on 1 x cpu: xla 2 ms, chunked excluded (o is off" in said

    assert chosen(CONFIG, tmp_path) == CHOSEN and len(measured) == 2
    line = "attention in training on 1 x cpu, by kernels.json: chunked 1 ms, xla 2 ms"
    assert line in capsys.readouterr().err
    other = dataclasses.replace(CONFIG.eval, streams=2)
    assert chosen(dataclasses.replace(CONFIG, eval=other), tmp_path) == CHOSEN
    assert len(measured) == 3, "only another workload is measured again"


def test_a_named_kernel_is_taken(tmp_path: Path, measured: list[Any]) -> None:
    named = dataclasses.replace(CONFIG, model=tiny.config(kernel="chunked"))
    assert not chosen(named, tmp_path) and not measured


def test_a_run_takes_and_writes_its_kernels(
    tmp_path: Path, measured: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    traced: set[tuple[str, int]] = set()
    for name in ("xla", "chunked"):

        def count(operands: Operands, kernel: str = name) -> jax.Array:
            traced.add((kernel, operands.q_BLHA.shape[1]))
            return xla.rel_attention(operands)

        monkeypatch.setitem(KERNELS, name, count)
    text = tiny.make_tokens(1, 200)[0]
    once = TrainConfig(batch_size=8, tgt_len=6, num_steps=1, eval_every=1)
    reading = dataclasses.replace(CONFIG.eval, streams=8)
    config = dataclasses.replace(CONFIG, train=once, eval=reading)
    for _ in range(2):
        run = Run(config, tmp_path, text, text[:40])
        assert bool(measured) == any(tmp_path.iterdir()), "training measures"
        run.train()
        config = dataclasses.replace(
            config, train=dataclasses.replace(once, num_steps=2)
        )
    assert len(measured) == 2, "a resumed run keeps them"
    # Training, windows of evaluation, and the initialization of parameters.
    assert traced == {("chunked", 6), ("xla", 8), ("xla", 1)}
    rows = json.loads((tmp_path / KERNELS_FILE).read_text())
    assert [*rows.values()] == [*TRIALS.values()]
    for key, part, works in zip(rows, PARTS, measured, strict=True):
        assert key == f"{part} on 8 x cpu, jax {jax.__version__}: {works['xla']}"


def test_other_processes_take_the_choice_of_the_first(
    tmp_path: Path, measured: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[np.ndarray] = []

    def gather(values: np.ndarray) -> np.ndarray:
        if values.ndim == 0:  # whether there is an error
            return values[None]
        sent.append(values)
        return np.stack([sent[0], values])

    monkeypatch.setattr(distributed, "gather", gather)
    assert chosen(CONFIG, tmp_path) == CHOSEN
    monkeypatch.setattr(distributed, "is_first", lambda: False)
    assert chosen(CONFIG, tmp_path) == CHOSEN and len(measured) == 2
    assert sent[0].tolist() != sent[1].tolist()


@pytest.mark.parametrize("text", ["{", "[]"])
def test_damage_is_reported(tmp_path: Path, measured: list[Any], text: str) -> None:
    (tmp_path / KERNELS_FILE).write_text(text)
    with refused(KERNELS_FILE):
        chosen(CONFIG, tmp_path)


def test_unknown_kernels_are_measured_again(
    tmp_path: Path, measured: list[Any]
) -> None:
    chosen(CONFIG, tmp_path)
    text = (path := tmp_path / KERNELS_FILE).read_text()
    path.write_text(text.replace('"chunked": 1.0', '"gone": 1.0'))
    assert chosen(CONFIG, tmp_path) == CHOSEN
    assert len(measured) == 3 and path.read_text() == text


def test_trials_without_a_right_kernel_are_not_kept(
    tmp_path: Path, measured: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    faults: Any = {"xla": "MemoryError: ", "chunked": "MemoryError: "}
    for trials, kernel in ((faults, "xla"), (TRIALS["training"], "chunked")):
        monkeypatch.setitem(TRIALS, "training", trials)
        assert chosen(CONFIG, tmp_path)["training"] == kernel


def test_heads_that_do_not_divide_take_xla(measured: list[Any]) -> None:
    model = tiny.config(kernel="auto", n_head=3)
    works = make_workloads(
        "training",
        dataclasses.replace(CONFIG, model=model, train=TrainConfig(batch_size=8)),
        make_mesh(MeshConfig(data=4, model=2)),
    )
    assert [*works] == ["xla"]


@pytest.mark.parametrize("batch_chunk, kernel", [(1, "chunked"), (2, "xla")])
def test_chunks_that_do_not_divide_take_xla(
    tmp_path: Path, measured: list[Any], batch_chunk: int, kernel: str
) -> None:
    train = TrainConfig(batch_size=8, tgt_len=6, varlen=True, batch_chunk=batch_chunk)
    reading = dataclasses.replace(CONFIG.eval, streams=8)
    config = dataclasses.replace(CONFIG, train=train, eval=reading)
    mesh = make_mesh(MeshConfig())
    assert choose_kernels(config, tmp_path, mesh)["training"] == kernel
    assert mesh.size == 8
    # A single candidate is not measured.
    works = [x["xla"] for x in measured if x["xla"].layers]
    assert len(works) == (kernel != "xla")
    for work in works:
        assert work.sizes[2] == 6 + SLACK


@pytest.mark.parametrize(
    ("changes", "absent", "R"),
    [
        ({}, "bias_HR", 9),
        ({"clamp_len": 3}, "bias_HR", 4),
        ({"position": "alibi"}, "r_RHA u_HA w_HA", 9),
        ({"position": "shaw_biased", "n_position": 4}, "w_HA", 4),
        ({"position": "rotary", "d_head": 4}, "r_RHA u_HA w_HA bias_HR", 9),
    ],
    ids=str,
)
def test_a_workload_has_the_terms_of_the_scheme(
    changes: dict[str, Any], absent: str, R: int
) -> None:
    one = tiny.one_device()
    config = dataclasses.replace(
        CONFIG,
        model=tiny.config(dropatt=0.1, **changes),
        train=TrainConfig(
            batch_size=3,
            tgt_len=2,
            gradient_segments=2,
            segments_per_update=2,
            segments_per_call=2,
        ),
    )
    work = make_workload("training", config, one)
    A = config.model.d_head
    assert work.sizes == (3, tiny.H, 4, 5, A, R)
    assert work.absent == tuple(absent.split())
    assert (work.segment_len, work.dropout, work.layers) == (2, 0.1, tiny.N)
    assert make_operands(work).k_BKHA.shape == (3, 9, tiny.H, A)
    reading = make_workload("evaluation", config, one)
    assert (reading.segment_len, reading.dropout, reading.layers) == (4, 0.0, 0)
    model = dataclasses.replace(config.model, remat_policy="full")
    config = dataclasses.replace(config, model=model)
    assert make_workload("training", config, one).layers == 1
