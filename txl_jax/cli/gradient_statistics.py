"""The statistics of gradients that dynamic evaluation needs, kept in the workdir."""

import hashlib
import io
import zipfile
from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np

from txl_jax.checkpoint.array_checksum import checksums, named_leaves
from txl_jax.data.streams import Streams
from txl_jax.data.tokens import Tokens
from txl_jax.evaluate import dynamic
from txl_jax.evaluate.options import evaluation_model
from txl_jax.model.initializers import Params
from txl_jax.model.segment import Segment
from txl_jax.report.checksum import DAMAGE
from txl_jax.report.log import say
from txl_jax.report.progress import interruptible
from txl_jax.runtime import storage
from txl_jax.workdir.load import Loaded

FILE = "dynamic.npz"  # r of every parameter, and the key


def find(loaded: Loaded, tokens: Tokens, workdir: Path) -> Params:
    """Returns r of every parameter: from the workdir, or else collected and saved."""
    config, path = loaded.config.eval, workdir / FILE
    model = evaluation_model(loaded.config.model, config)
    split = tokens.manifest["splits"]["train"]["sha256"]
    state = checksums(loaded.params), model, config.tgt_len, config.dynamic_segments
    key = hashlib.sha256(repr((*state, config.reset_memory_at, split)).encode())
    if rms := _read(path, key.hexdigest(), loaded.params):
        return rms
    L, text = config.tgt_len, tokens.split("train")
    if config.dynamic_segments:
        text = text[: config.dynamic_segments * L + 1]
    streams = Streams(text, 1, L, reset_memory_at=int(config.reset_memory_at))
    with interruptible("gradients of train") as progress:

        def segments() -> Iterator[Segment]:
            for n, segment in enumerate(streams.epoch()):
                progress(n, streams.segments_per_epoch)
                yield segment

        rms = dynamic.root_mean_squares(
            loaded.config.model, config, loaded.mesh, loaded.params, segments()
        )
    arrays = {name: np.asarray(x) for name, x in named_leaves(rms)}
    arrays["key"] = np.array(key.hexdigest())
    file = io.BytesIO()
    np.savez(file, allow_pickle=False, **arrays)
    try:
        storage.write_atomically(path, lambda new: new.write_bytes(file.getvalue()))
        say(f"the statistics of {streams.segments_per_epoch:,} gradients are in {path}")
    except storage.errors() as error:
        say(f"the statistics of gradients are not kept ({storage.one_line(error)})")
    return rms


def _read(path: Path, key: str, params: Params) -> Params | None:
    """Returns the saved statistics; None if there are none with this key."""
    try:
        saved = np.load(io.BytesIO(path.read_bytes()), allow_pickle=False)
        if str(saved["key"]) != key:
            return None
        arrays = [saved[name] for name, _ in named_leaves(params)]
    except FileNotFoundError:
        return None
    except (OSError, *DAMAGE, EOFError, RuntimeError, zipfile.BadZipFile):
        say(f"{path} is damaged: the statistics are collected again")
        return None
    rms = jax.tree.unflatten(jax.tree.structure(params), arrays)
    return jax.device_put(rms, jax.tree.map(lambda leaf: leaf.sharding, params))
