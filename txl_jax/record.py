"""What a checkpoint says of itself, so that damage to any of it is noticed.

orbax writes numbers without a checksum: one bit that flips on a disk comes back as
another weight. Beside the arrays therefore lies their record, which has a SHA-256 of
its own.

Dims: none.
"""

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

from txl_jax.data.streams import Position
from txl_jax.digest import Digest, digests, form, named_leaves
from txl_jax.errors import UserError
from txl_jax.seal import DAMAGE, seal, unseal


class Damaged(UserError):
    """Says which checkpoint, and what of it, is not as it was saved."""

    def __init__(self, step: int, reason: str):
        super().__init__(f"checkpoint {step} is damaged ({reason})")


@dataclasses.dataclass(frozen=True)
class Record:
    """One checkpoint's: arrays by names as in "params/layers/attention/q".

    valid_nll is in nats per token, None where nothing was validated; position is None
    in a model that was trained elsewhere.
    """

    step: int
    position: Position | None
    valid_nll: float | None
    arrays: dict[str, Digest]

    @property
    def rank(self) -> tuple[float, int] | None:
        """What the best checkpoint has least of; of equal ones it is the newest.

        Not a number is the worst of all, where sorting would make it the best.
        """
        if self.valid_nll is None:
            return None
        nll = math.inf if math.isnan(self.valid_nll) else self.valid_nll
        return nll, -self.step

    def to_json(self) -> dict[str, Any]:
        """Returns what `read` reads."""
        body = {
            "step": self.step,
            "position": self.position and self.position._asdict(),
            "valid_nll": self.valid_nll,
            "arrays": {name: list(digest) for name, digest in self.arrays.items()},
        }
        return seal(body)


def read(path: Path, step: int) -> Record:
    """Returns the record of checkpoint `step` from its file; raises Damaged."""
    try:
        body = unseal(json.loads(path.read_text("utf-8")), needed=True)
        if body["step"] != step:
            raise ValueError(f"it is of step {body['step']}")
        position = body["position"] and Position(**body["position"])
        if position and any(type(number) is not int for number in position):
            raise ValueError(f"it has {position} for a position")
        nll = None if body["valid_nll"] is None else float(body["valid_nll"])
        arrays = {
            name: (dtype, tuple(shape), digest)
            for name, (dtype, shape, digest) in body["arrays"].items()
        }
        return Record(step, position, nll, arrays)
    except FileNotFoundError as error:
        raise Damaged(step, f"no record of its arrays in {path.parent}") from error
    except PermissionError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error
    except (*DAMAGE, OSError) as error:
        raise Damaged(step, f"its record {path}: {error}") from error


def refuse_misfits(record: Record, like: dict[str, Any]) -> None:
    """Raises UserError unless the checkpoint has arrays such as those of `like`.

    orbax itself would cast them to other dtypes without a word.
    """
    wanted = {name: form(leaf) for name, leaf in named_leaves(like)}
    items = tuple(f"{item}/" for item in like)
    found = {
        name: (dtype, shape)
        for name, (dtype, shape, _) in record.arrays.items()
        if name.startswith(items)
    }
    names = sorted(wanted.keys() | found.keys())
    other = [name for name in names if wanted.get(name) != found.get(name)]
    if other:
        shown = "; ".join(
            f"{name} is {_show(found.get(name))} there, {_show(wanted.get(name))} here"
            for name in other[:3]
        )
        more = f"; {len(other) - 3} more arrays differ" if len(other) > 3 else ""
        raise UserError(
            f"checkpoint {record.step} is of another model or optimiser: {shown}{more};"
            " give the config that it was made with, by the txl_jax that made it (its "
            "git_revision is in run.json), or another --workdir"
        )


def _show(form: tuple[str, tuple[int, ...]] | None) -> str:
    return f"{form[0]}{list(form[1])}" if form else "missing"


def verify(record: Record, trees: dict[str, Any]) -> None:
    """Raises Damaged unless the arrays read are, bit for bit, those that were saved."""
    changed = [
        name
        for name, found in digests(trees).items()
        if found != record.arrays.get(name)
    ]
    if changed:
        more = f" and {len(changed) - 1} more" if len(changed) > 1 else ""
        raise Damaged(
            record.step, f"array {changed[0]}{more}: other numbers than were saved"
        )
