"""What `experiments.benchmarks.chip` measured of the kernels on a kind of device.

There is one JSON file for each kind, with a checksum. Those in the user's cache folder
precede those of the package, in `tables/`; what is in neither is estimated.
"""

import functools
import json
import re
from pathlib import Path
from typing import Any, NamedTuple

import jax

from txl_jax.report.checksum import DAMAGE, KEY, verify_checksum, with_checksum
from txl_jax.report.log import say
from txl_jax.runtime.programs import processor, user_cache
from txl_jax.runtime.storage import regular

FORMAT = 1
PACKAGED = Path(__file__).parent / "tables"
COMMAND = "python -m experiments.benchmarks.chip"


class Table(NamedTuple):
    """The measurements on a kind of device.

    sizes: the fastest blocks, by `name_sizes`. checked: where a kernel's values or
    gradients are wrong, by kernel; "" = nowhere.
    """

    sizes: dict[str, list[int]]
    checked: dict[str, str]
    sha256: str | None = None  # of the files, None without any


def name_sizes(kernel: str, *sizes: int) -> str:
    """Returns the key of a kernel's blocks for operands of these sizes."""
    return f"{kernel} {'x'.join(map(str, sizes))}"


def full_kind(device_kind: str) -> str:
    """Returns the kind of device; that of a CPU is "cpu" and a key of its model."""
    return f"cpu {processor()}" if device_kind == "cpu" else device_kind


def file_name(device_kind: str) -> str:
    """Returns the name of a kind's file."""
    return re.sub(r"\W+", "-", full_kind(device_kind).lower()).strip("-") + ".json"


def user_folder() -> Path:
    """Returns the folder of tables in the user's cache folder."""
    return user_cache() / "kernels"


@functools.cache
def read(device_kind: str) -> Table:
    """Returns what is known of a kind of device; reports and ignores a damaged file."""
    table, digests = Table({}, {}), []
    for find in (lambda: PACKAGED, user_folder):
        try:
            path = find() / file_name(device_kind)
            if not path.exists():
                continue
            saved = json.loads(regular(path).read_text("utf-8"))
            new = parse(saved, full_kind(device_kind))
        except (OSError, RuntimeError, *DAMAGE) as error:  # there may be no home
            say(f"a table of kernels is ignored ({error}): delete it, or {COMMAND}")
            continue
        table = Table(table.sizes | new.sizes, table.checked | new.checked)
        digests.append(saved[KEY])
    return table._replace(sha256=" ".join(digests) or None)


def sha256() -> str | None:
    """Returns the checksums of the tables of this process's devices, None without."""
    return read(jax.devices()[0].device_kind).sha256


def parse(saved: Any, kind: str) -> Table:
    """Returns a file's table; raises one of DAMAGE if it is not one of this kind."""
    body = verify_checksum(saved)
    if (body["format"], body["device_kind"]) != (FORMAT, kind):
        raise ValueError(f"it is not of format {FORMAT} for {kind!r}")
    return Table(body["sizes"], body["checked"])


def to_json(device_kind: str, table: Table, **origin: Any) -> dict[str, Any]:
    """Returns the content of a kind's file; origin: where the table comes from."""
    kind, tables = full_kind(device_kind), {"sizes": table.sizes}
    body = {"format": FORMAT, "device_kind": kind, **origin, **tables}
    return with_checksum(body | {"checked": table.checked})
