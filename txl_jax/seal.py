"""A JSON object with the SHA-256 of what it says, so that damage to it is noticed.

One flipped bit can leave JSON that reads well and says something else.

Dims: none.
"""

import hashlib
import json
from typing import Any

KEY = "sha256"
# What reading a file of JSON can raise where it is not as it was written.
DAMAGE = (
    *(ValueError, TypeError, KeyError, IndexError, AttributeError),
    *(RecursionError, OverflowError),
)


def seal(body: dict[str, Any]) -> dict[str, Any]:
    """Returns the object with its SHA-256."""
    return {**body, KEY: _sha256(body)}


def unseal(sealed: dict[str, Any], needed: bool = False) -> dict[str, Any]:
    """Returns the object without its SHA-256.

    Raises ValueError where that is another's or, if it is needed, missing.
    """
    body = {name: value for name, value in sealed.items() if name != KEY}
    if sealed.get(KEY, "" if needed else _sha256(body)) != _sha256(body):
        raise ValueError(f"its checksum, {KEY}, is another")
    return body


def _sha256(body: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
