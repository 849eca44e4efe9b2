"""The statistics of gradients that dynamic evaluation needs, kept in the workdir."""

import hashlib
from pathlib import Path

import jax
import numpy as np

from txl_jax.checkpoint.manifest import checksums, named_leaves
from txl_jax.data.streams import Streams
from txl_jax.data.tokens import Tokens
from txl_jax.evaluate import dynamic
from txl_jax.evaluate.options import evaluation_model
from txl_jax.evaluate.perplexity import each_segment
from txl_jax.model.initializers import Params
from txl_jax.report.log import say
from txl_jax.report.progress import Progress
from txl_jax.runtime import storage
from txl_jax.workdir.load import Loaded
from txl_jax.workdir.staging import read_arrays, save_arrays

FILE = "dynamic.npz"  # r of every parameter, and the key


def find(loaded: Loaded, tokens: Tokens, workdir: Path) -> Params:
    """Returns r of every parameter: from the workdir, or else collected and saved."""
    config, path = loaded.config.eval, workdir / FILE
    model = evaluation_model(loaded.config.model, config)
    split = tokens.manifest["splits"]["train"]["sha256"]
    state = checksums(loaded.params), model, config.tgt_len, config.dynamic_segments
    key = hashlib.sha256(repr((*state, config.reset_memory_at, split)).encode())
    saved, names = read_arrays(path), [name for name, _ in named_leaves(loaded.params)]
    if saved.get("key") == key.hexdigest():
        arrays = [saved[name] for name in names]
        rms = jax.tree.unflatten(jax.tree.structure(loaded.params), arrays)
        return jax.device_put(rms, jax.tree.map(lambda x: x.sharding, loaded.params))
    L, text = config.tgt_len, tokens.split("train")
    if config.dynamic_segments:
        text = text[: config.dynamic_segments * L + 1]
    streams = Streams(text, 1, L, reset_memory_at=int(config.reset_memory_at))
    with Progress("gradients of train") as progress:
        segments = each_segment(streams, progress)
        rms = dynamic.root_mean_squares(
            loaded.config.model, config, loaded.mesh, loaded.params, segments
        )
    made = {name: np.asarray(x) for name, x in named_leaves(rms)}
    try:
        save_arrays(path, made | {"key": np.array(key.hexdigest())})
        say(f"the statistics of {streams.segments_per_epoch:,} gradients are in {path}")
    except storage.errors() as error:
        say(f"the statistics of gradients are not kept ({storage.one_line(error)})")
    return rms
