"""JSON objects with a SHA-256 of their content.

After a bit flip, JSON may still parse, with another meaning.
"""

import hashlib
import json
from typing import Any

# An object of JSON, such as the result of a mode.
Json = dict[str, Any]

KEY = "sha256"
# Exceptions that reading a damaged JSON file can raise.
DAMAGE = (
    *(ValueError, TypeError, KeyError, IndexError, AttributeError),
    *(RecursionError, OverflowError),
)


def with_checksum(body: Json) -> Json:
    """Returns the object with its SHA-256 as one more key."""
    return {**body, KEY: _sha256(body)}


def verify_checksum(saved: Json) -> Json:
    """Returns the object without its SHA-256; raises ValueError if that is wrong."""
    if not isinstance(saved, dict):
        raise ValueError("it is not a JSON object")
    body = {name: value for name, value in saved.items() if name != KEY}
    if saved.get(KEY) != _sha256(body):
        raise ValueError(f"its checksum, {KEY}, is wrong or missing")
    return body


def _sha256(body: Json) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
