"""A run's numbers do not depend on the mesh, and its checkpoints move between meshes.

Dropout is on: its masks depend on global indices.
"""

import dataclasses
import functools
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from tests.support import tiny
from txl_jax.checkpoint import save_restore
from txl_jax.config import Config
from txl_jax.data.streams import OFF, Position
from txl_jax.evaluate.options import EvalConfig
from txl_jax.evaluate.perplexity import make_evaluate
from txl_jax.model.config import ModelConfig
from txl_jax.sharding.mesh import make_mesh
from txl_jax.sharding.options import MeshConfig
from txl_jax.sharding.rules import host_rows, place_segments
from txl_jax.train import make_streams
from txl_jax.update import optim
from txl_jax.update.options import OptimConfig, TrainConfig
from txl_jax.update.state import TrainState, abstract_segments
from txl_jax.update.step import make_updater
from txl_jax.workdir.resolve import TokenIds

pytestmark = pytest.mark.promise("The mesh does not change the numbers")

UPDATES = 5
TEXT = np.frombuffer(b"0123456789" * 200, "u1") - 48
# Every size is divisible by eight, so that any axis may have all devices.
MODEL = ModelConfig(
    vocab_size=16,
    n_layer=2,
    d_model=16,
    n_head=8,
    d_head=4,
    d_inner=16,
    mem_len=6,
    dropout=0.2,
    dropatt=0.2,
)
# Adam would turn the rounding of a gradient near 0 into a whole step; SGD does not.
CONFIG = Config(
    model=MODEL,
    train=TrainConfig(batch_size=8, tgt_len=6, num_steps=10, eval_every=10),
    optim=OptimConfig(optimizer="sgd", schedule="constant", lr=0.5),
)


def changed(**sections: dict[str, Any]) -> Config:
    """Returns CONFIG with changes in some sections, for documents in segments."""
    sections["train"] = {"reset_memory_at": "3", **sections.get("train", {})}
    return dataclasses.replace(
        CONFIG,
        **{
            name: dataclasses.replace(getattr(CONFIG, name), **fields)
            for name, fields in sections.items()
        },
    )


VARIANTS = changed(
    model={"d_inner": 24, "position": "rotary", **tiny.MODERN, **tiny.GATED},
    optim={"optimizer": "muon", "lr": 0.01, "weight_decay": 0.01},
)
# Gradients pass through the memory, and the streams are computed in two parts.
COUNTS = ("segments_per_call", "segments_per_update", "gradient_segments")
GROUPED = changed(train={**dict.fromkeys(COUNTS, 4), "batch_chunk": 2})
FAST = changed(model={"mem_len": 3, "fast_weights": True})
MESHES = [
    (data, fsdp, 8 // data // fsdp)
    for data in (1, 2, 4, 8)
    for fsdp in (1, 2, 4, 8)
    if data * fsdp <= 8 and (data, fsdp) != (2, 2)
]


class Run:
    """The updates of a config on a mesh over the first devices."""

    def __init__(self, sizes: tuple[int, ...], config: Config = CONFIG):
        devices = jax.devices()[: int(np.prod(sizes))]
        self.mesh = make_mesh(MeshConfig(*sizes), devices)
        with pytest.MonkeyPatch.context() as patch:
            if config is VARIANTS:
                # Muon, and its Adam, would turn the rounding of a gradient near 0 into
                # a whole step.
                patch.setattr(optim, "EPSILON", 1e-3)
            self.init, self.like, jitted = make_updater(
                config.model, config.train, config.optim, self.mesh
            )
        quick = jax.config.values["jax_disable_most_optimizations"]
        options: Any = {} if quick else tiny.OPTIMIZED
        rows = host_rows(self.mesh, config.train.batch_size, "train.batch_size")
        ids = TokenIds(int(config.train.reset_memory_at or OFF))
        self.streams = make_streams(config, TEXT, rows, ids)
        self.S = config.train.segments_per_call
        segments = abstract_segments(
            self.mesh, self.S, config.train.batch_size, config.train.tgt_len
        )
        self.step = jitted.lower(self.like, segments).compile(options)

    def train(
        self, state: TrainState, position: Position, updates: int
    ) -> tuple[TrainState, Position, list[float]]:
        """Makes updates; returns the state, the position and the losses."""
        losses = []
        for _ in range(updates):
            segments, position = self.streams.batch(position, self.S)
            placed = place_segments(self.mesh, segments)
            state, metrics = self.step(state, placed)
            losses.append(metrics["loss"].item())
        return state, position, losses


make_run = functools.cache(Run)


@functools.cache
def on_one_device(config: Config = CONFIG) -> list[float]:
    """Returns the losses that every mesh must reproduce."""
    run = make_run((1, 1, 1), config)
    return run.train(run.init(), Position(), UPDATES)[2]


@pytest.mark.parametrize(
    ("sizes", "config"),
    [
        ((2, 2, 2), CONFIG),
        ((2, 2, 2), FAST),
        pytest.param(
            (4, 1, 2), CONFIG, marks=[pytest.mark.long, pytest.mark.exact_bits]
        ),
        pytest.param((4, 1, 2), GROUPED, marks=pytest.mark.long),
        pytest.param((2, 2, 2), VARIANTS, marks=pytest.mark.long),
        *(pytest.param(sizes, CONFIG, marks=pytest.mark.long) for sizes in MESHES),
    ],
)
def test_eight_devices_match_the_losses_of_one(
    sizes: tuple[int, ...], config: Config
) -> None:
    run = make_run(sizes, config)
    _, _, losses = run.train(run.init(), Position(), UPDATES)
    expected = on_one_device(config)
    assert losses == pytest.approx(expected, rel=tiny.FLOAT32)


def numbers(state: TrainState) -> TrainState:
    """Returns the state with the random key as numbers."""
    return dataclasses.replace(state, rng=jax.random.key_data(state.rng))


@pytest.mark.parametrize(
    ("first", "last", "config"),
    [
        ((2, 2, 2), (2, 2, 2), CONFIG),
        pytest.param((2, 2, 2), (4, 1, 2), FAST, marks=pytest.mark.long),
        pytest.param((1, 4, 2), (2, 1, 4), GROUPED, marks=pytest.mark.long),
    ],
)
def test_checkpoints_move_between_meshes(
    first: tuple[int, ...], last: tuple[int, ...], config: Config, tmp_path: Path
) -> None:
    """A run moves from 8 devices to 1 and back: no bit of its state changes.

    Its losses equal those on one device.
    """
    run = make_run(first, config)
    state, position, losses = run.train(run.init(), Position(), 2)
    step = 2
    for sizes, updates in (((1, 1, 1), 1), (last, 2)):
        with save_restore.Checkpoints(tmp_path) as manager:
            manager.save(step, state, position, None)
        run = make_run(sizes, config)
        with save_restore.Checkpoints(tmp_path) as manager:
            restored = manager.restore(run.like)
        assert restored is not None
        tiny.assert_equal(numbers(restored.state), numbers(state))
        assert restored.position == position != Position()
        for array, like in zip(
            jax.tree.leaves(restored.state), jax.tree.leaves(run.like), strict=True
        ):
            assert array.sharding == like.sharding
        state, position, made = run.train(restored.state, restored.position, updates)
        losses += made
        step += updates
    expected = on_one_device(config)
    assert losses == pytest.approx(expected, rel=tiny.FLOAT32)
    assert expected[-1] < expected[0] - 0.1, "training has an effect"


def test_evaluation_of_several_segments() -> None:
    """One device reads the segments one by one."""
    config = EvalConfig(streams=8, tgt_len=4, mem_len=9, segments_per_step=1)
    params = tiny.make_params(MODEL)
    one = make_evaluate(MODEL, config, tiny.one_device())
    mesh = make_mesh(MeshConfig(2, 2, 2), jax.devices())
    several = dataclasses.replace(config, segments_per_step=4)
    scores = make_evaluate(MODEL, several, mesh)(params, TEXT, tiny.silent)
    expected = one(params, TEXT, tiny.silent)
    assert scores["nll"] == pytest.approx(expected["nll"], rel=tiny.FLOAT32)
