"""Generates `tensorflow_checkpoints` with the paper's TensorFlow code.

`python -m tests.convert.golden_tensorflow CODE` with tensorflow-cpu==2.21.0, which
needs no other package of this project; CODE is the folder `tf` of the paper's published
code. This module defines the layers of TensorFlow 1 that version 2 lacks. Each case is
a folder with a checkpoint, and an .npz with the config, the tokens, the names and
values of all variables, the nll of each segment and the last memory. All variables are
random. The folder `kinds` has a variable of every dtype and a partitioned one.

Dims: B streams, S segments, L segment, T = S L + 1 tokens, M memory, D model.
"""

import importlib
import json
import os
import shutil
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np

FOLDER = Path(__file__).with_name("tensorflow_checkpoints")
B, S, L = 2, 4, 5
SPREAD = 0.35  # of every variable

BASE: dict[str, Any] = {
    "n_token": 23,
    "n_layer": 2,
    "d_model": 8,
    "d_embed": 8,
    "n_head": 2,
    "d_head": 3,
    "d_inner": 10,
    "mem_len": 6,
    "clamp_len": -1,
    "same_length": False,
    "cutoffs": [],
    "tie_projs": [],
    "div_val": 1,
    "untie_r": False,
    "proj_same_dim": True,
}
CLUSTERS: dict[str, Any] = {
    "cutoffs": [6, 11],
    "tie_projs": [False, True, True],
    "untie_r": True,
}
DIVIDED: dict[str, Any] = {**CLUSTERS, "div_val": 4, "d_model": 16, "d_embed": 16}
# The first four have the structure of the published models.
CASES: dict[str, dict[str, Any]] = {
    "enwik8": {"same_length": True},
    "wt103": CLUSTERS,
    "wt103_large": {**DIVIDED, "same_length": True, "clamp_len": 4},
    "lm1b": {**DIVIDED, "proj_same_dim": False, "tie_projs": [False] * 3},
    "narrow": {"d_embed": 4},
    "narrow_clusters": {**CLUSTERS, "d_embed": 4, "untie_r": False},
}
TRAINED = ("wt103_large",)  # with Adam's slots
SHARDED = ("wt103_large", "lm1b")  # in two data files


def old_tensorflow(tf: Any) -> types.ModuleType:
    """Returns TensorFlow 1 with the layers that the paper's code calls."""

    def dense(
        x: Any,
        units: int,
        activation: Any = None,
        use_bias: bool = True,
        kernel_initializer: Any = None,
        name: str = "",
    ) -> Any:
        with tf.variable_scope(name):
            shape = [x.shape[-1], units]
            kernel = tf.get_variable("kernel", shape, initializer=kernel_initializer)
            x = tf.tensordot(x, kernel, 1)
            if use_bias:
                x += tf.get_variable("bias", [units])
        return activation(x) if activation else x

    def dropout(x: Any, rate: float, training: bool, name: str = "") -> Any:
        assert not training
        return x

    def layer_norm(x: Any, begin_norm_axis: int) -> Any:
        with tf.variable_scope("LayerNorm"):
            beta, gamma = (tf.get_variable(n, [x.shape[-1]]) for n in ("beta", "gamma"))
        mean, variance = tf.nn.moments(x, [begin_norm_axis], keepdims=True)
        return tf.nn.batch_normalization(x, mean, variance, beta, gamma, 1e-12)

    old = types.ModuleType("tensorflow")
    old.__dict__.update(tf.__dict__)
    old.layers = types.SimpleNamespace(  # type: ignore[attr-defined]
        dense=dense, dropout=dropout
    )
    old.contrib = types.SimpleNamespace(  # type: ignore[attr-defined]
        layers=types.SimpleNamespace(layer_norm=layer_norm)
    )
    return old


def session(tf: Any) -> Any:
    """Returns a session with two devices."""
    return tf.Session(config=tf.ConfigProto(device_count={"CPU": 2}))


def place(op: Any) -> str:
    """Returns a device for the op, which decides in which data file it is saved."""
    return f"/cpu:{len(op.name) % 2}"


def save(tf: Any, run: Any, name: str, file: str, **options: Any) -> None:
    """Saves all variables as FOLDER/name/file, and FOLDER/name/checkpoint."""
    saver = tf.train.Saver(save_relative_paths=True, **options)
    saver.save(run, str(FOLDER / name / file), write_meta_graph=False)


def make_case(tf: Any, code: Any, name: str, seed: int) -> dict[str, Any]:
    """Saves a checkpoint and returns the results of its model."""
    config = {**BASE, **CASES[name]}
    rng = np.random.default_rng(seed)
    tokens_BT = rng.integers(0, config["n_token"], (B, S * L + 1))
    shape = (config["mem_len"], B, config["d_model"])
    mems = [tf.placeholder(tf.float32, shape) for _ in range(config["n_layer"])]
    tokens = tf.placeholder(tf.int32, (L, B))
    targets = tf.placeholder(tf.int32, (L, B))
    with tf.device(place if name in SHARDED else "/cpu:0"):
        loss, new_mems = code.transformer(
            tokens,
            targets,
            mems,
            dropout=0,
            dropatt=0,
            initializer=tf.random_normal_initializer(),
            is_training=False,
            use_tpu=False,
            **config,
        )
        step = tf.train.get_or_create_global_step()  # a float among the values
        trained = tf.trainable_variables()
        update = tf.no_op()
        if name in TRAINED:
            update = tf.train.AdamOptimizer(0.01).minimize(loss, global_step=step)

    def feed(s: int, memory: Any) -> dict[Any, Any]:
        x_LB = tokens_BT[:, s * L : s * L + L].T
        y_LB = tokens_BT[:, s * L + 1 : s * L + L + 1].T
        return {tokens: x_LB, targets: y_LB, **dict(zip(mems, memory, strict=True))}

    with session(tf) as run:
        run.run(tf.global_variables_initializer())
        for variable in trained:
            value = SPREAD * rng.normal(size=variable.shape)
            value += variable.op.name.endswith("gamma")
            variable.load(value.astype(np.float16).astype(np.float32), run)
        memory = [np.zeros(shape, np.float32)] * config["n_layer"]
        run.run(update, feed(0, memory))
        losses = []
        for s in range(S):
            nll, memory = run.run([loss, new_mems], feed(s, memory))
            losses.append(nll)
        values = run.run({v.op.name: v for v in tf.global_variables()})
        save(tf, run, name, "ckpt-0", sharded=name in SHARDED)
    return {
        "config": np.array(json.dumps(config)),
        "tokens": tokens_BT.astype(np.int32),
        "losses": np.array(losses, np.float32),
        "memory": np.stack(memory),
        "names": np.array(list(values)),
        "values": np.concatenate([np.ravel(value) for value in values.values()]),
    }


def make_kinds(tf: Any) -> dict[str, Any]:
    """Saves a variable of every dtype, a partitioned, an empty and a text variable."""
    rng = np.random.default_rng(99)
    kinds = ("float32", "float16", "bfloat16", "int32", "int64", "float64")
    for kind in kinds:
        value = (rng.normal(size=(3, 5)) * 1e4).astype(np.float32)
        tf.Variable(tf.cast(value, kind), name=kind)
    tf.Variable(np.float32(np.pi), name="scalar")
    tf.Variable(np.zeros((0, 4), np.float32), name="empty")
    tf.Variable("text", name="string")
    halves = tf.fixed_size_partitioner(2)
    tf.get_variable("partitioned", [6, 2], partitioner=halves)
    with session(tf) as run:
        run.run(tf.global_variables_initializer())
        whole = [v for v in tf.global_variables() if "part" not in v.op.name]
        values = run.run({v.op.name: v for v in whole if v.op.name != "string"})
        save(tf, run, "kinds", "model.ckpt-7")
    values["bfloat16"] = values["bfloat16"].astype(np.float32)
    return values


def main(code: str) -> None:
    """Writes all files."""
    os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
    tf = importlib.import_module("tensorflow").compat.v1
    tf.disable_v2_behavior()
    tf.logging.set_verbosity(tf.logging.ERROR)
    sys.modules["tensorflow"] = old_tensorflow(tf)
    sys.path.insert(0, code)
    model = importlib.import_module("model")
    shutil.rmtree(FOLDER, ignore_errors=True)
    for name in (*CASES, "kinds"):
        (FOLDER / name).mkdir(parents=True)
    for seed, name in enumerate(CASES):
        with tf.Graph().as_default():
            np.savez_compressed(
                FOLDER / f"{name}.npz", **make_case(tf, model, name, seed)
            )
    with tf.Graph().as_default():
        np.savez_compressed(FOLDER / "kinds.npz", **make_kinds(tf))


if __name__ == "__main__":
    main(sys.argv[1])
