"""A trained model in one file: weights, config, vocabulary and checksums.

The file is an `array_file` whose arrays have names like "layers/attention/q".
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
from flax import traverse_util

from txl_jax.checkpoint import array_file
from txl_jax.checkpoint import manifest as manifests
from txl_jax.checkpoint.manifest import Manifest, checksums
from txl_jax.data import vocab as vocabulary
from txl_jax.data.vocab import Vocab
from txl_jax.model.modules import Params
from txl_jax.runtime.storage import Json, write_atomically

FORMAT = "txl_jax 1"  # the version that is written and read
EXPORT = "--mode=export --format=txl_jax"


class Release(NamedTuple):
    """A model in one file.

    params are numpy arrays, in float32 after reading, config has all sections of the
    run's config, and origin is the run's provenance.
    """

    config: Json
    params: Params
    vocab: Vocab
    step: int
    origin: Json


def save_release(release: Release, path: Path, dtype: str = "float32") -> None:
    """Writes a model to a file, with its numbers rounded to a dtype."""
    params = jax.tree.map(lambda x: np.asarray(x, dtype), release.params)
    sums = checksums({"params": params})
    manifest = Manifest(release.step, position=None, valid_nll=None, arrays=sums)
    texts = {
        "config": json.dumps(release.config),
        "vocab": vocabulary.dumps(release.vocab),
        "manifest": json.dumps(manifest.to_json()),
        "origin": json.dumps(release.origin),
    }
    write_atomically(path, array_file.pack(params, FORMAT, texts))


def read_release(path: Path) -> Release:
    """Reads a model from a file; raises UserError if it is damaged or another file."""
    with array_file.opened(path, FORMAT, EXPORT) as (texts, arrays):
        return _parse(texts, arrays)


def _parse(metadata: Mapping[str, str], flat: dict[str, np.ndarray]) -> Release:
    """Returns the model; raises Damaged, UserError or an error of DAMAGE."""
    config, origin = json.loads(metadata["config"]), json.loads(metadata["origin"])
    manifest = manifests.parse(metadata["manifest"])
    if manifest.arrays.keys() != {f"params/{name}" for name in flat}:
        raise ValueError("it lacks arrays of its manifest, or has others")
    params = traverse_util.unflatten_dict(flat, sep="/")
    manifests.verify(manifest, {"params": params})
    params = jax.tree.map(lambda x: x.astype(np.float32), params)
    vocab = vocabulary.loads(metadata["vocab"])
    return Release(config, params, vocab, manifest.step, origin)
