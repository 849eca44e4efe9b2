"""Text datasets that TFDS has prepared: `tfds:<name>`, for any of them on disk.

Only ArrayRecord can be read without TensorFlow, and without copying a whole shard
into memory; TFDS writes it when a dataset is prepared with file_format='array_record'.

Dims: none.
"""

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from txl_jax.data.pieces import SPLITS, Pieces, whole
from txl_jax.data.progress import Progress, Say
from txl_jax.errors import UserError
from txl_jax.seal import DAMAGE

INFO = "dataset_info.json"
SPLIT_NAMES = {
    "train": "train",
    "validation": "valid",
    "valid": "valid",
    "test": "test",
}
READ_BYTES = 1 << 22  # read together: single short texts came 30 times slower


def find(name: str, data_dir: Path) -> tuple[str, Path]:
    """Returns the edition of a TFDS dataset below `data_dir`, and its folder.

    `name` is TFDS's own: `name`, `name/config`, with `:version` or without. Raises
    UserError for one that is not there or cannot be read.
    """
    path, _, version = name.partition(":")
    root = data_dir / path
    if not name or ".." in root.parts or not root.is_relative_to(data_dir):
        raise UserError(
            f"data.corpus='tfds:{name}' names no dataset: write it as TFDS does"
        )
    # TFDS prepares in a folder "incomplete.<random>_<version>" beside the finished one.
    pattern = f"**/{version or '[0-9]*'}/{INFO}"
    found = sorted(info.parent for info in root.glob(pattern))
    if not found:
        raise UserError(
            f"data.corpus='tfds:{name}' is not prepared in {root}: prepare it with "
            "TFDS and file_format='array_record', or set data.data_dir to where it is"
        )
    if len(found) > 1:
        have = ", ".join(str(folder.relative_to(data_dir)) for folder in found)
        raise UserError(
            f"data.corpus='tfds:{name}' is any of {have}: name one as "
            "tfds:<name>/<config>:<version>"
        )
    (folder,) = found
    info = _info(folder)
    if (kind := info.get("fileFormat", "tfrecord")) != "array_record":
        raise UserError(
            f"data.corpus='tfds:{name}' is stored as {kind} in {folder}, which cannot "
            "be read without TensorFlow: prepare it with file_format='array_record'"
        )
    digest = hashlib.sha256((folder / INFO).read_bytes()).hexdigest()
    plain = "-".join(folder.relative_to(data_dir).parts)
    return f"{plain}-{digest[:8]}", folder


def unpack(folder: Path, scratch: Path, say: Say) -> dict[str, Pieces]:
    """Writes each split as one text file in `scratch`, a line end after every text.

    Raises UserError for a dataset without text or without three splits.
    """
    import tensorflow_datasets as tfds  # a second that re-use need not pay

    builder = tfds.builder_from_directory(folder)
    feature = _text_feature(folder, builder.info.features)
    ours = {
        SPLIT_NAMES[name]: name for name in builder.info.splits if name in SPLIT_NAMES
    }
    if missing := [split for split in SPLITS if split not in ours]:
        raise UserError(
            f"{folder} has the splits {', '.join(builder.info.splits)}, so "
            f"{', '.join(missing)} is missing: use a dataset with train, validation "
            "and test, or give its text as data.corpus='text'"
        )
    pieces: dict[str, Pieces] = {}
    for split in SPLITS:
        info = builder.info.splits[ours[split]]
        progress = Progress(say, f"reading {split}", info.num_bytes)
        target = scratch / split
        with target.open("wb") as out:
            for text in _texts(builder.as_data_source(ours[split]), info, feature):
                out.write(text if text.endswith(b"\n") else text + b"\n")
                progress.add(len(text))
        pieces[split] = (whole(target),)
    return pieces


def _texts(source: Any, info: Any, feature: str) -> Iterator[bytes]:
    mean = info.num_bytes // max(info.num_examples, 1) + 1
    step = max(READ_BYTES // mean, 1)
    for start in range(0, len(source), step):
        indices = list(range(start, min(start + step, len(source))))
        for example in source.__getitems__(indices):
            yield example[feature]


def _text_feature(folder: Path, features: Any) -> str:
    """Returns the name of the text: "text", or the only one that ends so, or is one."""
    import tensorflow_datasets as tfds

    texts = sorted(
        name
        for name, feature in getattr(features, "items", dict)()
        if isinstance(feature, tfds.features.Text)
    )
    ending = [name for name in texts if name.endswith("text")]
    for names in (["text"] if "text" in texts else [], ending, texts):
        if len(names) == 1:
            return names[0]
    what = f"several texts ({', '.join(texts)})" if texts else "no text"
    raise UserError(
        f"{folder} has {what}: "
        "use a dataset with one feature of text, or give its text as data.corpus='text'"
    )


def _info(folder: Path) -> dict[str, Any]:
    try:
        info = json.loads((folder / INFO).read_text("utf-8"))
    except (*DAMAGE, OSError) as error:
        raise UserError(f"{folder} is damaged ({error}): prepare it again") from error
    if not isinstance(info, dict):
        raise UserError(f"{folder} is damaged ({INFO}): prepare it again")
    return info
