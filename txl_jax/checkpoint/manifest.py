"""The manifest of a checkpoint: step, data position and the arrays' checksums.

Orbax stores array values without a checksum, so a bit flip on disk would silently
change a weight. The manifest is saved beside the arrays, as the item "record", and has
its own SHA-256.
"""

import dataclasses
import json
import math
from pathlib import Path

from txl_jax.checkpoint.array_checksum import Checksum, Tree, checksums, named_leaves
from txl_jax.data.streams import Position
from txl_jax.errors import UserError
from txl_jax.report.checksum import DAMAGE, verify_checksum, with_checksum
from txl_jax.report.log import Json
from txl_jax.runtime import storage

Items = dict[str, Tree]  # by their names in a checkpoint, such as "params"
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

    @property
    def rank(self) -> tuple[float, int] | None:
        """Sort key, least for the best checkpoint; None if it was not validated.

        Of equal losses the newest is the best; NaN is the worst loss.
        """
        if self.valid_nll is None:
            return None
        nll = math.inf if math.isnan(self.valid_nll) else self.valid_nll
        return nll, -self.step

    def to_json(self) -> Json:
        """Returns the JSON object that `parse` accepts as text."""
        position = self.position and self.position._asdict()
        return with_checksum({**dataclasses.asdict(self), "position": position})


def parse(text: str) -> Manifest:
    """Returns the manifest that `Manifest.to_json` wrote; raises an error of DAMAGE."""
    body = verify_checksum(json.loads(text))
    position = body["position"] and Position(**body["position"])
    if position and any(type(number) is not int for number in position):
        raise ValueError(f"its position is {position}")
    nll = None if body["valid_nll"] is None else float(body["valid_nll"])
    arrays = {
        name: (dtype, tuple(shape), checksum)
        for name, (dtype, shape, checksum) in body["arrays"].items()
    }
    return Manifest(body["step"], position, nll, arrays)


def write(folder: Path, manifest: Manifest) -> None:
    """Replaces the manifest of a checkpoint, saved in `folder`."""
    text = json.dumps(manifest.to_json())
    path = folder / ITEM / FILE
    storage.write_atomically(path, lambda fresh: fresh.write_text(text, "utf-8"))


def read(folder: Path, step: int) -> Manifest:
    """Returns the manifest of checkpoint `step`, saved in `folder`; raises Damaged."""
    path = folder / ITEM / FILE
    try:
        manifest = parse(path.read_text("utf-8"))
        if manifest.step != step:
            raise ValueError(f"it is of step {manifest.step}")
        return manifest
    except FileNotFoundError as error:
        raise Damaged(step, f"no manifest in {path.parent}") from error
    except storage.errors() as error:
        if storage.is_remote(path) or isinstance(error, PermissionError):
            reason = storage.one_line(error)
            raise UserError(f"cannot read {path}: {reason}") from error
        raise Damaged(step, f"its manifest {path}: {error}") from error
    except DAMAGE as error:
        raise Damaged(step, f"its manifest {path}: {error}") from error


def check_arrays(manifest: Manifest, like: Items) -> None:
    """Raises UserError unless the saved arrays have the dtypes and shapes of `like`.

    Orbax would silently cast to another dtype.
    """
    expected = {
        name: f"{leaf.dtype}{list(leaf.shape)}" for name, leaf in named_leaves(like)
    }
    saved = {
        name: f"{dtype}{list(shape)}"
        for name, (dtype, shape, _) in manifest.arrays.items()
        if name.partition("/")[0] in like
    }
    names = sorted(expected.keys() | saved.keys())
    other = [name for name in names if expected.get(name) != saved.get(name)]
    if other:
        shown = "; ".join(
            f"{name} is {saved.get(name, 'missing')} there, "
            f"{expected.get(name, 'missing')} here"
            for name in other[:3]
        )
        more = f"; {len(other) - 3} more arrays differ" if len(other) > 3 else ""
        raise UserError(
            f"checkpoint {manifest.step} has another model or optimizer: "
            f"{shown}{more}; give the config of the run that saved it, with the "
            "txl_jax that saved it (see git_revision in run.json), or give another "
            "--workdir"
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
