"""The manifest of a checkpoint: its step, data position and checksums of its arrays.

Orbax stores arrays without a checksum, so a bit flip on a disk would silently change a
weight. The manifest is the JSON item "record" beside the arrays. It has its own
SHA-256, because another position would silently change the data that is read next.
"""

import dataclasses
import hashlib
import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from txl_jax.data.streams import Position
from txl_jax.errors import UserError
from txl_jax.kernels.hash import STEP, murmur3
from txl_jax.runtime import storage
from txl_jax.runtime.explain import one_line, storage_errors
from txl_jax.runtime.storage import DAMAGE, Json

Tree = Any  # a pytree of arrays, or of their `ShapeDtypeStruct`s
Items = dict[str, Tree]  # by name in a checkpoint, such as "params"
Leaf = Array | jax.ShapeDtypeStruct
Checksum = tuple[str, tuple[int, ...], str]  # dtype, shape, 16 hexadecimal digits
ITEM = "record"  # the manifest's name in the checkpoint
FILE = "metadata"  # orbax's name for the text of a JSON item


class Damaged(UserError):
    """A checkpoint is incomplete, unreadable or has changed since it was saved."""

    def __init__(self, step: int, reason: str):
        super().__init__(f"checkpoint {step} is damaged ({reason})")


class Imported(UserError):
    """A run cannot continue from an imported model."""

    def __init__(self, workdir: Path):
        super().__init__(
            f"{workdir} holds an imported model, without the state of the optimizer: "
            f"train with --config.train.init_from={workdir} in another --workdir"
        )


@dataclasses.dataclass(frozen=True)
class Manifest:
    """The content of a checkpoint; arrays have names like "params/layers/attention/q".

    valid_nll is in nats per token, None if the step was not validated; position is None
    for an imported model.
    """

    step: int
    position: Position | None
    valid_nll: float | None
    arrays: dict[str, Checksum]

    def to_json(self) -> Json:
        """Returns the JSON object that `parse` accepts as text."""
        position = self.position and self.position._asdict()
        body = {**dataclasses.asdict(self), "position": position}
        return {**body, "sha256": _sha256(body)}


def parse(text: str) -> Manifest:
    """Returns the manifest that `Manifest.to_json` wrote; raises an error of DAMAGE."""
    body = json.loads(text)
    if body.pop("sha256") != _sha256(body):
        raise ValueError("its checksum, sha256, is wrong")
    position = body["position"] and Position(**body["position"])
    nll = None if body["valid_nll"] is None else float(body["valid_nll"])
    arrays = {
        name: (dtype, tuple(shape), checksum)
        for name, (dtype, shape, checksum) in body["arrays"].items()
    }
    return Manifest(len(range(body["step"])), position, nll, arrays)


def _sha256(body: Json) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Replaces the manifest of a checkpoint, saved in `folder`."""
    text = json.dumps(manifest.to_json())
    storage.write_atomically(folder / ITEM / FILE, text)


def read_manifest(folder: Path, step: int) -> Manifest:
    """Returns the manifest of checkpoint `step`, saved in `folder`.

    Raises Damaged, or UserError if it may not be read or gs:// is out of reach.
    """
    path = folder / ITEM / FILE
    try:
        manifest = parse(path.read_text("utf-8"))
        if manifest.step != step:
            raise ValueError(f"it is of step {manifest.step}")
        return manifest
    except (FileNotFoundError, *DAMAGE) as error:
        raise Damaged(step, f"its manifest {path}: {error}") from error
    except storage_errors() as error:
        if storage.is_remote(path) or isinstance(error, PermissionError):
            reason = one_line(error)
            raise UserError(f"cannot read {path}: {reason}") from error
        raise Damaged(step, f"its manifest {path}: {error}") from error


def best(manifests: Iterable[Manifest]) -> int:
    """Returns the step with the least validation loss, the newest of equal ones.

    NaN, and a step that was not validated, are worse than any number.
    """

    def loss(each: Manifest) -> float:
        nll = each.valid_nll
        return math.inf if nll is None or math.isnan(nll) else nll

    return min(manifests, key=lambda each: (loss(each), -each.step)).step


def check_arrays(manifest: Manifest, like: Items) -> None:
    """Raises UserError unless the saved arrays have the dtypes and shapes of `like`.

    Orbax would silently cast to another dtype.
    """
    here = {name: f"{x.dtype}{list(x.shape)}" for name, x in named_leaves(like)}
    there = {
        name: f"{dtype}{list(shape)}"
        for name, (dtype, shape, _) in manifest.arrays.items()
        if name.partition("/")[0] in like
    }
    differences = [
        f"{name} is {there.get(name, 'missing')} there, "
        f"{here.get(name, 'missing')} here"
        for name in sorted(here.keys() | there.keys())
        if here.get(name) != there.get(name)
    ]
    if differences:
        more = "; and more" if len(differences) > 3 else ""
        raise UserError(
            f"checkpoint {manifest.step} has another model or optimizer: "
            f"{'; '.join(differences[:3])}{more}; give the config of the run that "
            "saved it, with the txl_jax that saved it (see git_revision in run.json), "
            "or another --workdir"
        )


def verify(manifest: Manifest, trees: Items) -> None:
    """Raises Damaged unless the restored arrays equal the saved ones bit for bit."""
    changed = [
        name
        for name, checksum in checksums(trees).items()
        if checksum != manifest.arrays.get(name)
    ]
    if changed:
        more = f" and {len(changed) - 1} more" if len(changed) > 1 else ""
        raise Damaged(manifest.step, f"array {changed[0]}{more}: wrong checksum")


def named_leaves(tree: Tree) -> list[tuple[str, Leaf]]:
    """Returns the leaves of a pytree with names like "params/a/b"."""
    return [
        (jax.tree_util.keystr(path, simple=True, separator="/"), leaf)
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    ]


def first_nonfinite(tree: Tree) -> str:
    """Returns the name of the first array with a NaN or an infinity, or ""."""
    leaves = dict(named_leaves(tree))
    marks = jax.device_get(_are_finite(list(leaves.values())))
    return next(
        (name for name, mark in zip(leaves, marks, strict=True) if not mark), ""
    )


@jax.jit
def _are_finite(leaves: list[Array]) -> Array:
    return jnp.stack([jnp.isfinite(x).all() for x in leaves])


def checksums(tree: Tree) -> dict[str, Checksum]:
    """Returns mesh-independent checksums of the arrays of a pytree, by their names.

    They are computed on the arrays' devices; all processes must make this call.
    Changing one number of up to 32 bits always changes its array's checksum; any other
    change is missed with a probability of about 2^-63.
    """
    leaves = dict(named_leaves(tree))
    words_N2 = jax.device_get(_checksum_words(list(leaves.values())))
    return {
        name: (str(leaf.dtype), tuple(leaf.shape), "{:08x}{:08x}".format(*words))
        for (name, leaf), words in zip(leaves.items(), words_N2, strict=True)
    }


@jax.jit
def _checksum_words(leaves: list[Array]) -> Array:
    """Returns two uint32 for each array.

    A nonlinear hash of each number's bits and index is summed modulo 2^32, once
    unweighted and once weighted by an odd function of the index. The order of a sum
    does not matter, so shards can be summed separately.
    """

    def words(x: Array) -> Array:
        if x.dtype == jnp.bool_:
            bits = x.astype(jnp.uint32)
        else:
            width = min(x.dtype.itemsize, 4)  # wider numbers become several words
            word = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}[width]
            bits = jax.lax.bitcast_convert_type(x, word).astype(jnp.uint32)
        index = jnp.zeros(bits.shape, jnp.uint32)
        for axis in range(bits.ndim):
            stride = math.prod(bits.shape[axis + 1 :]) % 2**32
            along = jax.lax.broadcasted_iota(jnp.uint32, bits.shape, axis)
            index += along * jnp.uint32(stride)
        mixed = murmur3(bits + index * jnp.uint32(STEP))
        sums = mixed, mixed * (2 * index + 1)
        return jnp.stack([jnp.sum(part, dtype=jnp.uint32) for part in sums])

    return jnp.stack([words(x) for x in leaves])
